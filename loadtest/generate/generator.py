"""Sends requests on a schedule (open loop) or back to back (closed loop) and fills in samples. Decides no rates."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadtest.generate.http_client import Client, Reply, precise_loop
from loadtest.generate.samples import Samples

LAG_LIMIT_SECONDS = 0.005
CPU_LIMIT = 0.85


@dataclass(frozen=True, slots=True)
class GeneratorLoad:
    """How hard the generator itself worked: share of one core, and how late it was with what was due, in milliseconds.

    `realtime` tells whether the scheduler ran it ahead of everything else; without, a busy machine makes it late.
    """

    cpu_share: float
    lag_p99_ms: float
    lag_max_ms: float
    connections: int
    realtime: bool

    @property
    def is_bottleneck(self) -> bool:
        """Whether the figures say more about the generator than about the server."""
        return self.lag_p99_ms > 1e3 * LAG_LIMIT_SECONDS or self.cpu_share > CPU_LIMIT


class OpenLoop:
    """Fires payload i at `due[i]` seconds, whatever became of the earlier ones. `on_done(row)` is called for every reply."""

    def __init__(
        self,
        client: Client,
        payloads: Sequence[bytes],
        due: NDArray[np.float64],
        on_done: Callable[[int], None] | None = None,
    ) -> None:
        if len(payloads) != len(due) or not len(due):
            raise ValueError("as many payloads as due times are needed, and at least one")
        self.samples = Samples.empty(len(due))
        self.samples.due[:] = due
        self._client = client
        self._payloads = payloads
        self._due: list[float] = due.tolist()
        self._on_done = on_done
        self._loop = asyncio.get_running_loop()
        self._next = 0
        self._left = len(due)
        self._finished = self._loop.create_future()

    async def run(self) -> Samples:
        """Until every request is answered or timed out. Errors become samples, never exceptions."""
        self._start = self._loop.time() + 0.01
        self._loop.call_at(self._start + self._due[0], self._fire)
        await self._finished
        return self.samples

    def _fire(self) -> None:
        """Send everything that is due by now, then sleep until the next."""
        now = self._loop.time() - self._start
        while self._next < len(self._due) and self._due[self._next] <= now:
            row = self._next
            self._next += 1
            self.samples.fired[row] = now
            self._client.send(self._payloads[row], lambda reply, row=row: self._done(row, reply))  # type: ignore[misc]
            now = self._loop.time() - self._start
        if self._next < len(self._due):
            self._loop.call_at(self._start + self._due[self._next], self._fire)

    def _done(self, row: int, reply: Reply) -> None:
        self.samples.record(row, reply, self._start)
        if self._on_done is not None:
            self._on_done(row)
        self._left -= 1
        if self._left == 0 and not self._finished.done():
            self._finished.set_result(None)


class ClosedLoop:
    """`clients` of them, each sending its next request when its last one is answered, or after the Retry-After of a refusal.

    Runs until `seconds` passed or the payloads are used up. Hides waiting: a slow server is asked less. For peers and contrast.
    """

    def __init__(self, client: Client, payloads: Sequence[bytes], clients: int, seconds: float) -> None:
        if clients < 1 or not payloads:
            raise ValueError("at least one client and one payload are needed")
        self.samples = Samples.empty(len(payloads))
        self._client = client
        self._payloads = payloads
        self._clients = min(clients, len(payloads))
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._next = 0
        self._busy = 0
        self._finished = self._loop.create_future()

    async def run(self) -> Samples:
        """The samples of the requests that were sent."""
        self._start = self._loop.time()
        for _ in range(self._clients):
            self._busy += 1
            self._send()
        await self._finished
        return self.samples.where(np.arange(len(self.samples)) < self._next)

    def _send(self) -> None:
        now = self._loop.time() - self._start
        if self._next == len(self._payloads) or now >= self._seconds:
            self._busy -= 1
            if not self._busy and not self._finished.done():
                self._finished.set_result(None)
            return
        row = self._next
        self._next += 1
        self.samples.due[row] = self.samples.fired[row] = now
        self._client.send(self._payloads[row], lambda reply: self._done(row, reply))

    def _done(self, row: int, reply: Reply) -> None:
        self.samples.record(row, reply, self._start)
        pause = retry_after_seconds(reply)  # a client that hammers on after a refusal is an attack, not a load
        if pause:
            self._loop.call_later(min(pause, self._seconds), self._send)
        else:
            self._loop.call_soon(self._send)


def retry_after_seconds(reply: Reply) -> float:
    """When a refused client may come back, in seconds; 0 for any other reply."""
    if reply.status not in (429, 503):
        return 0.0
    try:
        return max(0.0, float(reply.headers.get(b"retry-after", b"0")))
    except ValueError:
        return 0.0


async def measured(loop: OpenLoop | ClosedLoop, client: Client) -> tuple[Samples, GeneratorLoad]:
    """Run without garbage collection and ahead of other processes where allowed; say how hard the generator worked."""
    with _undisturbed() as realtime:
        cpu, wall = time.process_time(), time.perf_counter()
        samples = await loop.run()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    lag_ms = 1e3 * (samples.fired - samples.due)
    return samples, GeneratorLoad(
        cpu / wall, float(np.percentile(lag_ms, 99)), float(lag_ms.max()), client.opened, realtime
    )


def closed_samples(
    address: tuple[str, int], payloads: Sequence[bytes], *, clients: int, seconds: float, warm_up: int
) -> Samples:
    """A closed loop against a server, after `warm_up` of the payloads that are not measured."""

    async def run() -> Samples:
        async with Client(*address, max_connections=clients, timeout_seconds=30) as client:
            await measured(ClosedLoop(client, payloads[:warm_up], clients, 10.0), client)
            return (await measured(ClosedLoop(client, payloads[warm_up:], clients, seconds), client))[0]

    with asyncio.Runner(loop_factory=precise_loop) as runner:
        return runner.run(run())


@contextmanager
def _undisturbed() -> Iterator[bool]:
    """No pauses of our own, and the scheduler's favour where we may ask for it: a late generator measures itself."""
    gc.disable()
    usual, realtime = 0, False
    with suppress(OSError, AttributeError):  # needs Linux and the right to
        usual = os.sched_getscheduler(0)
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        realtime = True
    try:
        yield realtime
    finally:
        if realtime:
            os.sched_setscheduler(0, usual & ~os.SCHED_RESET_ON_FORK, os.sched_param(0))
        gc.enable()
