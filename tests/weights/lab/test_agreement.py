"""Figures of two rankings of one request: by hand, and where everything is tied."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("scipy")

from weights.lab.agreement import agreement, kendall, pearson


def test_by_hand() -> None:
    left, right = np.array([4.0, 3, 2, 1]), np.array([4.0, 2, 3, 1])
    found = agreement(left, right)
    assert found.kendall == pytest.approx((5 - 1) / 6)
    assert found.correlation == pytest.approx(0.8)
    assert found.overlap == {1: 1.0, 3: 1.0}
    assert agreement(left, right[::-1].copy()).overlap == {1: 0.0, 3: 2 / 3}
    assert kendall(left, -left) == pytest.approx(-1)


def test_scores_that_are_all_tied() -> None:
    varied, tied = np.array([4.0, 3, 2]), np.zeros(3)
    assert kendall(tied, tied) == 1
    assert kendall(tied, varied) == kendall(varied, tied) == 0
    assert math.isnan(pearson(tied, varied))
