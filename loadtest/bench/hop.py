"""Rows of the thin path: what the way from a front to the engine process and back costs, apart from queue and forward.

One front without HTTP in this process, before a real engine process whose engine takes no time.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import uvloop

from app.errors import ServiceError
from app.fronts.remote import RemoteService
from app.fronts.role import Role
from app.interface import Ranked
from app.settings import Settings
from app.telemetry.metrics import Metrics
from loadtest.bench.scaling import NULL, processor_seconds
from loadtest.bench.table import Row
from loadtest.machine import ROOT
from loadtest.timing import Figure
from model.inputs import Candidates, Context

CANDIDATES, HISTORY = 7, 16
IN_FLIGHT = 32
TARGET_P50_MS, TARGET_P99_MS, TARGET_LOOP_US = 0.10, 0.30, 25.0
CLOCK_MONOTONIC, TFD_NONBLOCK = 1, 0o4000


class Hop:
    """Each round: as many requests a second as go, 32 at a time; then half as many, evenly spaced."""

    def __init__(self, stack: ExitStack, seconds: float) -> None:
        self.seconds = seconds
        self.figures: dict[str, list[float]] = {}
        self._taken: list[float] = []  # seconds of each request, of this reading
        self._runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        role = Role(f"{directory}/engine", os.getpid())
        environment = role.environment() | {"RANKER_LOGS__LEVEL": "error", "RANKER_QUEUE__MAX_WAIT_SECONDS": "0"}
        self._engine = subprocess.Popen(NULL, cwd=ROOT, env=environment)
        stack.callback(self._engine.wait, 20)
        stack.callback(self._engine.terminate)
        self._service = RemoteService(Settings(), role.path, 1, Metrics())
        stack.callback(lambda: self._runner.run(self._service.stop(1.0)))
        ids, zeros = np.arange(1, 1 + HISTORY, dtype=np.uint64), np.zeros(HISTORY, np.int64)
        actions, dwell = np.zeros((HISTORY, 3), np.float32), np.zeros(HISTORY, np.float32)
        some = slice(CANDIDATES)
        self._context = Context(7, ids, ids, actions, zeros, dwell)
        self._candidates = Candidates(ids[some], ids[some], zeros[some], zeros[some])

    def read(self) -> None:
        """One round."""
        self._runner.run(self._read())

    def rows(self) -> list[Row]:
        """At half load; the loop's work at full load besides."""
        figures = {name: Figure.of(values) for name, values in self.figures.items()}
        return [
            Row(
                "hop front → engine process → front, p50 at half load",
                figures["p50_ms"],
                "ms",
                TARGET_P50_MS,
                at_least=False,
            ),
            Row("hop, p99 at half load", figures["p99_ms"], "ms", TARGET_P99_MS, at_least=False),
            Row(
                "engine process's loop, a request at half load",
                figures["loop_us"],
                "µs",
                TARGET_LOOP_US,
                at_least=False,
            ),
            Row("the same at full load", figures["full_loop_us"], "µs", TARGET_LOOP_US, at_least=False),
        ]

    async def _read(self) -> None:
        self._service.start()
        while not self._service.health().ready:  # noqa: ASYNC110  # another process
            await asyncio.sleep(0.05)
        full = await self._load(self._pipelined)
        half = await self._load(lambda: self._paced(len(self._taken) / self.seconds / 2))
        p50, p99 = np.percentile(self._taken, [50, 99])
        for name, value in (("full_loop_us", full), ("loop_us", half), ("p50_ms", 1e3 * p50), ("p99_ms", 1e3 * p99)):
            self.figures.setdefault(name, []).append(float(value))

    async def _load(self, load: Callable[[], object]) -> float:
        """Microseconds of the engine process's loop a request."""
        before = processor_seconds(self._engine.pid)
        await load()  # type: ignore[misc]
        return (processor_seconds(self._engine.pid) - before) / len(self._taken) * 1e6

    async def _pipelined(self) -> None:
        self._taken.clear()
        until = time.perf_counter() + self.seconds

        def again() -> None:
            if time.perf_counter() < until:
                self._send(again)

        for _ in range(IN_FLIGHT):
            self._send(again)
        await asyncio.sleep(self.seconds + 0.1)

    async def _paced(self, rate: float) -> None:
        self._taken.clear()
        with ticks(rate) as descriptor:
            loop = asyncio.get_running_loop()

            def due() -> None:
                for _ in range(int.from_bytes(os.read(descriptor, 8), "little")):
                    self._send()

            loop.add_reader(descriptor, due)
            await asyncio.sleep(self.seconds)
            loop.remove_reader(descriptor)
        await asyncio.sleep(0.1)

    def _send(self, then: Callable[[], None] | None = None) -> None:
        """One request; `then` is called at its end."""
        service, began = self._service, time.perf_counter()

        def done(result: Ranked | ServiceError) -> None:
            if isinstance(result, Ranked):  # else it was refused: the machine had no time for so many
                self._taken.append(time.perf_counter() - began - result.queue_seconds - result.forward_seconds)
            if then is not None:
                then()

        place = service.admit(service.model, candidates=CANDIDATES, history=HISTORY, deadline=None)
        service.rank(place, self._context, self._candidates, done)


@contextmanager
def ticks(rate: float) -> Iterator[int]:
    """A descriptor that is readable so many times a second; uvloop's own timers are true to a millisecond alone."""
    libc, nanoseconds = ctypes.CDLL(None), int(1e9 / rate)
    descriptor: int = libc.timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK)
    libc.timerfd_settime(
        descriptor, 0, struct.pack("4q", *divmod(nanoseconds, 10**9), *divmod(nanoseconds, 10**9)), None
    )
    try:
        yield descriptor
    finally:
        os.close(descriptor)
