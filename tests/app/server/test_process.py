"""The process: when it listens, what signals do, what it exits with."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


class Process:
    """`python -m MODULE` with its log as it comes."""

    def __init__(self, module: str, *arguments: str, **environ: str) -> None:
        chosen = {f"RANKER_{name.upper()}": value for name, value in environ.items()}
        defaults = {"RANKER_PORT": "0", "RANKER_LOGS__FORMAT": "json", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", module, *arguments]
        self.popen = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **defaults, **chosen}, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[dict[str, object]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.lines.append(json.loads(line) if line.startswith("{") else {"event": "text", "text": line})

    def event(self, name: str, seconds: float = 30) -> dict[str, object]:
        """Wait for the first log line of a kind."""
        self.wait(lambda: any(line["event"] == name for line in list(self.lines)), seconds)
        return next(line for line in self.lines if line["event"] == name)

    def get(self, path: str) -> int:
        """The status of a GET on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", int(str(self.event("listening")["port"])), timeout=5)
        connection.request("GET", path)
        status = connection.getresponse().status
        connection.close()
        return status

    def wait(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, self.lines[-5:]
            time.sleep(0.01)


@contextmanager
def process(module: str, *arguments: str, **environ: str) -> Iterator[Process]:
    found = Process(module, *arguments, **environ)
    try:
        yield found
    finally:
        found.popen.kill()
        found.popen.wait(10)


def test_a_start_a_reload_by_signal_a_drain_and_exit_0() -> None:
    with process("loadtest.soak.faulty_server", drain__delay_seconds="0.5") as server:
        assert server.get("/livez") == 200
        server.wait(lambda: server.get("/readyz") == 200)
        server.popen.send_signal(signal.SIGTERM)
        server.event("draining")
        assert server.get("/readyz") == 503  # at once, and still listening
        assert server.get("/livez") == 200
        assert server.popen.wait(10) == 0
        assert server.event("stopped")["exit_code"] == 0


def test_sighup_reads_the_checkpoint_again_and_a_second_signal_ends_at_once() -> None:
    with process("app", drain__delay_seconds="30", device="cpu", backend="dense") as server:
        server.wait(lambda: server.get("/readyz") == 200)
        server.popen.send_signal(signal.SIGHUP)
        assert server.event("reloaded")["checkpoint"] == "weights/demo"
        server.popen.send_signal(signal.SIGTERM)
        server.event("draining")
        began = time.monotonic()
        server.popen.send_signal(signal.SIGTERM)
        assert server.popen.wait(5) == 128 + signal.SIGTERM
        assert time.monotonic() - began < 2


def test_a_signal_while_loading_ends_in_order() -> None:
    with process("app", drain__delay_seconds="0") as server:
        server.event("listening")
        server.popen.send_signal(signal.SIGTERM)
        assert server.popen.wait(20) == 0


@pytest.mark.parametrize("place", ["missing", "broken"])
def test_a_checkpoint_that_cannot_be_loaded_ends_the_process_with_1_and_a_sentence(tmp_path: Path, place: str) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{")
    with process("app", checkpoint=str(tmp_path / place)) as server:
        assert server.popen.wait(30) == 1
        assert str(tmp_path / place) in str(server.event("fatal")["reason"])


def test_a_first_load_that_fails_in_a_drain_ends_the_process_with_1() -> None:
    """Not with 70, which asks the supervisor to try again."""
    with process("loadtest.soak.faulty_server", "--refused-after-seconds=1", drain__delay_seconds="30") as server:
        server.event("listening")
        server.popen.send_signal(signal.SIGTERM)
        server.event("draining")
        assert server.popen.wait(20) == 1
        assert server.event("stopped")["exit_code"] == 1
