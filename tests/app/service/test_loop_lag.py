"""An overrun event loop refuses what would wait too long; a burst, a slow engine, or a loop that is just full refuses nothing."""

from __future__ import annotations

import math

import pytest

from app.service.loop_lag import (
    FULL_REQUESTS,
    FULL_SECONDS,
    LATE_SECONDS,
    RECOVERED_SECONDS,
    STANDING_SECONDS,
    TICK_SECONDS,
    LoopLag,
    LoopWork,
)

EACH = 0.002  # processor seconds of a request here
REFUSAL = 0.1  # of that, as a refusal counts: `loop_lag.REFUSAL_SHARE`
FULL = math.ceil(FULL_SECONDS / EACH)  # requests that the loop answers within the limit
LATE, ON_TIME = 2 * LATE_SECONDS, 0.0
OVERRUN = [(LATE, 2 * FULL, 4 * STANDING_SECONDS)]


def after(*phases: tuple[float, int, float], refused_each_tick: int = 0, each: float = EACH) -> LoopLag:
    """A busy loop whose every tick was so late, with so many requests unanswered, for so many seconds on end."""
    lag, now, cpu, answered, refused = LoopLag(), 100.0, 0.0, 0, 0
    lag.tick(now, LoopWork(0.0, 0, 0, 0))
    for late, unanswered, seconds in phases:
        until = now + seconds
        while now < until:
            now += TICK_SECONDS + late
            answered += 5
            refused += refused_each_tick
            cpu += (5 + REFUSAL * refused_each_tick) * each
            lag.tick(now, LoopWork(cpu, answered, refused, unanswered))
    return lag


@pytest.mark.parametrize("refused", [0, 500])
def test_an_overrun_refuses_what_would_wait_longer_than_the_limit(refused: int) -> None:
    overrun, calm = after(*OVERRUN, refused_each_tick=refused), after((LATE, FULL // 2, 1.0))
    assert overrun.full(FULL) == pytest.approx(FULL * EACH / FULL_SECONDS)
    assert [overrun.refuses(unanswered) for unanswered in (0, FULL - 1, FULL + 1)] == [False, False, True]
    assert not calm.refuses(100 * FULL)


def test_a_fast_loop_is_full_with_fewer_seconds_of_work() -> None:
    """Else those who are admitted would wait for many times as long as where few callers ask."""
    lag = after((LATE, 2 * FULL_REQUESTS, 4 * STANDING_SECONDS), each=EACH / 100)
    assert [lag.refuses(unanswered) for unanswered in (FULL_REQUESTS, FULL_REQUESTS + 1)] == [False, True]


def test_what_a_request_costs_is_learnt_anew() -> None:
    lag, work = after(*OVERRUN), LoopWork(0.0, 0, 0, 0)
    for tick in range(200):
        work = LoopWork(work.cpu_seconds + 0.01, work.answered + 1, 0, 1)
        lag.tick(200.0 + tick * 2 * TICK_SECONDS, work)
    assert lag.full(1) == pytest.approx(0.01 / FULL_SECONDS, rel=0.01)
    assert lag.full(FULL_REQUESTS // 8) > 1


def test_before_anything_was_answered_nothing_is_refused() -> None:
    lag = LoopLag()
    for tick in range(100):
        lag.tick(tick * 0.1, LoopWork(tick * 0.09, 0, 0, 10_000))
    assert not lag.overrun


@pytest.mark.parametrize(
    "phases",
    [
        pytest.param([(LATE, FULL - 1, 20 * STANDING_SECONDS)], id="many callers who each wait for their reply"),
        pytest.param([(ON_TIME, 100 * FULL, 20 * STANDING_SECONDS)], id="a slow engine"),
        pytest.param([(30 * LATE, 10 * FULL, STANDING_SECONDS / 2), (LATE, FULL // 2, 1.0)], id="a burst"),
        pytest.param(
            [(LATE, 2 * FULL, 0.08), (ON_TIME, FULL // 2, TICK_SECONDS / 2)] * 10, id="a short wait now and then"
        ),
        pytest.param([(LATE, 2 * FULL, 0.02), (ON_TIME, 2 * FULL, 0.1)] * 10, id="time to spare now and then"),
        pytest.param([*OVERRUN, (ON_TIME, FULL // 4, 1.5 * RECOVERED_SECONDS)], id="nearly idle for a while"),
    ],
)
def test_it_is_no_overrun(phases: list[tuple[float, int, float]]) -> None:
    assert not after(*phases).overrun


@pytest.mark.parametrize(
    "phases",
    [
        pytest.param(OVERRUN, id="a long wait all the time"),
        pytest.param([(LATE, 2 * FULL, 0.03), (ON_TIME, 2 * FULL, TICK_SECONDS / 2)] * 10, id="late on average"),
        pytest.param([*OVERRUN, (ON_TIME, FULL - 1, 3 * RECOVERED_SECONDS)], id="as much as may wait"),
        pytest.param([*OVERRUN, (ON_TIME, 0, RECOVERED_SECONDS / 2)], id="idle, but not for long"),
    ],
)
def test_it_is_an_overrun(phases: list[tuple[float, int, float]]) -> None:
    assert after(*phases).overrun
