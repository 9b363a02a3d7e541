"""The timer of a real loop: callers who never pause overrun it, and an idle process does not wake up."""

from __future__ import annotations

import asyncio
import time

import pytest

from app.loop_lag import FULL_SECONDS, TICK_SECONDS, LoopClock, Work
from tests.app.fakes import until

pytestmark = pytest.mark.anyio


async def test_callers_who_never_pause_overrun_the_loop() -> None:
    answered = 0

    def busy() -> None:
        nonlocal answered
        until_seconds = time.thread_time() + 0.02  # a turn that answers 10 requests
        while time.thread_time() < until_seconds:
            pass
        answered += 10
        clock.last_request = time.monotonic()
        if answered < 400:
            asyncio.get_running_loop().call_later(0, busy)

    clock = LoopClock(time.monotonic, lambda: Work(time.thread_time(), answered, 0, 100))
    clock.begin()
    await asyncio.sleep(5 * TICK_SECONDS)
    assert not clock.lag.overrun
    asyncio.get_running_loop().call_soon(busy)
    await until(lambda: clock.lag.overrun)
    assert clock.lag.wait_seconds(100) > FULL_SECONDS
    await until(lambda: not clock.is_ticking)
    clock.begin()
    assert not clock.lag.overrun  # whatever was before the silence
    assert clock.is_ticking
