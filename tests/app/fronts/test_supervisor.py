"""The whole, as real processes: when it listens, what signals do, what it exits with, and what happens when one of it ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from app.exits import EXIT_FAILED
from app.fronts import supervisor
from app.fronts.role import Role
from app.fronts.supervisor import ENGINE_SECONDS, Supervisor
from app.settings import Drain, Settings
from loadtest.machine import ROOT
from loadtest.servers.launch import HOST, Server, free_port, process, ranking_server
from loadtest.soak.fronts import process_of
from loadtest.soak.servers import FRONTED
from tests.support import corpora
from tests.app.fakes import until
from tests.app.server.test_process import RUN, event, status
from tests.e2e.process import DEMO
from tests.reliability.live import wait_until
from weights.actions import STANDARD_ACTIONS

pytestmark = pytest.mark.anyio


def started(
    *command: str, environment: dict[str, str] | None = None, **settings: object
) -> AbstractContextManager[Server]:
    """Two fronts as soon as their supervisor runs, with its log in JSON; `python -m app` without a command."""
    variables = {"OMP_NUM_THREADS": "1", **(environment or {})}
    chosen = {"fronts": 2, "logs__format": "json", **settings}
    return ranking_server(*command, ready_path=None, environment=variables, **chosen)


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def processes(server: Server) -> list[int]:
    """The fronts and the engine process, once both fronts listen: the server is ready with the first."""
    wait_until(lambda: sum(line["event"] == "listening" for line in server.lines) >= 2)
    return [process_of(server, front) for front in (1, 2, None)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """One that runs, with gRPC where that is installed, and the directory of its temporary files, which is empty afterwards."""
    temporary = tmp_path_factory.mktemp("temporary")
    ports = {"grpc__port": free_port()} if find_spec("grpc") else {}
    with started(*FRONTED, environment={"TMPDIR": str(temporary)}, drain__delay_seconds=1, **ports) as server:
        server.wait_ready()
        yield server, temporary
        assert server.stop() == 0
    assert list(temporary.iterdir()) == []


def test_a_start_a_reload_by_signal_a_drain_and_exit_0() -> None:
    anew = sys.executable, "-P", "-m", "app"  # a forked one has torch
    with started(*anew, drain__delay_seconds=0.5, device="cpu", backend="dense") as server:
        event(server, "engine_started")
        server.process.send_signal(signal.SIGHUP)  # there is nothing to be read again yet
        server.wait_ready("/livez")
        server.wait_ready()
        server.process.send_signal(signal.SIGHUP)
        assert event(server, "unchanged")["checkpoint"] == "weights/demo"
        torch = [
            "libtorch" in Path(f"/proc/{each}/maps").read_text() for each in (*processes(server), server.process.pid)
        ]
        assert torch == [False, False, True, False]
        began = processes(server)
        server.process.send_signal(signal.SIGTERM)
        event(server, "draining")
        wait_until(lambda: status(server, "/readyz") == 503)  # and still listening
        assert status(server, "/livez") == 200
        assert server.process.wait(90) == 0
        assert server.lines[-1]["event"] == "stopped"
        assert [line["exit_code"] for line in server.lines if line["event"] == "stopped"] == [0] * 4, (
            "each says so itself"
        )
        assert not any(map(alive, began))
        assert {line["front"] for line in server.lines if line["event"] == "listening"} == {1, 2}
        assert [line["front"] for line in server.lines if line["event"] == "page"] == [1]


def test_a_second_signal_ends_all_at_once() -> None:
    with started(*FRONTED, drain__delay_seconds=30) as server:
        server.wait_ready()
        began = processes(server)
        server.process.send_signal(signal.SIGINT)
        event(server, "draining")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(90) == 128 + signal.SIGINT
        assert not any(map(alive, began))


def test_nothing_survives_a_supervisor_that_is_killed() -> None:
    with started(*FRONTED) as server:
        server.wait_ready()
        began = processes(server)
        os.kill(began[0], signal.SIGSTOP)
        server.process.kill()
        wait_until(lambda: not any(map(alive, began)))


IDLERS = ["sleep", "1000"], ["sh", "-c", "read number; exec sleep 1000"]  # an engine process and a front
IDLE = """
import asyncio
from app.fronts.supervisor import Supervisor
from app.settings import Settings

asyncio.run(Supervisor(Settings(fronts=1, port=0), ["sleep", "60"], ["sh", "-c", "read number; exec sleep 60"]).run())
"""


def test_what_a_killed_supervisor_leaves_is_removed_by_the_next_one(tmp_path: Path) -> None:
    """Supervisors of processes that do nothing: each has its directory, which another one may only remove when it has ended."""
    other = tmp_path / "ranker-engine-of-mine"  # a name that looks alike, with something of somebody in it
    other.mkdir()
    (other / "notes").write_text("mine")

    def idle() -> AbstractContextManager[Server]:
        return process([sys.executable, "-c", IDLE], {"TMPDIR": str(tmp_path)}, port=1, ready_path=None)

    def directories() -> set[Path]:
        return set(tmp_path.glob("ranker-engine-*")) - {other}  # not what `tempfile` tries the place with

    with idle() as killed:
        wait_until(lambda: len(directories()) == 1, 30)
        [left] = directories()
        with idle() as running:
            wait_until(lambda: len(directories()) == 2, 30)
            killed.process.kill()
            killed.process.wait(10)
            assert left in directories()
            with idle() as further:
                wait_until(lambda: left not in directories() and len(directories()) == 2, 30)  # of those that run
                assert (further.stop(), running.stop()) == (0, 0)
    assert list(tmp_path.iterdir()) == [other]


def test_a_checkpoint_that_cannot_be_loaded_ends_the_whole_with_1() -> None:
    with started(*FRONTED, "--refused-after-seconds=1", fronts=1, drain__delay_seconds=30) as server:
        assert server.process.wait(90) == 1  # without the delay
        assert "planted" in str(event(server, "fatal")["reason"])


def test_settings_that_only_a_front_finds_unusable_end_the_whole_with_2() -> None:
    missing = "sys.modules['opentelemetry.exporter.otlp.proto.http.trace_exporter'] = None"  # also in what it forks
    with started(sys.executable, "-c", RUN.format(missing), fronts=1, tracing__enabled="true") as server:
        assert server.process.wait(90) == 2


def test_a_port_that_is_taken_ends_the_whole_with_3() -> None:
    """Also where the other one would share it, as another supervisor does."""
    with socket.create_server((HOST, 0), reuse_port=True) as taken, started(port=taken.getsockname()[1]) as server:
        assert server.process.wait(90) == 3
        assert event(server, "cannot_listen")["reason"] == "Address already in use"


def test_every_front_serves_grpc_on_one_port(whole: tuple[Server, Path]) -> None:
    grpc = pytest.importorskip("grpc")
    server, _ = whole

    def others() -> list[object]:
        return [line["port"] for line in server.lines if line["event"] == "listening" and line["port"] != server.port]

    wait_until(lambda: len(others()) == 2)
    [port] = set(others())
    for _ in range(4):
        with grpc.insecure_channel(f"{HOST}:{port}") as channel:
            grpc.channel_ready_future(channel).result(10)


def test_when_the_engine_process_ends_fronts_stay_up_and_it_is_started_again_once_for_all() -> None:
    with started(*FRONTED, engine_loss="restart", fronts=1, drain__delay_seconds=30) as server:
        server.wait_ready()
        time.sleep(ENGINE_SECONDS)  # one that lived less is not started again
        first = process_of(server, None)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: status(server, "/readyz") == 503)
        assert status(server, "/livez") == status(server, "/startupz") == 200
        server.wait_ready()
        assert process_of(server, None) != first
        while server.process.poll() is None:  # soon again
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_of(server, None), signal.SIGKILL)
            time.sleep(0.1)
        assert server.process.wait(90) == 70


def test_an_engine_process_that_is_started_again_serves_what_was_loaded_last(tmp_path: Path) -> None:
    """By name, on the admin port: a reload that was answered is not undone. Nothing is left behind at the end."""
    temporary = Path(tempfile.mkdtemp())
    for version in ("v1", "v2"):
        corpora.written(tmp_path, version=version, actions=STANDARD_ACTIONS)
    admin = free_port()
    settings: dict[str, Any] = {
        "checkpoint": DEMO, "fronts": 1, "threads": 1, "admin__port": admin, "admin__root": tmp_path,
        "admin__token_sha256": hashlib.sha256(b"token").hexdigest(), "retrieval__checkpoint": tmp_path / "towers-v1",
        "retrieval__corpus": tmp_path / "corpus-v1", "drain__delay_seconds": 0,
    }  # fmt: skip
    with started(environment={"TMPDIR": str(temporary)}, **settings) as server:
        server.wait_ready()
        time.sleep(ENGINE_SECONDS)  # one that lived less is not started again

        def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
            headers = {"authorization": "Bearer token"}
            reply = httpx.post(f"http://{HOST}:{admin}{path}", headers=headers, json=body, timeout=30)
            found: dict[str, Any] = reply.raise_for_status().json()
            return found

        assert post("/admin/reload", {"retrieval": "towers-v2", "corpus": "corpus-v2"})["result"] == "reloaded"
        assert post("/admin/posts", {"delete": [1]})["deleted"] == 1
        os.kill(process_of(server, None), signal.SIGKILL)
        wait_until(lambda: status(server, "/readyz") == 503)
        server.wait_ready()
        reply = httpx.post(f"{server.url}/retrieve", json={"user_id": 1, "k": 500}).raise_for_status()
        assert reply.headers["x-corpus-version"].startswith("v2+1.")
        assert "1" not in [post["post_id"] for post in reply.json()["posts"]]
        assert post("/admin/reload", {"corpus": "corpus-v2"})["result"] == "unchanged"
        assert server.stop() == 0
    assert list(temporary.glob("ranker-*")) == []
    shutil.rmtree(temporary)


def test_a_directory_whose_name_is_too_long_for_a_socket_is_refused_in_a_sentence() -> None:
    for letters, code in ((78, 2), (77, None)):
        place = Path(tempfile.mkdtemp())
        long = place / ("x" * (letters - len(str(place)) - 1))
        long.mkdir()
        with started(*FRONTED, fronts=1, environment={"TMPDIR": str(long)}) as server:
            if code is None:
                server.wait_ready()
            else:
                assert server.process.wait(20) == code
                assert "TMPDIR is too long" in server.lines[-1]["reason"]
        shutil.rmtree(place)


async def test_a_full_disk_where_the_socket_would_lie_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: str) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with structlog.testing.capture_logs() as lines:
        assert await Supervisor(Settings(fronts=1, port=0), *IDLERS).run() == 2
    assert "TMPDIR: [Errno 28] No space left" in lines[-1]["reason"]


async def test_by_the_other_policy_an_engine_process_that_ends_ends_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "ENGINE_SECONDS", 0.0)
    whole = Supervisor(Settings(fronts=1, port=0, engine_loss="exit", drain=Drain(delay_seconds=30)), *IDLERS)
    ending = asyncio.ensure_future(whole.run())
    await until(lambda: None not in (whole._engine, whole._fronts.get(1)))
    assert whole._engine is not None
    whole._engine.kill()
    assert await asyncio.wait_for(ending, 20) == 70


async def test_a_process_that_the_system_refuses_is_started_a_moment_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes; only the system's refusal is planted."""
    real, refused, times = asyncio.create_subprocess_exec, 0, list[float]()

    async def start(*command: str, **options: Any) -> asyncio.subprocess.Process:
        nonlocal refused
        if refused:
            refused -= 1
            times.append(time.monotonic())
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return await real(*command, **options)

    monkeypatch.setattr(supervisor, "PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(supervisor, "ENGINE_SECONDS", 0.0)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    whole = Supervisor(Settings(fronts=1, port=0), *IDLERS)
    ending = asyncio.ensure_future(whole.run())

    async def replaced(now: Callable[[], asyncio.subprocess.Process | None]) -> None:
        before = now()
        if before is not None:
            before.kill()
        await until(lambda: now() not in (None, before))

    await until(lambda: None not in (whole._engine, whole._spare, whole._fronts.get(1)))
    descriptors = len(os.listdir("/proc/self/fd"))
    refused = 2
    await replaced(lambda: whole._engine)
    assert refused == 0
    assert times[1] - times[0] > 0.09, "not as fast as it can"
    refused = 2  # the next spare, and then a front without one
    for _ in range(2):
        await replaced(lambda: whole._fronts.get(1))
    assert refused == 0
    await until(lambda: whole._spare is not None and len(os.listdir("/proc/self/fd")) == descriptors)
    whole._end(0)
    assert await ending == 0


def test_where_the_system_refuses_threads_processes_are_started_and_started_again() -> None:
    refusing = """if True:
        import os, runpy, sys, threading
        start, left, supervisor = threading._start_new_thread, ["log"], os.getpid()
        def refuse(*arguments):
            if os.getpid() == supervisor and not left:
                raise RuntimeError("can't start new thread")
            left.clear()
            return start(*arguments)
        threading._start_new_thread, sys.argv = refuse, ["app"]
        runpy.run_module("app", run_name="__main__")"""
    with started(sys.executable, "-c", refusing) as server:
        server.wait_ready()
        first = process_of(server, 1)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: process_of(server, 1) != first)
        server.process.terminate()
        assert server.process.wait(90) == 0


def test_the_socket_lies_where_only_we_come_and_takes_no_nonsense(whole: tuple[Server, Path]) -> None:
    server, temporary = whole
    [directory] = temporary.glob("ranker-*")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(20)
        stranger.connect(str(directory / "engine"))
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    event(server, "link_broken")
    assert server.answers()


def test_every_process_gets_the_signal_and_the_drain_is_one(whole: tuple[Server, Path]) -> None:
    """As systemd sends it: to all at once, and the supervisor hands it on. It stands behind all others of this server."""
    server, _ = whole
    for each in (*processes(server), server.process.pid):
        os.kill(each, signal.SIGTERM)
    event(server, "draining")
    assert status(server, "/livez") == 200
    assert server.process.wait(90) == 0


def test_a_front_that_is_assigned_closes_what_is_not_its_own() -> None:
    reader, writer = os.pipe()
    own, other = (socket.create_server(("127.0.0.1", 0)).detach() for _ in range(2))
    os.write(writer, b"1")
    number, [listening] = Role("", os.getpid(), {1: [own], 2: [other]}, reader).wait_assigned()
    assert (number, listening.fileno()) == (1, own)
    for closed in (reader, other):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(closed)
    listening.close()
    os.close(writer)


def test_a_front_whose_number_can_come_no_more_ends_in_silence() -> None:
    code = "import os; from app.fronts.role import Role; reader, writer = os.pipe(); os.close(writer); "
    code += "Role('', 0, {}, reader).wait_assigned()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


async def test_the_socket_of_an_engine_process_is_gone_before_the_next_one_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it is there, the next one is told to reload, of which it would die before it listens."""
    monkeypatch.setattr(supervisor, "ENGINE_SECONDS", 0.0)
    whole = Supervisor(Settings(fronts=1, port=0), *IDLERS)
    start, seen = whole._start, list[bool]()

    async def begin(command: list[str], role: Any) -> Any:
        if command is whole._commands[0]:
            seen.append(os.path.exists(role.path))  # noqa: ASYNC240
            Path(role.path).touch()  # noqa: ASYNC240  # it listens
        return await start(command, role)

    monkeypatch.setattr(whole, "_start", begin)
    ending = asyncio.ensure_future(whole.run())
    await until(lambda: whole._engine is not None)
    assert whole._engine is not None
    whole._engine.kill()
    await until(lambda: len(seen) == 2)
    assert seen == [False, False]
    await until(lambda: whole._engine is not None and whole._engine.returncode is None)
    whole._end(0)
    assert await ending == 0


def test_a_look_at_what_was_left_behind_holds_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor that stays would be a lock on somebody's directory."""
    monkeypatch.setattr(supervisor.tempfile, "gettempdir", lambda: str(tmp_path))
    left, other, ours = (tmp_path / f"{supervisor.PREFIX}{name}" for name in "abc")
    for directory in (left, other, ours):
        directory.mkdir()
    lock = os.open(ours, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    before = len(os.listdir("/proc/self/fd"))
    supervisor._remove_left_behind()
    assert list(tmp_path.iterdir()) == [ours], "its supervisor lives"
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(lock)
    supervisor._remove_left_behind()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_another_supervisor_has_taken_away_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor.tempfile, "gettempdir", lambda: str(tmp_path))
    lock, taken = fcntl.flock, list[Path]()

    def locked(descriptor: int, how: int) -> None:
        if not taken:
            taken.extend(tmp_path.iterdir())
            taken[0].rmdir()
        lock(descriptor, how)

    monkeypatch.setattr(supervisor.fcntl, "flock", locked)
    before = len(os.listdir("/proc/self/fd"))
    directory, held = supervisor._locked_directory()
    assert [Path(directory)] == list(tmp_path.iterdir()) != taken
    assert len(os.listdir("/proc/self/fd")) == before + 1
    os.close(held)


def test_a_front_lets_as_many_connections_wait_as_was_asked() -> None:
    with supervisor._listener("127.0.0.1", 0, 77) as listening:
        told = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 64)
        assert struct.unpack_from("I", told, 28) == (77,), "tcpi_sacked of a listener"


@pytest.mark.parametrize(
    ("who", "ended_with", "whole_ends_with"), [(0, 70, 70), (0, 5, 1), (0, 0, 0), (1, 70, 1), (1, 5, 1)]
)
def test_how_a_process_ends_while_all_end_is_how_the_whole_ends(
    who: int, ended_with: int, whole_ends_with: int
) -> None:
    """The engine process, or a front."""

    async def scenario() -> int:
        commands = list(IDLERS)
        begins = "read number; " if who else ""  # a front, only once it has been assigned
        commands[who] = ["sh", "-c", f"trap 'exit {ended_with}' TERM USR1; {begins}echo; while :; do sleep 0.01; done"]
        whole = Supervisor(Settings(fronts=1, port=0), *commands)
        ending = asyncio.ensure_future(whole.run())
        await until(lambda: None not in (whole._engine, whole._fronts.get(1)))
        await asyncio.sleep(0.3)  # until it has its trap
        whole._end(0)
        return await ending

    assert asyncio.run(scenario()) == whole_ends_with


async def test_an_engine_process_that_starts_when_all_end_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Supervisor(Settings(fronts=1, port=0), *IDLERS)
    start = whole._start

    async def late(command: list[str], role: Any) -> Any:
        if command is whole._commands[0]:
            whole._end(0)
            await asyncio.sleep(0.3)  # all that runs was told to end
        return await start(command, role)

    monkeypatch.setattr(whole, "_start", late)
    began = time.monotonic()
    assert await whole.run() == 0
    assert time.monotonic() - began < 10
    assert not any(alive(process.pid) for process in whole._started)


async def test_a_front_that_has_no_number_when_all_end_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Supervisor(Settings(fronts=1, port=0), *IDLERS)
    take = whole._take_spare

    async def late() -> supervisor.Spare:
        spare = await take()
        whole._end(0)
        await spare.process.wait()  # it was killed, being no front yet
        return spare

    monkeypatch.setattr(whole, "_take_spare", late)
    with structlog.testing.capture_logs() as lines:
        assert await asyncio.wait_for(whole.run(), 20) == 0
    assert "front_started" not in [line["event"] for line in lines]


async def test_fronts_share_one_free_port_and_nobody_is_let_in_while_they_drain() -> None:
    """The supervisor's own listening sockets close: what waits in them would never be accepted."""
    whole = Supervisor(Settings(fronts=2, port=0), *IDLERS)
    ending = asyncio.ensure_future(whole.run())
    await until(lambda: None not in (whole._engine, whole._fronts.get(1), whole._fronts.get(2)))
    held = [each for sockets in whole._listening.values() for each in sockets]
    [port] = {each.getsockname()[1] for each in held}
    assert (len(held), port > 0) == (2, True)
    whole._end(0)
    await ending
    assert [each.fileno() for each in held] == [-1] * len(held)


def test_a_port_of_a_moment_ago_is_free_and_one_that_listens_is_not() -> None:
    """A connection that this side closed leaves the port in TIME_WAIT."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            supervisor._free("127.0.0.1", port)
        with socket.create_connection(("127.0.0.1", port)) as caller:
            accepted, _ = listening.accept()
            accepted.close()
            assert caller.recv(1) == b""
    assert supervisor._free("127.0.0.1", port) == port


def test_sockets_are_handed_on_for_what_fronts_share_and_not_for_grpc() -> None:
    """Each front listens for gRPC by itself; a second listener there would take connections that nobody accepts."""
    ports = [free_port() for _ in range(2)]
    whole = Supervisor(Settings(fronts=2, port=ports[0], grpc={"port": ports[1]}), [], [])  # type: ignore[arg-type]
    assert whole._listen()
    try:
        held = [[each.getsockname()[1] for each in sockets] for sockets in whole._listening.values()]
        assert held == [[port for _, port in whole.settings.addresses()]] * 2
        assert ports[1] not in held[0]
    finally:
        for sockets in whole._listening.values():
            for listening in sockets:
                listening.close()


async def test_a_front_that_does_not_end_is_killed_and_the_whole_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PATIENCE_SECONDS", 0.2)
    stubborn = ["sh", "-c", "trap '' TERM USR1; read number; while :; do sleep 0.05; done"]
    settings = Settings(fronts=1, port=0, drain=Drain(delay_seconds=0, timeout_seconds=0.05))
    whole = Supervisor(settings, ["sleep", "1000"], stubborn)
    ending = asyncio.ensure_future(whole.run())
    await until(lambda: None not in (whole._engine, whole._spare, whole._fronts.get(1)))
    await asyncio.sleep(0.3)  # until it has its trap
    assert whole._engine is not None
    assert whole._spare is not None
    began = [process.pid for process in (whole._engine, whole._fronts[1], whole._spare.process)]
    assert all(map(alive, began))
    with structlog.testing.capture_logs() as lines:
        whole._end(0)
        assert await asyncio.wait_for(ending, 20) == EXIT_FAILED
    assert {"event": "drain_timeout", "processes": 1, "log_level": "error"} in lines
    assert {"event": "stopped", "exit_code": EXIT_FAILED, "log_level": "info"} in lines
    assert not any(map(alive, began))


@pytest.mark.parametrize("is_there", [True, False])
def test_a_process_whose_supervisor_is_gone_by_now_ends_at_once(is_there: bool) -> None:
    """It would be told by nobody any more. One that goes on asks the kernel for SIGKILL when its supervisor ends (PR_GET_PDEATHSIG)."""
    role = Role("", os.getpid() if is_there else os.getppid())
    lines = "Role.inherited()", "asked = c_int()", "CDLL(None).prctl(2, byref(asked))", "print(asked.value)"
    code = f"from ctypes import *; from app.fronts.role import Role; {'; '.join(lines)}"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=role.environment(), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == ((0, "9\n") if is_there else (1, "")), done.stderr


async def test_a_front_that_ended_before_it_had_its_number_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PAUSE_SECONDS", 0.1)
    whole = Supervisor(Settings(fronts=1, port=0), ["sleep", "1000"], ["true"])
    take, numbers, times = whole._take_spare, list[int](), list[float]()

    async def ended() -> supervisor.Spare:
        times.append(time.monotonic())
        spare = await take()
        await spare.process.wait()
        numbers.append(spare.process.pid)
        return spare

    monkeypatch.setattr(whole, "_take_spare", ended)
    ending = asyncio.ensure_future(whole.run())
    await until(lambda: len(numbers) >= 3)
    assert len(set(numbers)) == len(numbers)
    assert min(later - sooner for sooner, later in itertools.pairwise(times)) >= 0.1, "a pause, not a loop"
    whole._end(0)
    assert await ending == 0


async def test_what_is_gone_already_is_no_error(tmp_path: Path) -> None:
    gone = await asyncio.create_subprocess_exec("true")
    await gone.wait()
    supervisor._send(gone, signal.SIGTERM)
    supervisor._remove(tmp_path / "nothing")
    (tmp_path / "somebody").mkdir()
    (tmp_path / "somebody" / "file").touch()
    supervisor._remove(tmp_path / "somebody")
    assert (tmp_path / "somebody" / "file").exists()
