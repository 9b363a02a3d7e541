"""The queue of bodies that wait to be read: what one key has waiting is no reason to refuse another."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from app.api.read_queue import ReadQueue
from app.errors import Overloaded

pytestmark = pytest.mark.one_process("it is about the HTTP side alone")
LONG, SHORT = 1_000_000, 40_000


async def crowded(longest_wait_seconds: float) -> tuple[ReadQueue, list[asyncio.Task[bool]]]:
    """A queue that has learned that a megabyte takes ten milliseconds, in which one key has thirty megabytes waiting."""
    queue = ReadQueue(longest_wait_seconds)
    await queue.take(LONG, "crowd", 60)
    time.sleep(0.01)  # noqa: ASYNC251  # reading keeps the loop
    await asyncio.sleep(0.01)
    tasks = [asyncio.ensure_future(queue.take(LONG, "crowd", 60)) for _ in range(31)]
    await asyncio.sleep(0)
    return queue, tasks


def test_one_keys_waiting_bodies_get_no_other_key_refused() -> None:
    async def asked() -> None:
        queue, tasks = await crowded(0.1)
        with pytest.raises(Overloaded):
            queue.check(SHORT, "crowd", math.inf, math.inf)
        queue.check(SHORT, "other", math.inf, math.inf)
        assert queue.wait_seconds(SHORT, "other") < 0.01 < queue.wait_seconds(SHORT, "crowd")
        for task in tasks:
            task.cancel()

    asyncio.run(asked())


def test_bodies_of_another_key_are_read_before_a_crowd_is() -> None:
    async def asked() -> None:
        queue, tasks = await crowded(0)
        await queue.take(SHORT, "other", 60)
        assert sum(task.done() for task in tasks) < 5
        await asyncio.gather(*tasks)

    asyncio.run(asked())
