"""How long callers wait before they leave: learned from those who did."""

from __future__ import annotations

import math

import pytest

from app.api.patience import LEAST_SHARE, MOST_SHARE, Patience


def left(patience: Patience, times: int, *, was_read: bool) -> None:
    """So many callers leave after a second, in two moments."""
    for turn in range(times):
        patience.left(10.0 + turn % 2, 1.0, was_read=was_read)


def test_replies_are_wanted_earlier_the_more_of_them_come_too_late() -> None:
    unread, read = Patience(), Patience()
    left(unread, 8, was_read=False)
    left(read, 8, was_read=True)
    assert unread.seconds(11.0) == pytest.approx(MOST_SHARE)
    assert LEAST_SHARE < read.seconds(11.0) < MOST_SHARE
    left(read, 100, was_read=True)
    assert read.seconds(11.0) == pytest.approx(LEAST_SHARE)
    for _ in range(200):
        read.answered(11.0, 0.1)
    assert LEAST_SHARE < read.seconds(11.0) <= MOST_SHARE


def test_nobody_leaves_where_nobody_left() -> None:
    assert Patience().seconds(0.0) == math.inf
