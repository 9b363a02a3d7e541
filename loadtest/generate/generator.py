"""Sends requests on a schedule (open loop) and records samples."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from loadtest.generate.http_client import Client, Reply
from loadtest.generate.samples import Samples

Arrivals = Literal["constant", "poisson"]

LAG_LIMIT_SECONDS = 0.005
CPU_LIMIT = 0.85


def schedule(kind: Arrivals, rate_rps: float, seconds: float, seed: int = 1) -> NDArray[np.float64]:
    """The times at which requests are due, in seconds from the start, ascending, all below `seconds`.

    Poisson arrivals have exponential gaps, as from independent users; constant arrivals have equal gaps. Where Poisson arrivals would be
    none, there is one, at any of the times. Raises ValueError if the rate or the length is not positive.
    """
    if rate_rps <= 0 or seconds <= 0:
        raise ValueError("rate and seconds must be positive")
    if kind == "constant":
        return np.arange(int(np.ceil(rate_rps * seconds)), dtype=np.float64) / rate_rps
    spare = int(rate_rps * seconds + 10 * np.sqrt(rate_rps * seconds) + 10)
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate_rps, spare))
    return times[times < seconds] if times[0] < seconds else rng.uniform(0, seconds, 1)


@dataclass(frozen=True, slots=True)
class GeneratorLoad:
    """How hard the generator itself worked: its share of one core, and how late it sent requests, in milliseconds.

    `realtime`: whether it had realtime priority. Without it, a busy machine makes it late.
    """

    cpu_share: float
    lag_p99_ms: float
    realtime: bool

    @property
    def is_bottleneck(self) -> bool:
        """Whether the generator was too busy or too late for its figures to describe the server."""
        return self.lag_p99_ms > 1e3 * LAG_LIMIT_SECONDS or self.cpu_share > CPU_LIMIT


async def open_loop(
    client: Client,
    payloads: Sequence[bytes],
    due: NDArray[np.float64],
    samples: Samples,
    is_right: Callable[[int, bytes], bool],
) -> Samples:
    """Send payload i at `due[i]` seconds, even if earlier ones are unanswered, and wait until all are answered or timed out.

    Errors become samples, not exceptions. A reply with 200 whose body `is_right(row, body)` refuses counts as none. Fills in `samples`,
    which the caller can read during the run. Raises ValueError unless there are as many payloads as due times, and at least one.
    """
    if len(payloads) != len(due) or not len(due):
        raise ValueError("as many payloads as due times are needed, and at least one")
    loop = asyncio.get_running_loop()
    left, finished = len(due), loop.create_future()
    samples["due"] = due
    start = loop.time() + 0.01

    def done(row: int, reply: Reply) -> None:
        nonlocal left
        if reply.status == 200 and not is_right(row, reply.body):
            reply.status, reply.failure = 0, "wrong_reply"
        samples.note(row, reply, start)
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


async def measured(run: Awaitable[Samples]) -> tuple[Samples, GeneratorLoad]:
    """Run a loop without garbage collection, with realtime priority if allowed. Return its samples and the generator's load."""
    with _undisturbed() as realtime:
        cpu, wall = time.process_time(), time.perf_counter()
        samples = await run
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    lag_ms = 1e3 * (samples.fired - samples.due)
    return samples, GeneratorLoad(cpu / wall, float(np.percentile(lag_ms, 99)), realtime)


@contextmanager
def _undisturbed() -> Iterator[bool]:
    """Disable garbage collection and take realtime priority if allowed; yield whether it was. A late generator measures itself."""
    gc.disable()
    usual, realtime = 0, False
    with suppress(OSError, AttributeError):  # needs Linux and permission
        usual = os.sched_getscheduler(0)
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        realtime = True
    try:
        yield realtime
    finally:
        if realtime:
            os.sched_setscheduler(0, usual & ~os.SCHED_RESET_ON_FORK, os.sched_param(0))
        gc.enable()
