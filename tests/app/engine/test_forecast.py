"""Predictions of forward time: exact on what is linear, optimistic on what is unknown, never absurd."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.forecast import ForwardTime, Offered


def test_a_linear_engine_is_learnt() -> None:
    time = ForwardTime()
    assert time.seconds(100) is None
    time.observe(100, 0.0)
    assert time.seconds(100) is None  # nothing can be said of no time
    for cost in (50, 100, 400, 100, 50):
        time.observe(cost, 0.01 + cost * 1e-4)
    assert time.seconds(0) == pytest.approx(0.01)
    assert time.seconds(1000) == pytest.approx(0.11)


def test_one_size_says_nothing_of_others_and_is_taken_as_fixed() -> None:
    time = ForwardTime()
    for _ in range(50):
        time.observe(20, 0.05)
    assert time.seconds(80) == pytest.approx(0.05)


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


def test_offered_work_is_counted_in_full_forwards_a_second() -> None:
    offered = Offered(memory_seconds=0.5)
    for step in range(400):  # 100 a second, a quarter of a forward each
        offered.observe(step / 100, 0.25)
    assert offered.forwards_per_second(4.0) == pytest.approx(25, rel=0.05)
    assert offered.forwards_per_second(9.0) < 0.1  # silence is forgotten
