"""Starts a server process, waits until it is ready, reads its log, and stops it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from loadtest.machine import ROOT
from loadtest.servers.target import Target, TargetError

APP = (sys.executable, "-m", "app")
HOST = "127.0.0.1"
START_SECONDS = 180.0
STOP_SECONDS = 60.0
LOG_TAIL_CHARACTERS = 2_000
SETPRIV = shutil.which("setpriv")  # of util-linux
WITH_US = (SETPRIV, "--pdeathsig", "KILL") if SETPRIV else ()
_STARTER = ThreadPoolExecutor(1)  # a thread that stays: the kernel's signal comes when the starting thread ends


def start_process(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process that the kernel kills however this one ends. Options are those of `subprocess.Popen`."""
    return _STARTER.submit(lambda: subprocess.Popen([*WITH_US, *command], **options)).result()


@dataclass(frozen=True, slots=True)
class Server:
    """A server process in its own process group, its address, and its log file."""

    process: subprocess.Popen[bytes]
    target: Target
    log: IO[bytes]

    @property
    def port(self) -> int:
        """Its port on the loopback interface."""
        return self.target.port

    @property
    def url(self) -> str:
        """`http://127.0.0.1:port`."""
        return self.target.origin

    @property
    def raw(self) -> str:
        """The whole log so far."""
        log = self.log.fileno()
        return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The log lines that are JSON objects, parsed."""
        return [json.loads(line) for line in self.raw.split("\n")[:-1] if line.startswith("{")]

    def answers(self, path: str = "/readyz") -> bool:
        """Whether a GET gets 200 now."""
        return self.target.answers(path)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels, 0 if it does not exist."""
        return self.target.total(name)

    def status(self, name: str) -> int:
        """A figure from the process's /proc status: a count, or KiB."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(dict(line.split(":", 1) for line in lines)[name].split()[0])

    def reset_peak(self) -> int:
        """Begin to watch the peak of resident memory, `status("VmHWM")`, from now on; return what is resident, in KiB."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return self.status("VmRSS")

    def pause(self) -> None:
        """Stop all its processes, so that an idle server takes no time from the measured one."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue after `pause`."""
        os.killpg(self.process.pid, signal.SIGCONT)

    def wait_ready(self, path: str = "/readyz") -> None:
        """Wait until it answers. Raises TargetError with the end of its log if it exits or does not get ready in time."""
        came = wait_until(lambda: self.process.poll() is not None or self.answers(path), START_SECONDS, 0.05)
        code = self.process.poll()
        if not came or code is not None:
            reason = (
                f"ended with code {code} before it was ready" if came else f"was not ready in {START_SECONDS:.0f} s"
            )
            raise TargetError(f"the server {reason}:\n{self.raw[-LOG_TAIL_CHARACTERS:]}")

    def stop(self) -> int:
        """Send SIGTERM, then SIGKILL to the rest of its group; return the exit code."""
        with suppress(ProcessLookupError):
            self.resume()  # a paused process would not see the signal
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


def wait_until(condition: Callable[[], object], seconds: float, every_seconds: float = 0.01) -> bool:
    """Wait until the condition holds; return whether it did in time."""
    until = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < until:
        time.sleep(every_seconds)
    return bool(holds)


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def process(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    port: int,
    root: Path = ROOT,
    ready_path: str | None = "/readyz",
    log: IO[bytes] | None = None,
) -> Iterator[Server]:
    """Run any server, and stop it at the end. It is ready when `ready_path` gets 200; None: do not wait.

    `root` is its directory and comes first on its import path. `log` is the file for its output, by default a temporary one.
    Raises TargetError if it does not get ready.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RANKER_")}
    with nullcontext(log) if log else tempfile.TemporaryFile() as file:
        popen = start_process(
            command,
            cwd=root,
            env={**inherited, "PYTHONPATH": str(root), **environment},
            stdout=file,
            stderr=file,
            start_new_session=True,  # its own group, since some stacks leave workers behind
        )
        server = Server(popen, Target(HOST, port), file)
        try:
            if ready_path is not None:
                server.wait_ready(ready_path)
            yield server
        finally:
            server.stop()


@contextmanager
def ranking_server(
    *command: str,
    root: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    ready_path: str | None = "/readyz",
    log: IO[bytes] | None = None,
    **settings: object,
) -> Iterator[Server]:
    """Run this project's service with `command`, by default `python -m app`. `settings` by name, such as `queue__max_candidates=5`."""
    port = int(str(settings.get("port") or free_port()))
    chosen = {"host": HOST, "port": port, "drain__delay_seconds": 0, "logs__success_sample": 0, **settings}
    variables = {f"RANKER_{name.upper()}": _text(value) for name, value in chosen.items()}
    variables |= environment or {}
    with process(command or APP, variables, port=port, root=root, ready_path=ready_path, log=log) as server:
        yield server


def _text(value: object) -> str:
    return str(value.resolve() if isinstance(value, Path) else value)
