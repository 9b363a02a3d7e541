"""Rows of the thin path: what the way from a front to the engine process and back costs, apart from queue and forward. `python -m
loadtest.bench.hop` prints it by rate, beside two processes that echo a kilobyte.

One front without HTTP in this process, before a real engine process whose engine takes no time.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import struct
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
from loadtest.servers.launch import start_process
from loadtest.timing import Figure
from model.inputs import Candidates, Context

CANDIDATES, HISTORY = 7, 16
IN_FLIGHT = 32
ECHO_BYTES = 1024
RATES = (500, 1000, 2000, 4000, 8000, 15_000)
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
        self._engine = start_process(NULL, cwd=ROOT, env=environment)
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

    def at(self, rate: float) -> tuple[float, float, float]:
        """One reading at so many requests a second: p50 and p99 in ms, µs of the engine process's loop a request."""
        return self._runner.run(self._at(rate))

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
        await self._ready()
        full = await self._load(self._pipelined)
        p50, p99, half = await self._at(len(self._taken) / self.seconds / 2)
        for name, value in (("full_loop_us", full), ("loop_us", half), ("p50_ms", p50), ("p99_ms", p99)):
            self.figures.setdefault(name, []).append(value)

    async def _at(self, rate: float) -> tuple[float, float, float]:
        await self._ready()
        self._taken.clear()
        loop = await self._load(lambda: paced(rate, self.seconds, self._send))
        return *milliseconds(self._taken), loop

    async def _ready(self) -> None:
        self._service.start()
        while not self._service.health().ready:  # noqa: ASYNC110  # another process
            await asyncio.sleep(0.05)

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


class Echo(asyncio.Protocol):
    """The least that a hop can cost: a kilobyte to a process that does nothing but send it back."""

    def __init__(self) -> None:
        self._sent: deque[float] = deque()
        self._taken: list[float] = []
        self._bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._bytes += len(data)
        while self._bytes >= ECHO_BYTES:
            self._bytes -= ECHO_BYTES
            self._taken.append(time.perf_counter() - self._sent.popleft())

    async def at(self, rate: float, seconds: float, process: int) -> tuple[float, float, float]:
        """As `Hop.at`."""
        self._taken.clear()
        before = processor_seconds(process)
        await paced(rate, seconds, self._send)
        return *milliseconds(self._taken), (processor_seconds(process) - before) / len(self._taken) * 1e6

    def _send(self) -> None:
        self._sent.append(time.perf_counter())
        self._transport.write(bytes(ECHO_BYTES))  # type: ignore[attr-defined]


class Mirror(asyncio.Protocol):
    """The other end of `Echo`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)  # type: ignore[attr-defined]


async def mirror(path: str) -> None:
    """Echo whatever comes, until killed."""
    server = await asyncio.get_running_loop().create_unix_server(Mirror, path)
    await server.serve_forever()


def echoes(rates: Sequence[float], seconds: float) -> list[tuple[float, float, float]]:
    """One reading of `Echo` at each rate."""
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/echo"
        process = start_process((sys.executable, "-m", "loadtest.bench.hop", "--mirror", path), cwd=ROOT)
        try:
            while not os.path.exists(path):
                time.sleep(0.05)
            return uvloop.run(_echoes(path, process.pid, rates, seconds))
        finally:
            process.kill()
            process.wait()


async def _echoes(path: str, process: int, rates: Sequence[float], seconds: float) -> list[tuple[float, float, float]]:
    transport, echo = await asyncio.get_running_loop().create_unix_connection(Echo, path)
    try:
        return [await echo.at(rate, seconds, process) for rate in rates]
    finally:
        transport.close()


async def paced(rate: float, seconds: float, send: Callable[[], None]) -> None:
    """Call `send` so many times a second, evenly spaced, and give the last answers time."""
    loop = asyncio.get_running_loop()
    with ticks(rate) as descriptor:

        def due() -> None:
            for _ in range(int.from_bytes(os.read(descriptor, 8), "little")):
                send()

        loop.add_reader(descriptor, due)
        await asyncio.sleep(seconds)
        loop.remove_reader(descriptor)
    await asyncio.sleep(0.1)


def milliseconds(taken: Sequence[float]) -> tuple[float, float]:
    """p50 and p99 in ms of times in seconds."""
    p50, p99 = np.percentile(taken, [50, 99])
    return 1e3 * float(p50), 1e3 * float(p99)


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


def main(arguments: Sequence[str] | None = None) -> int:
    """A line a rate: medians over the rounds of p50 and p99 in ms and of µs of the other process's loop, ours and the echo's in turns."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.hop", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one reading")
    parser.add_argument("--rates", type=int, nargs="+", default=RATES, help="requests a second")
    parser.add_argument("--mirror", metavar="PATH", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.mirror:
        uvloop.run(mirror(options.mirror))
    found = []  # [round, ours or echo, rate, figure]
    with ExitStack() as stack:
        hop = Hop(stack, options.seconds)
        for _ in range(options.rounds):
            ours = [hop.at(rate) for rate in options.rates]
            found.append([ours, echoes(options.rates, options.seconds)])
    print("requests/s | ours: p50, ms | p99 | loop, µs | echo: p50 | p99 | loop")
    for rate, (ours, echo) in zip(options.rates, np.median(found, axis=0).swapaxes(0, 1), strict=True):
        print(f"{rate:10} | " + " | ".join(f"{figure:.3g}" for figure in (*ours, *echo)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
