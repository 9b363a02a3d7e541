"""A real server in a thread of the test's process, around a fake engine or the demo, and raw sockets to it. Not a test itself."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from app import server
from app.corpus.loading import CorpusLoader
from app.main import create_app
from app.service.local import LocalService, create_ranker
from app.settings import Logs, Retrieval, Settings
from app.telemetry.metrics import Metrics
from loadtest.server import DEMO, POSTS, TOWERS
from tests.support import rankers
from tests.support.bodies import good
from tests.support.processes import fronting

BODY = json.dumps(good()).encode()
JSON = {"content-type": "application/json"}
QUIET = Logs(success_sample=0.0)
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


@dataclass
class Live:
    """A server that listens on `port`, and its ranker."""

    port: int
    ranker: LocalService
    server: server.Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self, seconds: float = 10.0) -> socket.socket:
        """A connection whose reads time out after this long."""
        return socket.create_connection(("127.0.0.1", self.port), seconds)

    def figure(self, series: str) -> float:
        """One sample of the metrics; 0 where it is missing."""
        return rankers.figure(self.ranker, series)


@contextmanager
def listening(
    engine: Any = None,
    *,
    load_corpus: CorpusLoader | None = None,
    loop: LoopFactory = uvloop.new_event_loop,
    **groups: Any,
) -> Iterator[Live]:
    """A ready server around this engine, by default a `FakeEngine`, in this event loop. `groups` are of its settings."""
    ranker = rankers.create(engine, load_corpus=load_corpus, **{"port": 0, **groups})
    with ready(ranker.settings, ranker, loop) as live:
        yield live


@contextmanager
def demo(directory: Path, **groups: Any) -> Iterator[Live]:
    """A ready server of the demo with its posts, which are copied below the directory: a corpus belongs to one process at a time."""
    retrieval = Retrieval(checkpoint=TOWERS, corpus=shutil.copytree(POSTS, directory / "posts"))
    given = {"port": 0, "checkpoint": DEMO, "retrieval": retrieval, "threads": 1, "logs": QUIET, **groups}
    with ready(Settings(**given)) as live:
        yield live


@contextmanager
def ready(
    settings: Settings, ranker: LocalService | None = None, loop: LoopFactory = uvloop.new_event_loop
) -> Iterator[Live]:
    """A ready server of these settings, by default around the ranker that they describe."""
    ranker = ranker or create_ranker(settings, Metrics())
    sockets = server.bind(settings.host, settings.port)
    with fronting(ranker) as front:
        sides = server.side_ports(settings, ranker) if front is ranker else []
        running = server.Server(create_app(settings, front), sockets, front, settings)

        def run() -> None:
            with asyncio.Runner(loop_factory=loop) as runner:
                runner.run(server.serve(running.serve(running.sockets), sides))

        thread = threading.Thread(target=run, name="server of a test")
        thread.start()
        try:
            until(lambda: running.started and front.health().ready, 100)  # the first one may compile the kernels
            yield Live(sockets[0].getsockname()[1], ranker, running)
        finally:
            running.should_exit = True
            thread.join(30)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Return as soon as the condition holds; raise TimeoutError when it does not within the time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.005)


def head(
    method: str = "POST", path: str = "/rank", headers: Mapping[str, str] | None = None, length: int | None = len(BODY)
) -> bytes:
    """The head of a request with a JSON body of this length."""
    fields = {"host": "localhost", **JSON, **(headers or {})}
    if length is not None:
        fields["content-length"] = str(length)
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def read_reply(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the next reply with a length. Interim replies are passed over."""
    file = connection.makefile("rb")
    while True:
        line = file.readline()
        if not line:
            raise EOFError("the connection was closed without a reply")
        status = int(line.split()[1])
        headers = {}
        while (field := file.readline().strip()) != b"":
            name, _, value = field.decode().partition(":")
            headers[name.lower()] = value.strip()
        if status >= 200:
            return status, headers, file.read(int(headers.get("content-length", 0)))
