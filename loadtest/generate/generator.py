"""Sends requests on a schedule (open loop) or back to back (closed loop) and fills in samples. Decides no rates."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from loadtest.generate.http_client import Client, Reply, precise_loop
from loadtest.generate.samples import Samples

Arrivals = Literal["constant", "poisson"]

LAG_LIMIT_SECONDS = 0.005
CPU_LIMIT = 0.85


def schedule(kind: Arrivals, rate_rps: float, seconds: float, seed: int = 1) -> NDArray[np.float64]:
    """When requests are due, in seconds from the start, ascending, all below `seconds`; fixed before the run.

    Poisson arrivals have exponential gaps: independent users; constant has equal ones. Raises ValueError for a rate or length
    that is not positive.
    """
    if rate_rps <= 0 or seconds <= 0:
        raise ValueError("rate and seconds must be positive")
    if kind == "constant":
        return np.arange(int(np.ceil(rate_rps * seconds)), dtype=np.float64) / rate_rps
    spare = int(rate_rps * seconds + 10 * np.sqrt(rate_rps * seconds) + 10)
    times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate_rps, spare))
    return times[times < seconds]


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


async def open_loop(
    client: Client,
    payloads: Sequence[bytes],
    due: NDArray[np.float64],
    on_done: Callable[[int], None] = lambda row: None,
    samples: Samples | None = None,
) -> Samples:
    """Fires payload i at `due[i]` seconds, whatever became of the earlier ones, and waits until all are answered or timed out.

    Errors become samples, never exceptions. `on_done(row)` is called for every reply; `samples` to fill in, if somebody looks
    at them meanwhile.
    """
    if len(payloads) != len(due) or not len(due):
        raise ValueError("as many payloads as due times are needed, and at least one")
    loop = asyncio.get_running_loop()
    samples, left, finished = Samples.empty(len(due)) if samples is None else samples, len(due), loop.create_future()
    samples["due"] = due
    start = loop.time() + 0.01

    def done(row: int, reply: Reply) -> None:
        nonlocal left
        samples.note(row, reply, start)
        on_done(row)
        left -= 1
        if not left and not finished.done():
            finished.set_result(None)

    for row, at in enumerate(due.tolist()):
        if (early := start + at - loop.time()) > 0:
            await asyncio.sleep(early)
        samples.fired[row] = loop.time() - start
        client.send(payloads[row], partial(done, row))
    await finished
    return samples


async def closed_loop(client: Client, payloads: Sequence[bytes], clients: int, seconds: float) -> Samples:
    """`clients` of them, each sending its next request when its last one is answered, or after the Retry-After of a refusal.

    Until `seconds` passed or the payloads are used up; the samples of what was sent. Hides waiting: a slow server is asked less.
    """
    if clients < 1 or not payloads:
        raise ValueError("at least one client and one payload are needed")
    samples, start = Samples.empty(len(payloads)), asyncio.get_running_loop().time()
    rows = iter(range(len(payloads)))

    async def one() -> None:
        for row in rows:
            now = asyncio.get_running_loop().time() - start
            samples.due[row] = samples.fired[row] = now
            reply = await client.ask(payloads[row])
            samples.note(row, reply, start)
            pause = retry_after_seconds(reply)  # a client that hammers on after a refusal is an attack, not a load
            if pause:
                await asyncio.sleep(min(pause, seconds))
            if asyncio.get_running_loop().time() - start >= seconds:
                return

    await asyncio.gather(*(one() for _ in range(min(clients, len(payloads)))))
    return cast(Samples, samples[samples.done >= 0])


def retry_after_seconds(reply: Reply) -> float:
    """When a refused client may come back, in seconds; 0 for any other reply."""
    if reply.status not in (429, 503):
        return 0.0
    try:
        return max(0.0, float(reply.headers.get(b"retry-after", b"0")))
    except ValueError:
        return 0.0


async def measured(run: Awaitable[Samples], client: Client) -> tuple[Samples, GeneratorLoad]:
    """Run a loop without garbage collection and ahead of other processes where allowed; say how hard the generator worked."""
    with _undisturbed() as realtime:
        cpu, wall = time.process_time(), time.perf_counter()
        samples = await run
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    lag_ms = 1e3 * (samples.fired - samples.due)
    lag_p99, lag_max = float(np.percentile(lag_ms, 99)), float(lag_ms.max())
    return samples, GeneratorLoad(cpu / wall, lag_p99, lag_max, client.opened, realtime)


def closed_samples(
    address: tuple[str, int], payloads: Sequence[bytes], *, clients: int, seconds: float, warm_up: int
) -> Samples:
    """A closed loop against a server, after `warm_up` of the payloads that are not measured."""

    async def run() -> Samples:
        async with Client(*address, max_connections=clients, timeout_seconds=30) as client:
            await closed_loop(client, payloads[:warm_up], clients, 10.0)
            return (await measured(closed_loop(client, payloads[warm_up:], clients, seconds), client))[0]

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
