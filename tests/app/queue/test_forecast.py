"""Predictions of forward time: exact on what is linear, optimistic on what is unknown, never absurd. What a request costs the event loop is
learned from what the loop did lately, and from nothing where too few came."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.queue.forecast import LEAST_REQUESTS, REFUSAL_SHARE, ForwardTime, LoopTime, LoopWork


def test_a_linear_engine_is_learnt() -> None:
    time = ForwardTime()
    assert time.seconds(100) is None
    time.observe(100, 0.0)
    assert time.seconds(100) is None  # nothing can be said of no time
    for cost in (50, 100, 400, 100, 50):
        time.observe(cost, 0.01 + cost * 1e-4)
    assert time.seconds(0) == pytest.approx(0.01)
    assert time.seconds(1000) == pytest.approx(0.11)


def test_what_is_late_is_known_for_every_size() -> None:
    time = ForwardTime()
    for cost in (100, 200, 400):
        time.observe(cost, cost * 0.001)
    outlook = time.outlook(begins_at=10.0, shared_cost=300)
    assert outlook.late_seconds(100, 1, leaves_at=10.5, now=9.0) == pytest.approx(-0.1)  # it ends at 10.4
    assert outlook.late_seconds(100, 1, leaves_at=10.3, now=9.0) == pytest.approx(0.1)
    assert outlook.late_seconds(100, 1, leaves_at=10.3, now=10.2) == pytest.approx(
        0.25
    )  # a forecast of before: it begins now
    alone = time.outlook(10.0, 0)
    assert alone.late_seconds(100, 1, leaves_at=10.0, now=10.0) < 0  # callers who leave at once keep nobody out


def test_the_recent_past_counts_more() -> None:
    time = ForwardTime(half_life_seconds=1.0)
    for _ in range(100):
        time.observe(100, 0.1)
    for _ in range(100):
        time.observe(100, 0.2)
    assert time.seconds(100) == pytest.approx(0.2, rel=0.01)


@given(
    st.lists(st.tuples(st.integers(1, 10_000), st.floats(1e-4, 10)), min_size=1, max_size=30), st.integers(0, 20_000)
)
def test_it_is_never_negative_and_never_falls_with_cost(seen: list[tuple[int, float]], cost: int) -> None:
    time = ForwardTime()
    for observed in seen:
        time.observe(*observed)
    small, large = time.seconds(cost), time.seconds(cost + 100)
    assert small is not None
    assert large is not None
    assert -1e-9 <= small <= large + 1e-9


def busy(each_seconds: float, *, answered: int, refused: int = 0, background: float = 0.0) -> LoopTime:
    """Two seconds in which this many requests a tick cost the loop that much each, beside something else."""
    time, work = LoopTime(), LoopWork(0.0, 0, 0)
    for tick in range(100):
        time.observe(100 + tick * 0.02, work)
        cost = (answered + REFUSAL_SHARE * refused) * each_seconds + background
        work = LoopWork(work.cpu_seconds + cost, work.answered + answered, work.refused + refused)
    return time


@pytest.mark.parametrize("refused", [0, 50])
def test_the_wait_is_what_the_requests_in_hand_cost(refused: int) -> None:
    time = busy(0.001, answered=10, refused=refused)
    assert time.wait_seconds(200) == pytest.approx(0.2)
    assert time.wait_seconds(0) == 0.0


def test_what_a_request_costs_is_learnt_anew() -> None:
    time = busy(0.001, answered=10)
    work = LoopWork(100.0, 10_000, 0)
    for tick in range(500):
        time.observe(200 + tick * 0.02, work)
        work = LoopWork(work.cpu_seconds + 0.02, work.answered + 5, 0)
    assert time.wait_seconds(10) == pytest.approx(0.04, rel=0.01)


def test_few_requests_do_not_blame_a_loop_busy_with_other_work() -> None:
    """As the collector does, or a scrape: else a handful of requests would be refused after it."""
    assert LEAST_REQUESTS > 25
    assert busy(0.001, answered=1, background=0.02).wait_seconds(10_000) == 0.0
    assert LoopTime().wait_seconds(10_000) == 0.0
