"""Callers who give up before the longest wait that is allowed, and come again: they must not fill the queue with work for nobody."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from app.settings import Batching, Queue
from tests.app.api.live import BODY, QUIET, head, listening
from tests.support.fakes import FakeEngine

PATIENCE_SECONDS, FORWARD_SECONDS, WAIT_SECONDS = (
    1.0,
    0.24,
    2.0,
)  # four times the usual ones: slow enough for a busy machine
MEASURED_SECONDS = 8.0


def forward(items: Sequence[Any]) -> None:
    time.sleep(FORWARD_SECONDS)


async def call(port: int, ends: Counter[str], until: float) -> None:
    """One caller: a new connection for each request; after a refusal it waits as long as it would have for a reply."""
    while time.monotonic() < until:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    writer.write(head() + BODY)
                    status = (await reader.readline()).split()[1].decode()
                finally:
                    writer.close()
        except (TimeoutError, IndexError, OSError):
            ends["left"] += 1
            continue
        ends[status] += 1
        if status != "200":
            await asyncio.sleep(PATIENCE_SECONDS)


def good_replies(callers: int) -> Counter[str]:
    """How the calls of so many callers end at an engine that takes four requests in a forward."""

    async def measure(port: int) -> Counter[str]:
        ends: Counter[str] = Counter()
        until = time.monotonic() + MEASURED_SECONDS
        await asyncio.gather(*(call(port, ends, until) for _ in range(callers)))
        return ends

    queue = Queue(max_wait_seconds=WAIT_SECONDS)
    with listening(FakeEngine(before=forward), batching=Batching(max_requests=4), queue=queue, logs=QUIET) as live:
        return asyncio.run(measure(live.port))


def test_callers_who_give_up_keep_others_from_nothing() -> None:
    few = good_replies(8)
    many = good_replies(64)  # without what is learned of them a quarter of the few's replies, with it three quarters
    assert many["200"] > 0.5 * few["200"], (few, many)
