"""Starts a server as a process on a free port, waits until it is ready, and stops it. Sends no load."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from loadtest.machine import ROOT
from loadtest.servers.target import Target, TargetError, get

START_SECONDS = 180.0
STOP_SECONDS = 60.0
LOG_TAIL_CHARACTERS = 2_000


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is ready, in a process group of its own."""

    target: Target
    group: int

    def pause(self) -> None:
        """Stop all its processes, so that an idle server takes nothing from the one that is measured."""
        os.killpg(self.group, signal.SIGSTOP)

    def resume(self) -> None:
        """Go on where `pause` stopped."""
        os.killpg(self.group, signal.SIGCONT)


@contextmanager
def ranking_server(
    *,
    checkpoint: Path | None = None,
    environment: Mapping[str, str] | None = None,
    root: Path = ROOT,
    python: str = sys.executable,
) -> Iterator[Target]:
    """`python -m app` of the checkout at `root`, ready; `environment` holds `RANKER_…` settings. Raises TargetError if it fails."""
    with ranking_process(checkpoint, environment or {}, root=root, python=python) as running:
        yield running.target


@contextmanager
def ranking_process(
    checkpoint: Path | None, environment: Mapping[str, str], *, root: Path = ROOT, python: str = sys.executable
) -> Iterator[Running]:
    """The same, with a hold on its processes."""
    port = free_port()
    settings = {"RANKER_HOST": "127.0.0.1", "RANKER_PORT": str(port), "RANKER_LOGS__SUCCESS_SAMPLE": "0"}
    settings |= {"RANKER_DRAIN__DELAY_SECONDS": "0", **environment}
    if checkpoint is not None:
        settings["RANKER_CHECKPOINT"] = str(checkpoint.resolve())
    with process([python, "-m", "app"], settings, root=root, port=port, ready_path="/readyz") as server:
        yield Running(Target("127.0.0.1", port), server.pid)


@contextmanager
def process(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    root: Path,
    port: int,
    ready_path: str,
    log_file: IO[bytes] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Any server: 200 on `ready_path` means ready. `root` comes first on its import path. Its log is quoted where it fails,
    and kept in `log_file` where one is given."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RANKER_")}
    with nullcontext(log_file) if log_file else tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            list(command),
            cwd=root,
            env={**inherited, "PYTHONPATH": str(root), **environment},
            stdout=log,
            stderr=log,
            start_new_session=True,  # a group of its own: some stacks leave their workers behind
        )
        try:
            _wait_ready(server, f"http://127.0.0.1:{port}{ready_path}", log.fileno())
            yield server
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGCONT)  # a paused process would not hear of its end
            server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.wait(STOP_SECONDS)
            with suppress(ProcessLookupError):  # usually nobody is left
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _wait_ready(server: subprocess.Popen[bytes], url: str, log: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise TargetError(f"the server ended with code {server.returncode} before it was ready:\n{_tail(log)}")
        try:
            if get(url, 2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise TargetError(f"the server was not ready after {START_SECONDS:.0f} s:\n{_tail(log)}")


def _tail(log: int) -> str:
    size = os.fstat(log).st_size
    start = max(0, size - LOG_TAIL_CHARACTERS)
    return os.pread(log, LOG_TAIL_CHARACTERS, start).decode(errors="replace")
