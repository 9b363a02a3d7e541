"""The whole, as real processes: when it listens, what signals do, what it exits with, and what happens when one of it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.app.server.test_process import Process, process

FAULTY = "loadtest.soak.faulty_fronts"
PLANTED = "--refused-after-seconds=1"


def pid(server: Process, event: str, **fields: object) -> int:
    """The process that the last such line names."""
    server.event(event)
    found = [line for line in server.lines if line["event"] == event and fields.items() <= line.items()]
    return int(str(found[-1]["process"]))


def is_ready(server: Process) -> bool:
    return server.get("/readyz") == 200


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@contextlib.contextmanager
def environment(**changed: str) -> Iterator[None]:
    """For processes that are started inside."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changed.items():
            patch.setenv(name, value)
        yield


def libraries(process: int) -> str:
    return Path(f"/proc/{process}/maps").read_text()


def test_a_start_a_drain_and_exit_0() -> None:
    with process(FAULTY, fronts="2", drain__delay_seconds="0.5") as server:
        assert server.get("/livez") == 200
        server.wait(lambda: is_ready(server))
        processes = [pid(server, "front_started", front=1), pid(server, "front_started", front=2), server.popen.pid]
        for each in processes:
            assert "libtorch" not in libraries(each)
        assert "libtorch" in libraries(pid(server, "engine_started"))
        server.popen.send_signal(signal.SIGTERM)
        server.event("draining")
        server.wait(lambda: server.get("/readyz") == 503)  # and still listening
        assert server.get("/livez") == 200
        assert server.popen.wait(10) == 0
        server.wait(lambda: server.lines[-1].get("event") == "stopped")
        assert server.lines[-1]["exit_code"] == 0
        assert not any(alive(each) for each in (*processes, pid(server, "engine_started")))
        assert {line.get("front") for line in server.lines if line["event"] == "listening"} == {1, 2}


def test_every_process_gets_the_signal_and_the_drain_is_one() -> None:
    """As systemd sends it: to all at once, and the supervisor hands it on."""
    with process(FAULTY, fronts="2", drain__delay_seconds="1") as server:
        server.wait(lambda: is_ready(server))
        for each in (pid(server, "engine_started"), pid(server, "front_started", front=1), server.popen.pid):
            os.kill(each, signal.SIGTERM)
        time.sleep(0.3)
        assert server.get("/livez") == 200
        assert server.popen.wait(10) == 0


def test_a_second_signal_ends_all_at_once() -> None:
    with process(FAULTY, fronts="1", drain__delay_seconds="30") as server:
        server.wait(lambda: is_ready(server))
        processes = [pid(server, "front_started"), pid(server, "engine_started")]
        server.popen.send_signal(signal.SIGINT)
        server.event("draining")
        server.popen.send_signal(signal.SIGINT)
        assert server.popen.wait(5) == 128 + signal.SIGINT
        assert not any(alive(each) for each in processes)


def test_nothing_survives_a_supervisor_that_is_killed() -> None:
    with process(FAULTY, fronts="1") as server:
        server.wait(lambda: is_ready(server))
        processes = [pid(server, "front_started"), pid(server, "engine_started")]
        os.kill(processes[0], signal.SIGSTOP)
        server.popen.kill()
        server.wait(lambda: not any(alive(each) for each in processes), 5)


def test_a_checkpoint_that_cannot_be_loaded_ends_the_whole_with_1() -> None:
    with process(FAULTY, PLANTED, fronts="2", drain__delay_seconds="30") as server:
        assert server.popen.wait(30) == 1  # without the delay
        assert "planted" in str(server.event("fatal")["reason"])


def test_settings_that_only_a_front_finds_unusable_end_the_whole_with_2(tmp_path: Path) -> None:
    missing = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules[{missing!r}] = None")
    with environment(PYTHONPATH=str(tmp_path)), process("app", fronts="1", tracing__enabled="true") as server:
        assert server.popen.wait(30) == 2


def test_a_port_that_is_taken_ends_the_whole_with_3() -> None:
    """Also where the other one would share it, as another supervisor does."""
    with (
        socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken,
        process("app", fronts="2", port=str(taken.getsockname()[1])) as server,
    ):
        assert server.popen.wait(20) == 3
        assert server.event("cannot_listen")["reason"] == "Address already in use"


@pytest.mark.parametrize("policy", ["exit", "restart"])
def test_when_the_engine_process_ends_fronts_stay_up_until_the_policy_says_otherwise(policy: str) -> None:
    with process(FAULTY, fronts="2", engine_loss=policy, drain__delay_seconds="30") as server:
        server.wait(lambda: is_ready(server))
        time.sleep(5)  # one that lived less is not started again
        first = pid(server, "engine_started")
        os.kill(first, signal.SIGKILL)
        if policy == "exit":
            assert server.popen.wait(10) == 70
        else:
            server.wait(lambda: server.get("/readyz") == 503)
            assert server.get("/livez") == server.get("/startupz") == 200
            server.wait(lambda: is_ready(server))
            assert pid(server, "engine_started") != first
            second = pid(server, "engine_started")
            os.kill(second, signal.SIGKILL)  # at once again
            assert server.popen.wait(10) == 70


def test_sighup_reads_the_checkpoint_again() -> None:
    with process("app", fronts="1", drain__delay_seconds="0", device="cpu", backend="dense") as server:
        server.wait(lambda: is_ready(server))
        server.popen.send_signal(signal.SIGHUP)
        assert server.event("reloaded")["checkpoint"] == "weights/demo"


def test_the_socket_lies_where_only_we_come_and_takes_no_nonsense(tmp_path: Path) -> None:
    with environment(TMPDIR=str(tmp_path)), process(FAULTY, fronts="1", drain__delay_seconds="0") as server:
        server.wait(lambda: is_ready(server))
        [directory] = tmp_path.glob("ranker-*")
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(5)
            stranger.connect(str(directory / "engine"))
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        server.event("link_broken")
        assert is_ready(server)
        server.popen.send_signal(signal.SIGTERM)
        assert server.popen.wait(10) == 0
        assert list(tmp_path.iterdir()) == []
