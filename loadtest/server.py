"""Starts the service as a process of its own, as an operator does, and talks to it. Tests and benchmarks start it in no other way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from loadtest.machine import ROOT

DEMO, TOWERS, POSTS = (ROOT / "weights" / name for name in ("demo", "demo-towers", "demo-posts"))
START_SECONDS = 120.0
STOP_SECONDS = 60.0
PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For httpx's `verify`: nothing here speaks TLS, and by default each call would read all of the machine's certificates for 25 ms."""


@dataclass
class Server:
    """A running service: its process, its address, its log."""

    process: subprocess.Popen[bytes]
    port: int
    log: IO[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log_text(self) -> str:
        """Everything logged so far."""
        return os.pread(self.log.fileno(), os.fstat(self.log.fileno()).st_size, 0).decode(errors="replace")

    @property
    def log_lines(self) -> list[dict[str, Any]]:
        """The log lines that are JSON objects."""
        return [json.loads(line) for line in self.log_text.splitlines() if line.startswith("{") and line.endswith("}")]

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, verify=PLAIN)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"content-type": "application/json"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        return httpx.post(self.url + path, content=content, headers=fields, timeout=60, verify=PLAIN)

    def metric(self, name: str, **labels: str) -> float:
        """See `total`."""
        return total(self.get("/metrics").text, name, **labels)

    def connect(self, seconds: float = 15.0) -> socket.socket:
        """A connection that fails rather than hangs."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=seconds)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = STOP_SECONDS) -> int:
        """Wait for the end; return the exit code. Raises TimeoutError with the end of the log."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"still runs after {seconds} s:\n{self.log_text[-4000:]}") from None

    def status_field(self, name: str) -> int:
        """A figure of /proc/PID/status, such as VmHWM in KiB or Threads."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1])
        raise KeyError(name)


def total(exposition: str, name: str, **labels: str) -> float:
    """The sum of the samples of this name with these labels in the text of `/metrics`; 0 where there is none."""
    families = text_string_to_metric_families(exposition)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


@contextmanager
def serving(
    checkpoint: Path = DEMO,
    *,
    command: Sequence[str] = (sys.executable, "-m", "app"),
    retrieval: bool = False,
    wait_ready: bool = True,
    env: dict[str, str] | None = None,
    cwd: Path = ROOT,
    **settings: Any,
) -> Iterator[Server]:
    """Serve a checkpoint on a free port until the block ends. `settings` are the service's own, groups joined by two underscores:
    `queue__max_candidates=64`. `retrieval`: with the demo's towers and posts."""
    port = settings.pop("port", None) or free_port()
    values: dict[str, Any] = {"drain__delay_seconds": 0, "logs__format": "json"} | settings
    values |= {"checkpoint": checkpoint, "port": port}
    copy = tempfile.TemporaryDirectory()  # a corpus belongs to one process at a time
    if retrieval:
        shutil.copytree(POSTS, Path(copy.name) / "posts")
        values = {"retrieval__checkpoint": TOWERS, "retrieval__corpus": Path(copy.name) / "posts"} | values
    chosen = {f"RANKER_{name.upper()}": str(value) for name, value in values.items()}
    environment = {"PYTHONPATH": str(ROOT)} | chosen | (env or {})
    ready = "/readyz" if wait_ready else ""
    with copy, running(command, environment, port=port, ready=ready, cwd=cwd) as server:
        yield server


@contextmanager
def running(
    command: Sequence[str], env: Mapping[str, str], *, port: int = 0, ready: str = "/readyz", cwd: Path = ROOT
) -> Iterator[Server]:
    """Run any server until the block ends. `{port}` in the command is replaced; `ready`: the path that is 200 once it serves, empty
    not to wait."""
    port = port or free_port()
    words = [word.replace("{port}", str(port)) for word in command]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            words, cwd=cwd, env=os.environ | dict(env), stdout=log, stderr=log, start_new_session=True
        )
        server = Server(process, port, log)
        try:
            if ready:
                wait_until(lambda: answers(server, ready), START_SECONDS, server)
            yield server
        finally:
            stop(server)


def answers(server: Server, path: str = "/readyz") -> bool:
    """Whether this path is 200 now. Raises AssertionError with the log where the process has ended."""
    assert server.process.poll() is None, f"ended with {server.process.returncode}:\n{server.log_text[-4000:]}"
    try:
        return server.get(path).status_code == 200
    except httpx.TransportError:
        return False


def stop(server: Server) -> int:
    """End the process in order; kill what is left of its group after that, or when it takes too long. Returns the exit code."""
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)
    return server.process.wait(10)


def wait_until(condition: Any, seconds: float = 20.0, server: Server | None = None) -> None:
    """Return as soon as the condition holds. Raises TimeoutError, with the end of the server's log, when it does not within the time."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("the condition never held" + (f":\n{server.log_text[-4000:]}" if server else ""))
        time.sleep(0.02)


def example(candidates: int = 0, history: int = -1) -> dict[str, Any]:
    """The demo's example request, its candidates repeated to that number where one is given, its history cut to that many events."""
    body: dict[str, Any] = json.loads((DEMO / "example.json").read_text())
    if candidates:
        posts = body["candidates"]
        body["candidates"] = [
            posts[place % len(posts)] | {"post_id": str(1000 + place)} if place >= len(posts) else posts[place]
            for place in range(candidates)
        ]
    if history >= 0:
        body["history"] = body["history"][:history]
    return body
