"""The process: where it listens, what signals do, what it exits with."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from prometheus_client import Counter

from app import server
from app.api.acceptor import PAUSE_SECONDS, Acceptor
from app.errors import EngineDown
from app.main import create_app
from app.queue.loading import LoadedModel
from app.queue.runners import Steps
from app.settings import Settings
from loadtest.server import PLAIN, Server, answers, example, free_port, serving, wait_until
from model.engine import EngineError
from tests.app.api.live import BODY, head, listening, read_reply, until
from tests.support import rankers
from tests.support.fakes import FakeEngine, Gate
from weights.errors import CheckpointError

pytestmark = pytest.mark.one_process("it is about a process of its own")
TOKEN = hashlib.sha256(b"token").hexdigest()
HAS_IPV6 = Path("/proc/net/if_inet6").exists() and "0" * 31 + "1" in Path("/proc/net/if_inet6").read_text()


def started(*command: str, **settings: Any) -> AbstractContextManager[Server]:
    """`python -m app` as soon as its process runs, with its log in JSON."""
    settings = {"drain__delay_seconds": 5} | settings
    return serving(command=command or (sys.executable, "-m", "app"), wait_ready=False, **settings)


def ready(running: Server, path: str = "/readyz") -> None:
    """Wait until this path is 200."""
    wait_until(lambda: answers(running, path), 90, running)


def event(running: Server, name: str) -> dict[str, Any]:
    """The first log line of a kind, as soon as it is there."""
    wait_until(lambda: any(line["event"] == name for line in running.log_lines), 60, running)
    return next(line for line in running.log_lines if line["event"] == name)


@pytest.mark.slow
def test_a_start_a_reload_by_signal_a_drain_and_exit_0() -> None:
    with started(drain__delay_seconds=3, admin__port=0, admin__token_sha256=TOKEN, probes__port=0) as running:
        event(running, "settings")
        running.process.send_signal(signal.SIGHUP)  # there is nothing to be read again yet
        ready(running, "/livez")
        ready(running)
        page = event(running, "page")
        assert page["url"] == f"{running.url}/explore"
        assert page["try"].startswith(f"curl -s {running.url}/rank ")
        running.process.send_signal(signal.SIGHUP)
        assert event(running, "unchanged")["checkpoint"].endswith("weights/demo")
        ports = [line["port"] for line in running.log_lines if line["event"] == "listening"]
        assert running.port in ports
        admin, probes = sorted(set(ports) - {running.port}, key=lambda port: status_of(port, "/livez"), reverse=True)
        assert [status_of(probes, path) for path in ("/readyz", "/info", "/metrics", "/rank")] == [200, 200, 200, 404]
        assert status_of(running.port, "/metrics") == 404
        reply = httpx.post(f"http://127.0.0.1:{admin}/admin/reload", headers={"authorization": "Bearer token"})
        assert reply.json()["result"] == "unchanged"
        running.process.send_signal(signal.SIGTERM)
        event(running, "draining")
        assert status_of(running.port, "/readyz") == status_of(probes, "/readyz") == 503  # at once, and still listening
        assert status_of(running.port, "/livez") == 200
        reply = running.post("/rank", example())
        assert (reply.status_code, reply.headers["connection"]) == (200, "close")
        assert running.process.wait(90) == 0
        assert event(running, "stopped")["exit_code"] == 0


def status_of(port: int, path: str) -> int:
    """Of a GET on a connection of its own."""
    return httpx.get(f"http://127.0.0.1:{port}{path}", verify=PLAIN).status_code


@pytest.mark.slow
def test_a_signal_while_loading_ends_in_order() -> None:
    with started(drain__delay_seconds=0.2) as running:
        assert event(running, "listening")["port"] == running.port
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(90) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_server_runs_ends_the_process_with_0(number: signal.Signals) -> None:
    """Process 1 of a container gets only signals that it handles, so it must handle them while it imports."""
    with subprocess.Popen([sys.executable, "-m", "app", "--port=0"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert '"event":"settings"' in process.stderr.readline()
        process.send_signal(number)
        assert process.wait(90) == 0
        assert "Traceback" not in process.stderr.read()


def test_a_signal_in_a_callback_of_an_import_is_not_lost() -> None:
    """Python drops exceptions of such callbacks, so a handler that raises would have the process start and serve."""
    program = """if True:
        import runpy, signal, sys, weakref
        class Module: pass
        class Finder:
            def find_spec(name, path, target=None):
                if name == "app.server":
                    module = Module()
                    watched = weakref.ref(module, lambda _: signal.raise_signal(signal.SIGTERM))
                    del module
        sys.meta_path.insert(0, Finder)
        sys.argv = ["app", "--port=0"]
        runpy.run_module("app", run_name="__main__")"""
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if '"event":"listening"' in line:
                process.kill()
        assert process.wait(90) == 0


CLOSING = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-m", "app")


@pytest.mark.slow
def test_a_second_signal_ends_at_once_but_not_within_a_second() -> None:
    """make sends one signal both to the process and to its group. The standard descriptors are closed."""
    with started(*CLOSING, drain__delay_seconds=30) as running:
        ready(running)
        running.process.terminate()
        os.killpg(running.process.pid, signal.SIGTERM)
        wait_until(lambda: not answers(running), 30, running)
        assert running.post("/rank", example()).status_code == 200
        time.sleep(server.SAME_SIGNAL_SECONDS)
        running.process.terminate()
        assert running.process.wait(30) == 128 + signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("threads", [0, 1])
def test_a_start_that_gets_no_thread_ends_with_1_and_a_sentence(threads: int) -> None:
    refusing = f"""if True:
        import runpy, sys, threading
        start, left = threading.Thread.start, [None] * {threads}
        def refuse(thread):
            if not left:
                raise RuntimeError("can't start new thread")
            left.pop()
            start(thread)
        threading.Thread.start, sys.argv = refuse, ["app", "--port=0"]
        runpy.run_module("app", run_name="__main__")"""
    ended = subprocess.run([sys.executable, "-c", refusing], capture_output=True, text=True, timeout=90)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("python -m app: can't start new thread: the limit of processes")


def test_an_address_that_is_taken_ends_the_process_with_3() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        unchanged_file_limit(),
        structlog.testing.capture_logs() as lines,
    ):
        port = taken.getsockname()[1]
        assert server.run(Settings(port=port), rankers.create()) == 3
    assert [line["port"] for line in lines if line["event"] == "cannot_listen"] == [port]


@contextmanager
def unchanged_file_limit() -> Iterator[int]:
    """The hard limit of open files; both limits are as before at the end."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        yield before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("fault", "code"), [("engine", 70), ("load", 1)])
def test_engine_loss_and_failed_first_load_have_exit_codes(fault: str, code: int) -> None:
    def lose(items: object) -> None:
        raise EngineError("planted", sticky=True)

    def refuse(path: Path, steps: Steps) -> LoadedModel:
        raise CheckpointError("planted")

    async def scenario() -> int:
        ranker = rankers.create(FakeEngine(before=lose), load=refuse if fault == "load" else None)
        sockets = server.bind("127.0.0.1", 0)
        running = server.Server(create_app(Settings(), ranker), sockets, ranker, ranker.settings)
        serving = asyncio.ensure_future(server.serve(running.serve(running.sockets), []))
        if fault == "engine":
            await rankers.until(lambda: ranker.health().ready)
            with pytest.raises(EngineDown):
                await rankers.rank(ranker, 1)
        await serving
        return running.exit_code

    assert asyncio.run(scenario()) == code


def test_a_begun_request_is_answered_and_no_new_one_accepted() -> None:
    gate = Gate()
    with listening(FakeEngine(before=gate)) as live:
        idle, busy = live.connect(), live.connect()
        busy.sendall(head() + BODY)
        assert gate.entered.wait(10)
        live.server.should_exit = True
        until(lambda: not is_listening(live.port))
        time.sleep(0.2)
        idle.sendall(head("GET", "/livez", length=None))  # sent just as the server began to stop
        status, headers, _ = read_reply(idle)
        assert (status, headers["connection"]) == (200, "close")
        gate.opened.set()
        status, headers, _ = read_reply(busy)
        assert (status, headers["connection"]) == (200, "close")
        assert busy.recv(1) == b""


def is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def test_requests_that_outlast_the_drain_get_503_and_exit_code() -> None:
    gate = Gate()
    with listening(FakeEngine(before=gate), drain={"timeout_seconds": 0.2}) as live:
        sending, waiting, probing = live.connect(), live.connect(), live.connect()
        sending.sendall(head() + BODY[:-1])
        waiting.sendall(head() + BODY)
        assert gate.entered.wait(10)
        probing.sendall(head("GET", "/livez", length=None))
        assert read_reply(probing)[0] == 200  # by now the head of the other one has been read
        live.server.should_exit = True
        until(lambda: live.server.exit_code == 1)
        for client in (waiting, sending):
            status, headers, body = read_reply(client)
            assert (status, headers["connection"], headers["content-type"]) == (
                503,
                "close",
                "application/problem+json",
            )
            assert (json.loads(body)["code"], int(headers["retry-after"])) == ("draining", 5)
        gate.opened.set()


@pytest.mark.parametrize("side", ["probes", "admin"])
def test_a_slow_client_of_a_side_port_does_not_hold_the_end(side: str) -> None:
    """It reads no reply, or has sent half a body."""
    port = free_port()
    groups: dict[str, Any] = {"probes": {"port": port}, "admin": {"port": port, "token_sha256": TOKEN}}
    with listening(drain={"timeout_seconds": 1.0}, **{side: groups[side]}) as live, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", port))
        slow.settimeout(0.5)
        if side == "probes":
            with suppress(TimeoutError):
                while True:
                    slow.sendall(head("GET", "/metrics", length=None))
        else:
            slow.sendall(head(path="/admin/posts", headers={"authorization": "Bearer token"}) + BODY[:10])
            time.sleep(0.2)
        live.server.should_exit = True
        [running] = [thread for thread in threading.enumerate() if thread.name == "server of a test"]
        running.join(8)
        assert not running.is_alive()
        assert live.server.exit_code == 0


STOPPED = """if True:
    import asyncio, os, signal, sys, threading, time
    from app import server
    from tests.app.api.live import until
    from tests.support import rankers
    def end():
        until(lambda: ranker.health().ready, 50)
        os.kill(os.getpid(), signal.SIGTERM)
    ranker = rankers.create(port=0, drain={"delay_seconds": 0})
    threading.Thread(target=end).start()
"""
"""A process that is told to stop once it serves."""


def code_of(program: str) -> int:
    """The exit code of a process of its own: the end of a service may be the end of its process. It raises nothing, which gives 1 too."""
    command = [sys.executable, "-c", STOPPED + textwrap.indent(program, "    ")]
    done = subprocess.run(command, timeout=60, stderr=subprocess.PIPE, text=True)
    assert not re.search(r"^\w*(Error|Exception)\b", done.stderr, re.MULTILINE), done.stderr
    return done.returncode


@pytest.mark.slow
def test_a_signal_after_the_end_changes_no_exit_code() -> None:
    program = """
late = []
numbers = signal.SIGTERM, signal.SIGINT
for number in numbers:
    signal.signal(number, lambda sent, _: late.append(sent))
code = server.run(ranker.settings, ranker)
for number in numbers:
    os.kill(os.getpid(), number)
time.sleep(0.05)
sys.exit(9 if late else code)
"""
    assert code_of(program) == 0


@pytest.mark.slow
def test_work_that_hangs_at_the_end_gives_1_and_holds_nothing() -> None:
    """Such as a change of posts in a thread that waits for a disk."""
    program = """
stop = ranker.stop
async def stop_in_time(seconds):
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    await stop(seconds)
    return False
ranker.stop = stop_in_time
sys.exit(server.run(ranker.settings, ranker))
"""
    assert code_of(program) == 1


def test_requests_under_way_at_the_end_are_not_lost() -> None:
    """Clients that ask as fast as they can while the server stops: every request that reached it has its reply."""
    lost: list[str] = []
    asked = [0]

    def ask(port: int) -> None:
        try:
            connection = socket.create_connection(("127.0.0.1", port), 10)
        except OSError:
            return
        with connection:
            while True:
                connection.sendall(head() + BODY)
                asked[0] += 1
                try:
                    status, headers, _ = read_reply(connection)
                except (OSError, EOFError) as error:
                    lost.append(repr(error))
                    return
                if status != 200 or headers.get("connection") == "close":
                    return

    for stops in range(3):
        with listening() as live:
            threads = [threading.Thread(target=ask, args=(live.port,)) for _ in range(8)]
            for thread in threads:
                thread.start()
            until(lambda stops=stops: asked[0] > 50 * (stops + 1))  # type: ignore[misc]
            live.server.should_exit = True
            for thread in threads:
                thread.join(30)
    assert lost == []


@pytest.mark.parametrize(
    ("host", "families"),
    [("127.0.0.1", [4]), ("::1", [6]), ("[::1]", [6]), ("127.0.0.1,::1", [4, 6]), ("*", [4, 6])],
)
def test_both_families_are_listened_on_where_they_are_asked_for(host: str, families: list[int]) -> None:
    if 6 in families and not HAS_IPV6:
        families = [4] if host == "*" else pytest.skip("this machine has no IPv6")
    with listening(host=host) as live:
        assert len({each.getsockname()[1] for each in live.server.sockets}) == 1
        for family, address in ((4, "127.0.0.1"), (6, "[::1]")):
            try:
                status = httpx.get(f"http://{address}:{live.port}/livez").status_code
            except httpx.ConnectError:
                status = 0
            assert status == (200 if family in families else 0), address


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "127.0.0.2,::1", "*"])
def test_the_images_health_check_asks_where_the_service_listens(host: str) -> None:
    if ":" in host and not HAS_IPV6:
        pytest.skip("this machine has no IPv6")
    found = re.search(r"HEALTHCHECK.* CMD (\[.*\])", Path("Dockerfile").read_text())
    assert found is not None
    program, *words = json.loads(found[1])
    assert program == "python"

    def check(port: int) -> int:
        environment = {"RANKER_HOST": host, "RANKER_PORT": str(port), "http_proxy": "http://127.0.0.1:9"}
        return subprocess.run((sys.executable, *words), env=environment, timeout=30, check=False).returncode

    with listening(host=host, hosts="ranker.example") as live:
        assert check(live.port) == 0
        live.ranker.begin_drain()
        assert check(live.port) == 1
    assert check(live.port) == 1


def test_the_health_check_takes_an_empty_setting_for_none() -> None:
    environment = {"RANKER_HOST": "", "RANKER_PORT": ""}  # as compose sets what it does not know
    command = (sys.executable, "-m", "app.healthcheck")
    done = subprocess.run(command, env=environment, timeout=30, check=False, capture_output=True)
    assert (done.returncode in (0, 1), done.stderr) == (True, b""), "something else may listen on port 8000"


def test_a_host_that_cannot_be_bound_leaves_nothing_open() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken, pytest.raises(OSError, match="in use"):
        server.bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(OSError, match="known"):
        server.bind("nowhere.invalid", 0)
    with pytest.raises(OSError, match="in use"):
        server.bind("0.0.0.0,127.0.0.1", 0)
    with closing(socket.socket()) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))  # another process that is about to listen
        [sock] = server.bind("127.0.0.1", other.getsockname()[1])
        with closing(sock), pytest.raises(OSError, match="in use"):
            other.listen()


def test_without_ipv6_every_address_is_every_ipv4_address(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ipv4Alone(socket.socket):
        def __init__(self, family: int = socket.AF_INET, *rest: Any, **named: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
            super().__init__(family, *rest, **named)

    monkeypatch.setattr(socket, "socket", Ipv4Alone)
    [sock] = server.bind("*", 0)
    with closing(sock):
        assert is_listening(sock.getsockname()[1])
    with pytest.raises(OSError, match="not supported"):
        server.bind("::1", 0)


def test_the_process_may_hold_more_files_than_the_shell_allows() -> None:
    with unchanged_file_limit() as most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
        server.raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256


class Full(socket.socket):
    """A listening socket of a process that has no file descriptors left."""

    def accept(self) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_no_attempt_follows_the_end_of_a_port_without_room() -> None:
    faults = list[dict[str, Any]]()

    async def end() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, fault: faults.append(fault))
        with Full() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            acceptor = Acceptor(listener, asyncio.Protocol, Counter("shortages", "", registry=None))
            acceptor.accept()
            acceptor.close()
            await asyncio.sleep(2 * PAUSE_SECONDS)

    asyncio.run(end())
    assert faults == []
