"""The short form of R1 to R4: posts are changed, compacted, swapped and killed while they are searched, against a replay."""

from __future__ import annotations

import pytest

from loadtest.soak.pairs import pairs
from loadtest.soak.posts import Pace, changes, kills

pytestmark = pytest.mark.timeout(120)

BRISK = Pace(4, 5, 7)


def test_r1_r2_r3_every_answer_is_what_a_replay_says() -> None:
    rows = changes(100, BRISK)
    assert [row.to_json() for row in rows if not row.ok] == []
    assert min(row.tried for row in rows[:2]) > 50
    assert rows[2].tried > 3


def test_r1_r2_r3_hold_through_fronts() -> None:
    rows = changes(40, BRISK, fronts=2)
    assert [row.to_json() for row in rows if not row.ok] == []
    assert min(row.tried for row in rows[:2]) > 50


def test_they_are_red_for_planted_faults() -> None:
    """The replay misses changes (R1), posts are taken for deleted that are not (R2), a swap names the corpus alone (R3)."""
    assert [row.row for row in changes(45, BRISK, ["forget", "claim", "half"]) if not row.ok] == ["R1", "R2", "R3"]


def test_r1_a_kill_loses_no_acknowledged_change() -> None:
    assert kills(1).ok


def test_r1_is_red_where_a_crash_takes_half_of_the_log() -> None:
    assert kills(1, ["lose"]).figure == 1


def test_r4_two_servers_on_one_corpus_lose_no_acknowledged_change() -> None:
    rows = pairs(10, 6)
    assert [row.to_json() for row in rows if not row.ok] == []
    assert rows[0].tried > 5


def test_r4_is_red_where_a_crash_takes_half_of_the_log() -> None:
    rows = pairs(4, 10, ["lose"], compact_share=0)
    assert [(row.ok, row.figure > 0) for row in rows[:1]] == [(False, True)]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_r4_holds_for_a_thousand_rounds() -> None:
    rows = pairs(1000, seconds=1000)
    assert [row.to_json() for row in rows if not row.ok] == []
    assert rows[0].tried > 900
