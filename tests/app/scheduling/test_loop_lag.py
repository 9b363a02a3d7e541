"""An overrun event loop refuses what a turn has no time for; a burst, or a loop with time to spare, refuses nothing."""

from __future__ import annotations

import asyncio

import pytest

from app.errors import Overloaded
from app.scheduling.loop_lag import (
    LATE_SECONDS,
    RECOVERED_SECONDS,
    SPARE_SECONDS,
    STANDING_SECONDS,
    TICK_SECONDS,
    TURN_SECONDS,
    LoopTurn,
)
from tests.app.fakes import FakeEngine, running


class Loop:
    """A clock that runs by hand beside the real loop, whose every tick comes as late as told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def run_late(clock: Loop, turn: LoopTurn, late_seconds: float, seconds: float) -> None:
    """Let ticks pass, each that late, for so long on the clock."""
    until = clock.now + seconds
    while clock.now < until:
        turn.is_over()
        clock.now += TICK_SECONDS + late_seconds
        turn._tick()
        await asyncio.sleep(0)


async def answers_of_a_turn(clock: Loop, turn: LoopTurn) -> list[bool]:
    first = turn.is_over()
    clock.now += 2 * TURN_SECONDS
    second = turn.is_over()
    await asyncio.sleep(0)
    return [first, second, turn.is_over()]


def test_an_overrun_loop_refuses_the_rest_of_a_turn_and_admits_in_the_next() -> None:
    async def go() -> list[bool]:
        clock = Loop()
        turn = LoopTurn(clock)
        await run_late(clock, turn, 2 * LATE_SECONDS, 4 * STANDING_SECONDS)
        return await answers_of_a_turn(clock, turn)

    assert asyncio.run(go()) == [False, True, False]


def test_a_burst_is_admitted_whole() -> None:
    async def go() -> list[bool]:
        clock = Loop()
        return await answers_of_a_turn(clock, LoopTurn(clock))

    assert asyncio.run(go()) == [False, False, False]


def test_a_full_house_of_callers_who_wait_is_no_overrun() -> None:
    async def go() -> list[bool]:
        clock = Loop()
        turn = LoopTurn(clock)
        await run_late(clock, turn, 2 * SPARE_SECONDS, 20 * STANDING_SECONDS)
        return await answers_of_a_turn(clock, turn)

    assert asyncio.run(go()) == [False, False, False]


def test_an_overrun_lasts_while_the_loop_has_nothing_to_spare() -> None:
    async def go() -> list[bool]:
        clock = Loop()
        turn = LoopTurn(clock)
        await run_late(clock, turn, 2 * LATE_SECONDS, 4 * STANDING_SECONDS)
        await run_late(clock, turn, 2 * SPARE_SECONDS, 3 * RECOVERED_SECONDS)
        return await answers_of_a_turn(clock, turn)

    assert asyncio.run(go()) == [False, True, False]


def test_the_burst_after_a_pause_is_admitted_whole() -> None:
    async def go() -> list[bool]:
        clock = Loop()
        turn = LoopTurn(clock)
        turn.is_over()
        await run_late(clock, turn, 10 * STANDING_SECONDS, TICK_SECONDS)  # one tick, very late
        await run_late(clock, turn, LATE_SECONDS, STANDING_SECONDS / 2)  # and what had piled up
        return await answers_of_a_turn(clock, turn)

    assert asyncio.run(go()) == [False, False, False]


def test_a_loop_with_time_to_spare_now_and_then_refuses_nothing() -> None:
    async def go() -> list[bool]:
        clock = Loop()
        turn = LoopTurn(clock)
        for _ in range(10):
            await run_late(clock, turn, 1.1 * LATE_SECONDS, STANDING_SECONDS / 2)
            await run_late(clock, turn, 0.0, TICK_SECONDS / 2)
        return await answers_of_a_turn(clock, turn)

    assert asyncio.run(go()) == [False, False, False]


@pytest.mark.parametrize(("seconds", "refuses"), [(TICK_SECONDS / 2, True), (1.5 * RECOVERED_SECONDS, False)])
def test_an_overrun_ends_when_the_loop_has_been_on_time_for_a_while(seconds: float, refuses: bool) -> None:
    async def go() -> list[bool]:
        clock = Loop()
        turn = LoopTurn(clock)
        await run_late(clock, turn, 2 * LATE_SECONDS, 4 * STANDING_SECONDS)
        await run_late(clock, turn, 0.0, seconds)
        return await answers_of_a_turn(clock, turn)

    assert asyncio.run(go()) == [False, refuses, False]


def test_the_service_asks_before_it_reads_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with running(FakeEngine()) as service:
            service.check_open()
            monkeypatch.setattr(service.turn, "is_over", lambda: True)
            with pytest.raises(Overloaded, match="faster than they can be read") as caught:
                service.check_open()
            assert caught.value.retry_after_seconds == 1.0

    asyncio.run(go())
