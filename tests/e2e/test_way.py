"""The way of a real request through the code: which files it enters, and how often it moves from one folder to another.

A move is two calls in a row, in the thread of the event loop, of functions in different folders of `app`, `model` and `weights`;
returns are not counted. Timers of the loop run in the same thread: they are left out, with all that they call.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import app.budgets
from app.assembly import build_server, build_service
from app.http.rank import Ranking
from app.server.process import RankingServer
from app.settings import Settings
from app.telemetry.metrics import Metrics

ROOT = Path(__file__).parents[2]
FLOORS = ("app", "model", "weights")
EXAMPLE = json.loads((ROOT / "weights/demo/example.json").read_text())
VIEWER = {name: EXAMPLE[name] for name in ("user_id", "history")}
TRIES = 30  # the shortest way is taken: on a busy machine a forward may be handed over, or wait for others
TIMERS = {"LoopClock._tick", "Watchdog.hang", "RetrievalService._follow", "RankingServer.serve", "Worker._expire"}


class Way:
    """The calls of functions of `app`, `model` and `weights` that one thread makes, in their order: file and function."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self._files: dict[CodeType, str | None] = {}
        self._timer: FrameType | None = None  # that runs now

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """For `sys.setprofile`."""
        if self._timer is not None or event != "call":
            if frame is self._timer and event == "return":
                self._timer = None
            return
        code = frame.f_code
        if code.co_qualname in TIMERS:
            self._timer = frame
            return
        if code not in self._files:
            path = Path(code.co_filename)
            inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in FLOORS
            self._files[code] = path.relative_to(ROOT).as_posix() if inside else None
        if (file := self._files[code]) is not None:
            self.calls.append((file, code.co_qualname))

    @property
    def files(self) -> set[str]:
        """Relative to the repository."""
        return {file for file, _ in self.calls}

    @property
    def moves(self) -> int:
        """From one folder to another."""
        rooms = [file.rpartition("/")[0] for file, _ in self.calls]
        return sum(one != other for one, other in itertools.pairwise(rooms))

    def __str__(self) -> str:
        rooms = itertools.groupby(self.calls, key=lambda call: call[0].rpartition("/")[0])
        return "\n".join(f"{room}: {' '.join(name for _, name in calls)}" for room, calls in rooms)


class Server:
    """The demo behind a real socket, in a thread of this process."""

    def __init__(self) -> None:
        settings = Settings(
            port=0,
            checkpoint=ROOT / "weights/demo",
            retrieval={"checkpoint": ROOT / "weights/demo-towers", "corpus": ROOT / "weights/demo-posts"},
            logs={"level": "error"},
        )
        self.service = build_service(settings, Metrics())
        self.server: RankingServer = build_server(settings, self.service)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_until_complete, args=(self.server.serve(),), daemon=True)
        self.thread.start()
        until = time.monotonic() + 60
        while not (self.server.started and self.service.health().ready):
            assert self.thread.is_alive(), "the server has stopped"
            assert time.monotonic() < until, "the server does not start"
            time.sleep(0.02)
        self.socket = socket.create_connection(("127.0.0.1", self.server.listeners[0].socket.getsockname()[1]))
        self.socket.settimeout(60)

    def stop(self) -> None:
        """The process would end so."""
        self.socket.close()
        self.loop.call_soon_threadsafe(self.server.handle_exit, signal.SIGTERM, None)
        self.thread.join(30)

    def run(self, call: Callable[[], object]) -> None:
        """Have this called in the event loop."""

        async def step() -> None:
            call()

        asyncio.run_coroutine_threadsafe(step(), self.loop).result(30)

    def ask(self, path: str, body: Any) -> None:
        """One request on the connection; it must be answered 200."""
        sent = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}"
        )
        self.socket.sendall(head.encode() + b"\r\n\r\n" + sent)
        got = b""
        while b"\r\n\r\n" not in got:
            got += self.socket.recv(65536)
        head, _, rest = got.decode().partition("\r\n\r\n")
        assert head.startswith("HTTP/1.1 200"), got
        length = int(head.lower().partition("content-length: ")[2].split()[0])
        while len(rest.encode()) < length:
            rest += self.socket.recv(65536).decode()

    def way(self, path: str, body: Any) -> Way:
        """The shortest way of a request that was asked before."""
        self.ask(path, body)
        ways = []
        for _ in range(TRIES):
            time.sleep(0.01)
            way = Way()
            self.run(lambda way=way: sys.setprofile(way))
            self.ask(path, body)
            time.sleep(0.02)  # what follows the reply
            self.run(lambda: sys.setprofile(None))
            ways.append(way)
        return min(ways, key=lambda way: (way.moves, len(way.files)))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.stop()


@pytest.mark.parametrize(
    ("path", "body", "short_seconds", "most_files", "most_moves"),
    [
        ("/rank", EXAMPLE, 0.0, 25, 30),
        ("/recommend", {**VIEWER, "k": 5}, 0.0, 37, 56),
        ("/recommend", {**VIEWER, "k": 5}, 60.0, 40, 61),
    ],
    ids=["rank", "recommend", "recommend with a short search"],
)
def test_the_way_of_a_request_is_short(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: Any,
    short_seconds: float,
    most_files: int,
    most_moves: int,
) -> None:
    """39 files and 93 moves for /rank, 52 and 124 for /recommend, counted in the same way at 1773cca. A search that is short is made in
    the event loop, with five more moves and three more files within `model`; how long one takes is the machine's."""
    monkeypatch.setattr("app.engine.runners.SHORT_SEARCH_SECONDS", short_seconds)
    way = server.way(path, body)
    assert {"app/server/connection.py", "app/engine/worker.py", "model/native/kernel.py"} <= way.files
    assert way.moves <= most_moves, f"{way}"
    assert len(way.files) <= most_files, sorted(way.files)


def test_a_detour_is_seen(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a helper of another folder, called on the way."""
    before, model_of = server.way("/rank", EXAMPLE), Ranking.model_of

    def detour(self: Ranking, *arguments: Any) -> Any:
        app.budgets.rest_seconds(0.0)
        return model_of(self, *arguments)

    monkeypatch.setattr(Ranking, "model_of", detour)
    after = server.way("/rank", EXAMPLE)
    assert (len(after.files), after.moves) == (len(before.files) + 1, before.moves + 2)


def test_a_reload_enters_few_files(server: Server) -> None:
    """SIGHUP reads checkpoint and corpus again: in the event loop, and in the threads that it starts."""
    way, old, corpus = Way(), server.service.model, server.service.retrieval.served
    threading.setprofile(way)
    try:
        server.run(lambda: sys.setprofile(way))
        server.run(lambda: server.server.handle_reload(signal.SIGHUP, None))
        until = time.monotonic() + 60
        while server.service.model is old or server.service.retrieval.served is corpus:
            assert time.monotonic() < until, "nothing was reloaded"
            time.sleep(0.01)
        server.run(lambda: sys.setprofile(None))
    finally:
        threading.setprofile(None)
    assert "weights/format/reader.py" in way.files
    assert len(way.files) <= 45, "\n".join(sorted(way.files))
