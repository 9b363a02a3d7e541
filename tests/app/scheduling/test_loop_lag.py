"""An overrun event loop refuses what a turn has no time for; a burst, or a loop with time to spare, refuses nothing."""

from __future__ import annotations

import pytest

from app.scheduling.loop_lag import (
    LATE_SECONDS,
    RECOVERED_SECONDS,
    SPARE_SECONDS,
    STANDING_SECONDS,
    TICK_SECONDS,
    TURN_SECONDS,
    LoopLag,
)

LATE, BUSY, ON_TIME = 2 * LATE_SECONDS, 2 * SPARE_SECONDS, 0.0
OVERRUN = [(LATE, 4 * STANDING_SECONDS)]


def after(*phases: tuple[float, float]) -> LoopLag:
    """A loop whose every tick was so late, for so many seconds on end."""
    lag, now = LoopLag(), 100.0
    lag.tick(now)
    for late, seconds in phases:
        until = now + seconds
        while now < until:
            now += TICK_SECONDS + late
            lag.tick(now)
    return lag


def test_an_overrun_refuses_what_a_turn_has_no_time_for() -> None:
    overrun, calm = after(*OVERRUN), after((ON_TIME, 1.0))
    assert [overrun.refuses(seconds) for seconds in (0.0, TURN_SECONDS, 2 * TURN_SECONDS)] == [False, False, True]
    assert not calm.refuses(10.0)


@pytest.mark.parametrize(
    "phases",
    [
        pytest.param([(BUSY, 20 * STANDING_SECONDS)], id="many callers who each wait for their reply"),
        pytest.param(
            [(10 * STANDING_SECONDS, TICK_SECONDS), (1.1 * LATE_SECONDS, STANDING_SECONDS / 2)],
            id="a pause, and what piled up meanwhile",
        ),
        pytest.param([(LATE, STANDING_SECONDS / 2), (ON_TIME, TICK_SECONDS / 2)] * 10, id="time to spare now and then"),
        pytest.param([*OVERRUN, (ON_TIME, 1.5 * RECOVERED_SECONDS)], id="on time again for a while"),
    ],
)
def test_it_is_no_overrun(phases: list[tuple[float, float]]) -> None:
    assert not after(*phases).overrun


@pytest.mark.parametrize(
    "phases",
    [
        pytest.param(OVERRUN, id="late all the time"),
        pytest.param([(3 * STANDING_SECONDS, 0.7)], id="very late all the time"),
        pytest.param([*OVERRUN, (BUSY, 3 * RECOVERED_SECONDS)], id="less late, but nothing to spare"),
        pytest.param([*OVERRUN, (ON_TIME, RECOVERED_SECONDS / 2)], id="on time, but not for long"),
    ],
)
def test_it_is_an_overrun(phases: list[tuple[float, float]]) -> None:
    assert after(*phases).overrun
