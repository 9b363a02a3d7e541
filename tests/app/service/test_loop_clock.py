"""The timers of a real loop: a loop that is blocked again and again is overrun, and each turn has a beginning."""

from __future__ import annotations

import asyncio
import time

from app.scheduling.loop_lag import LATE_SECONDS, TICK_SECONDS
from app.service.loop_clock import LoopClock
from tests.app.fakes import run, until


def test_a_loop_that_is_blocked_all_the_time_is_overrun() -> None:
    async def main() -> None:
        clock = LoopClock(time.monotonic)
        clock.start()
        await asyncio.sleep(5 * TICK_SECONDS)
        assert not clock.lag.overrun

        def blocks() -> bool:
            time.sleep(TICK_SECONDS + 2 * LATE_SECONDS)
            return clock.lag.overrun

        await until(blocks)
        clock.stop()

    run(main())


def test_the_first_request_begins_a_turn_and_the_next_turn_begins_anew() -> None:
    async def main() -> None:
        clock = LoopClock(time.monotonic)
        assert clock.request_arrives() == 0.0
        time.sleep(0.002)  # noqa: ASYNC251  # within one turn of the loop
        assert clock.request_arrives() >= 0.002
        await asyncio.sleep(0)
        assert clock.request_arrives() == 0.0

    run(main())
