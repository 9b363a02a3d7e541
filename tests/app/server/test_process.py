"""The process: when it listens, what signals do, what it exits with."""

from __future__ import annotations

import resource
import signal
import socket
import subprocess
import sys
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from app.server.process import _raise_file_limit
from loadtest.servers.launch import Server, ranking_server
from loadtest.servers.target import get
from loadtest.soak.servers import FAULTY
from tests.reliability.live import wait_until
from tests.zygote import zygote


def started(*command: str, **settings: object) -> AbstractContextManager[Server]:
    """The server as soon as its process runs, with its log in JSON; `python -m app` without a command."""
    single = {"OMP_NUM_THREADS": "1"}
    return ranking_server(*command, ready_path=None, environment=single, logs__format="json", **settings)


RUN = "import os, resource, runpy, sys; sys.argv = ['app']; {}; runpy.run_module('app', run_name='__main__')"


def event(server: Server, name: str) -> dict[str, Any]:
    """The first log line of a kind, as soon as it is there."""
    wait_until(lambda: f'"event":"{name}"' in server.raw, 30)
    return next(line for line in server.lines if line["event"] == name)


def status(server: Server, path: str) -> int:
    """Of a GET on a connection of its own."""
    return get(f"{server.url}{path}", 5).status_code


def test_the_process_may_hold_more_connections_than_the_shell_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        _raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_start_a_reload_by_signal_a_drain_and_exit_0() -> None:
    with started(*FAULTY, drain__delay_seconds=4) as server:
        server.wait_ready("/livez")
        server.wait_ready()
        server.process.send_signal(signal.SIGTERM)
        event(server, "draining")
        assert status(server, "/readyz") == 503  # at once, and still listening
        assert status(server, "/livez") == 200
        assert server.process.wait(90) == 0
        assert event(server, "stopped")["exit_code"] == 0


def test_sighup_reads_the_checkpoint_again_and_a_second_signal_ends_at_once() -> None:
    with started(drain__delay_seconds="30", device="cpu", backend="dense") as server:
        event(server, "settings")
        server.process.send_signal(signal.SIGHUP)  # there is nothing to be read again yet
        server.wait_ready()
        server.process.send_signal(signal.SIGHUP)
        told = event(server, "unchanged")
        assert told["checkpoint"] == "weights/demo"
        assert 0 <= told["seconds"] < 60
        server.process.send_signal(signal.SIGTERM)
        event(server, "draining")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(90) == 128 + signal.SIGTERM


def test_a_signal_while_loading_ends_in_order() -> None:
    with started(drain__delay_seconds="0") as server:
        assert event(server, "listening")["port"] == server.port
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(90) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_server_runs_ends_the_process_with_0(number: signal.Signals) -> None:
    """Process 1 of a container gets only signals that it handles, so it must handle them while it imports."""
    with subprocess.Popen([sys.executable, "-m", "app", "--port=0"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert '"event":"settings"' in process.stderr.readline()
        process.send_signal(number)
        assert process.wait(90) == 0
        assert "Traceback" not in process.stderr.read()


CLOSING = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-m", "app")
CLOSED = (sys.executable, "-c", RUN.format("sys.stdin = sys.stdout = sys.stderr = None; os.closerange(0, 3)"))


@pytest.mark.parametrize(("command", "fronts"), [(CLOSING, 0), (CLOSED, 1)], ids=["anew", "fronts"])
def test_without_standard_descriptors_the_process_serves_and_ends_with_0(command: tuple[str, ...], fronts: int) -> None:
    with started(*command, fronts=fronts) as server:
        server.wait_ready()
        server.process.terminate()
        assert server.process.wait(90) == 0


@pytest.mark.parametrize(("files", "fronts", "most"), [(200, 0, 100), (300, 1, 172)])
def test_callers_never_take_the_last_descriptors(files: int, fronts: int, most: int) -> None:
    """Otherwise who connects and stays silent keeps out the operators' ports, which do not count, and every reload."""
    limited = RUN.format(f"resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}))")
    with started(sys.executable, "-c", limited, fronts=fronts, probes__port=0) as server, ExitStack() as crowd:
        server.wait_ready()
        told = event(server, "connections_limited")
        assert (told["connections"], told["open_files"]) == (most, files)
        for _ in range(files):
            crowd.enter_context(socket.create_connection(("127.0.0.1", server.port), 10))
        event(server, "listening")
        probes = [line["port"] for line in server.lines if line["event"] == "listening"][1]
        assert get(f"http://127.0.0.1:{probes}/readyz", 5).status_code == 200
        assert get(f"http://127.0.0.1:{probes}/info", 5).status_code == 200


@pytest.mark.parametrize("threads", [0, 1])
def test_a_start_that_gets_no_thread_ends_with_1_and_a_sentence(threads: int) -> None:
    refusing = f"""if True:
        import runpy, sys, threading
        start, left = threading._start_new_thread, [None] * {threads}
        def refuse(*arguments):
            if not left:
                raise RuntimeError("can't start new thread")
            left.pop()
            return start(*arguments)
        threading._start_new_thread, sys.argv = refuse, ["app", "--port=0"]
        runpy.run_module("app", run_name="__main__")"""
    ended = zygote.run([sys.executable, "-c", refusing])
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("python -m app: can't start new thread: the limit of processes")


@pytest.mark.parametrize("place", ["missing", "broken"])
def test_a_checkpoint_that_cannot_be_loaded_ends_the_process_with_1_and_a_sentence(tmp_path: Path, place: str) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{")
    with started(checkpoint=str(tmp_path / place)) as server:
        assert server.process.wait(90) == 1
        assert str(tmp_path / place) in str(event(server, "fatal")["reason"])


def test_a_first_load_that_fails_in_a_drain_ends_the_process_with_1() -> None:
    """Not with 70, which asks the supervisor to try again."""
    with started(*FAULTY, "--refused-after-seconds=1", drain__delay_seconds="30") as server:
        event(server, "listening")
        server.process.send_signal(signal.SIGTERM)
        event(server, "draining")
        assert server.process.wait(90) == 1
        assert event(server, "stopped")["exit_code"] == 1
