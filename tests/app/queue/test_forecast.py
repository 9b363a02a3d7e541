"""Predictions of forward time: exact on what is linear, optimistic on what is unknown, never absurd."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.queue.forecast import ForwardTime


def test_a_linear_engine_is_learnt() -> None:
    time = ForwardTime()
    assert time.seconds(100) is None
    time.observe(100, 0.0)
    assert time.seconds(100) is None  # nothing can be said of no time
    for cost in (50, 100, 400, 100, 50):
        time.observe(cost, 0.01 + cost * 1e-4)
    assert time.seconds(0) == pytest.approx(0.01)
    assert time.seconds(1000) == pytest.approx(0.11)


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
