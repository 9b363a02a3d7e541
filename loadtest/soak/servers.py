"""Server processes for the soak: the real service, or the same around a fake engine with planted faults. Sends no load."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import httpx

from loadtest.generate.http_client import post
from loadtest.machine import ROOT
from loadtest.servers.launch import free_port, process

HOST = "127.0.0.1"
QUIET = {"RANKER_LOGS__LEVEL": "error", "RANKER_DRAIN__DELAY_SECONDS": "0", "OMP_NUM_THREADS": "1"}
FAKE = [sys.executable, "-m", "tests.reliability.fake_server"]


@dataclass
class Server:
    """A running process and where it listens."""

    popen: subprocess.Popen[bytes]
    port: int

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels, 0 where it is not there."""
        text = httpx.get(f"http://{HOST}:{self.port}/metrics", timeout=5).text
        values = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(map(float, values))

    def readiness(self) -> int:
        """The status of /readyz; 0 where nobody answers."""
        try:
            return httpx.get(f"http://{HOST}:{self.port}/readyz", timeout=2).status_code
        except httpx.HTTPError:
            return 0


@contextmanager
def fake(*faults: str, **settings: object) -> Iterator[Server]:
    """The service around the fake engine; `faults` are its command line, `settings` lower-case names of the environment."""
    with _server([*FAKE, *faults], settings) as server:
        yield server


@contextmanager
def fake_logging(log_file: IO[bytes], settings: dict[str, object]) -> Iterator[Server]:
    """The same, with all that it logs in a file."""
    with _server(FAKE, settings, log_file) as server:
        yield server


@contextmanager
def real(**settings: object) -> Iterator[Server]:
    """The service as a user starts it."""
    with _server([sys.executable, "-m", "app"], settings) as server:
        yield server


@contextmanager
def _server(command: list[str], settings: dict[str, object], log_file: IO[bytes] | None = None) -> Iterator[Server]:
    port = free_port()
    chosen = {f"RANKER_{name.upper()}": str(value) for name, value in settings.items()}
    environment = {**QUIET, "RANKER_PORT": str(port), **chosen}
    with process(command, environment, root=ROOT, port=port, ready_path="/readyz", log_file=log_file) as popen:
        yield Server(popen, port)


def payload(user: int, candidates: int = 16, headers: dict[str, str] | None = None) -> bytes:
    """A whole request for one user, whose posts are nobody else's."""
    posts = [user * 10_000 + number for number in range(1, candidates + 1)]
    content = {
        "user_id": user,
        "history": {"post_id": [1, 2, 3], "author_id": [1, 2, 3]},
        "candidates": {"post_id": posts, "author_id": posts},
    }
    return post(HOST, "/rank", json.dumps(content).encode(), headers)
