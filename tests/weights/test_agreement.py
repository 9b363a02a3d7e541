"""Figures of two rankings of one request: by hand, against scipy's, and where nothing or everything is tied."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weights.agreement import TOP, agreement, kendall, pearson


def test_by_hand() -> None:
    left, right = np.array([4.0, 3, 2, 1]), np.array([4.0, 2, 3, 1])
    found = agreement(left, right)
    assert found.kendall == pytest.approx((5 - 1) / 6)
    assert found.overlap == {1: 1.0, 3: 1.0}
    assert agreement(left, right[::-1].copy()).overlap == {1: 0.0, 3: 2 / 3}
    assert kendall(left, -left) == pytest.approx(-1)
    assert kendall(np.zeros(3), np.zeros(3)) == 1
    assert kendall(np.zeros(3), left[:3]) == 0
    assert math.isnan(pearson(np.zeros(3), left[:3]))


SCORES = st.lists(st.tuples(st.integers(-4, 4), st.floats(-50, 50, width=32)), min_size=2, max_size=300)


@settings(max_examples=60, deadline=None)
@given(SCORES, st.booleans())
def test_as_scipy_says(rows: list[tuple[int, float]], is_tied: bool) -> None:
    stats = pytest.importorskip("scipy.stats")
    left = np.array([row[0] for row in rows], np.float32)
    right = np.array([round(row[1] / 20) if is_tied else row[1] for row in rows], np.float32)
    if np.ptp(left) and np.ptp(right):
        assert kendall(left, right) == pytest.approx(stats.kendalltau(left, right).statistic, abs=1e-9)
        assert pearson(left, right) == pytest.approx(
            np.corrcoef(left.astype(float), right.astype(float))[0, 1], abs=1e-6
        )


@pytest.mark.parametrize("posts", [2, 5, 64, 1000, 4096])
def test_the_same_ranking_agrees_with_itself_and_a_random_one_does_not(posts: int) -> None:
    random = np.random.default_rng(posts)
    scores = random.normal(size=posts).astype(np.float32)
    same = agreement(scores, 3 * scores + 1)
    assert (same.correlation, same.kendall) == pytest.approx((1, 1))
    assert same.overlap == {k: 1.0 for k in TOP if k < posts}
    if posts >= 64:
        other = agreement(scores, random.normal(size=posts).astype(np.float32))
        assert abs(other.kendall) < 0.3
        assert other.overlap[1] <= 1
