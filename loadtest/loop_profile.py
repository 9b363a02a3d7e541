"""Where the event loop's processor time of one request goes: stations timed inside a server that wrk loads; see `profile`."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

from app.assembly import build_server
from app.engine.worker import Worker
from app.http.observe import Recorder
from app.http.rank import RankCall, RankEndpoint, Ranking
from app.http.retrieve import PostsCall, PostsEndpoint, RecommendCall
from app.server.connection import Connection
from app.server.cycle import Cycle
from app.server.process import RankingServer
from app.service.retrieval import RetrievalService
from app.service.service import RankingService
from app.settings import Drain, Settings
from app.telemetry import logs
from loadtest.generate import wrk
from loadtest.servers.launch import free_port
from model.native.engine import NativeEngine
from model.native.kernel import Kernel
from model.retrieval.engine import RetrievalEngine

Stations = Mapping[str, Sequence[tuple[type, str]]]

RANK: Stations = {
    "HTTP: parser, headers, deadlines": ((Connection, "data_received"),),
    "name, key, room": ((RankEndpoint, "begin"), (PostsEndpoint, "begin")),
    "JSON": ((Ranking, "decode"),),
    "a place in the queue": ((RankingService, "admit"),),
    "checks, features": ((Ranking, "prepare"),),
    "queue": ((RankingService, "rank"), (Worker, "_begin")),
    "keys, columns": ((NativeEngine, "_plan"), (NativeEngine, "_outcomes")),
    "forward, or its hand-over": ((Kernel, "forward"), (Kernel, "begin"), (Kernel, "finish")),
    "results to requests": ((Worker, "_end"),),
    "reply": ((RankCall, "_render"),),
    "metrics, log line": ((Recorder, "end"),),
    "write": ((Cycle, "_reply"),),
}
RECOMMEND: Stations = {
    **RANK,
    "JSON": ((PostsCall, "_read"),),
    "checks, features": ((PostsCall, "finish"),),
    "queue of searches": ((RetrievalService, "retrieve"),),
    "encode": ((RetrievalEngine, "_encode"),),
    "search": ((RetrievalEngine, "retrieve"),),
    "candidates": ((RecommendCall, "_go_on"),),
    "reply": ((RecommendCall, "_ranked"),),
}

READINGS = 1000  # of the clock, a system call, to know what one takes


class Stopwatch:
    """Seconds by station, each without those of the stations it calls and without those of reading the time, which `own` holds."""

    def __init__(self, stations: Iterable[str]) -> None:
        self._stations = list(stations)
        began = time.thread_time()
        for _ in range(READINGS):
            time.thread_time()
        self._reading_seconds = (time.thread_time() - began) / READINGS
        self._running: list[str] = []
        self._thread = threading.get_ident()
        self.clear()

    def clear(self) -> None:
        """Begin again."""
        self.seconds = dict.fromkeys(self._stations, 0.0)
        self._since = self.own = 0.0

    def timed(self, station: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, with its time counted."""

        @functools.wraps(call)
        def counted(*arguments: Any, **named: Any) -> Any:
            if threading.get_ident() != self._thread:  # a long search runs in one of its own
                return call(*arguments, **named)
            self._switch(station)
            try:
                return call(*arguments, **named)
            finally:
                self._switch(None)

        return counted

    def _switch(self, station: str | None) -> None:
        self.own += self._reading_seconds
        now = time.thread_time() - self.own
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        if station is None:
            self._running.pop()
        else:
            self._running.append(station)
        self._since = now


def loop_columns(
    checkpoint: Path,
    path: str,
    stations: Stations,
    loads: Mapping[str, Sequence[bytes]],
    seconds: float,
    **further: Any,
) -> dict[str, dict[str, float]]:
    """Microseconds of the loop's thread a request, by station, for each of these bodies at 1 and 16 connections. Needs wrk.
    `further` settings of the server.

    The last row is what is left of the thread's processor time: reading and writing sockets, timers, the loop itself.
    """
    settings = Settings(
        checkpoint=checkpoint, port=free_port(), dtype="bfloat16", drain=Drain(delay_seconds=0), **further
    )
    watch = Stopwatch(stations)
    kept = {place: getattr(*place) for places in stations.values() for place in places}
    for station, places in stations.items():
        for place in places:
            setattr(*place, watch.timed(station, kept[place]))
    try:
        with _unread_log():
            return uvloop.run(_measured(settings, path, loads, seconds, watch))
    finally:
        for place, call in kept.items():
            setattr(*place, call)


@contextmanager
def _unread_log() -> Iterator[None]:
    """Lines are written, as JSON, where nobody reads them."""
    kept, sink = os.dup(2), logs.process_sink()
    sink.drain()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        sink.drain()
        os.dup2(kept, 2)
        os.close(kept)


async def _measured(
    settings: Settings, path: str, loads: Mapping[str, Sequence[bytes]], seconds: float, watch: Stopwatch
) -> dict[str, dict[str, float]]:
    logs.configure(settings.logs)
    server = build_server(settings)
    serving = asyncio.create_task(server.serve())
    while not (server.started and server.service.health().ready):  # noqa: ASYNC110  # uvicorn tells nobody
        await asyncio.sleep(0.05)
    columns, url = {}, f"http://127.0.0.1:{settings.port}{path}"
    for (load, bodies), connections in itertools.product(loads.items(), (1, 16)):
        await asyncio.to_thread(wrk.read, url, bodies, connections, seconds)
        before, began = _answered(server, path), time.thread_time()
        watch.clear()
        await asyncio.to_thread(wrk.read, url, bodies, connections, seconds)
        spent, requests = time.thread_time() - began - watch.own, _answered(server, path) - before
        stations = {station: 1e6 * found / requests for station, found in watch.seconds.items()}
        columns[f"{load}, {connections} connection{'s' * (connections > 1)}"] = {
            **stations,
            "sockets and the loop": 1e6 * spent / requests - sum(stations.values()),
        }
    server.drain()
    await serving
    return columns


def _answered(server: RankingServer, path: str) -> float:
    value = server.service.metrics.registry.get_sample_value
    return value("ranker_http_requests_total", {"method": "POST", "route": path, "code": "200"}) or 0.0
