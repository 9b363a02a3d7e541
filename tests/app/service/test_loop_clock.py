"""The timers of a real loop: a loop that is blocked again and again is overrun, and each turn has a beginning."""

from __future__ import annotations

import asyncio
import time

import pytest

from app.scheduling.loop_lag import LATE_SECONDS, TICK_SECONDS
from app.service.loop_clock import LoopClock
from tests.app.fakes import FakeEngine, running, until

pytestmark = pytest.mark.anyio


def block(times: int) -> None:
    """Keep turns of the running loop busy, so that each tick is late."""
    time.sleep(TICK_SECONDS + 2 * LATE_SECONDS)
    if times > 1:
        asyncio.get_running_loop().call_later(0, block, times - 1)


async def test_a_service_notices_that_its_loop_is_overrun_while_requests_come() -> None:
    async with running(FakeEngine()) as service:
        loop_clock = service.loop_clock
        service.check_open()
        await asyncio.sleep(5 * TICK_SECONDS)
        assert not loop_clock.lag.overrun
        block(10)
        await until(lambda: loop_clock.lag.overrun)
        await until(lambda: not loop_clock._is_ticking)  # without requests an idle process does not wake up
        service.check_open()
        assert not loop_clock.lag.overrun
        assert loop_clock._is_ticking


async def test_the_first_request_begins_a_turn_and_the_next_turn_begins_anew() -> None:
    clock = LoopClock(time.monotonic)
    assert clock.request_arrives() == 0.0
    time.sleep(0.002)  # noqa: ASYNC251  # within one turn of the loop
    assert clock.request_arrives() >= 0.002
    await asyncio.sleep(0)
    assert clock.request_arrives() == 0.0
