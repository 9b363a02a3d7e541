"""What a time, an id, an action's value and a dwell may be: one value and a column of them are judged alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weights import values

NOW = 1_780_000_000


@pytest.mark.parametrize("time", [0, 1, NOW, values.MAX_TIME])
def test_a_time_in_unix_seconds_passes(time: int) -> None:
    assert values.time_problem(time) is None
    assert values.problem_of_times(np.array([time])) is None


@pytest.mark.parametrize(
    ("time", "unit"), [(NOW * 10**3, "milliseconds"), (NOW * 10**6, "microseconds"), (NOW * 10**9, "nanoseconds")]
)
def test_a_time_in_a_finer_unit_is_told_so(time: int, unit: str) -> None:
    sentence = values.time_problem(time)
    assert sentence is not None
    assert "Unix seconds" in sentence
    assert f"looks like {unit}" in sentence
    assert values.problem_of_times(np.array([NOW, time, time])) == (1, sentence)


@pytest.mark.parametrize("time", [-1, -NOW * 1000, 10**21, 2.0, True, "1780000000", None])
def test_any_other_time_is_refused(time: Any) -> None:
    assert values.time_problem(time) == values.TIME_RULE


def test_a_column_of_times_is_of_integers() -> None:
    assert values.problem_of_times(np.array([1.5])) == (0, values.TIME_RULE)
    assert values.problem_of_times(np.array([0, -5])) == (1, values.TIME_RULE)
    assert values.problem_of_times(np.array([5, NOW], np.uint64)) is None
    assert values.problem_of_times(np.zeros(0)) is None


@pytest.mark.parametrize("dwell", [0, 12.5, 1e300])
def test_a_dwell_is_finite_and_not_negative(dwell: float) -> None:
    assert values.dwell_problem(dwell) is None
    assert values.problem_of_dwells(np.array([dwell], np.float64)) is None


@pytest.mark.parametrize("dwell", [-0.5, float("nan"), float("inf")])
def test_any_other_dwell_is_refused(dwell: float) -> None:
    assert values.dwell_problem(dwell) == values.DWELL_RULE
    assert values.problem_of_dwells(np.array([1, dwell], np.float32)) == (1, values.DWELL_RULE)


@pytest.mark.parametrize("flags", [[True, False], [0, 1], [1.0, 0.0]])
def test_a_flag_is_true_or_false_or_1_or_0(flags: list[Any]) -> None:
    assert values.problem_of_flags(np.array(flags)) is None
    for other in (0.5, 3, -1, float("nan")):
        assert values.problem_of_flags(np.array([*flags, other])) == (2, values.FLAG_RULE)


@pytest.mark.parametrize("value", [0, 1, 0.5, 1e6])
def test_an_action_has_a_value_up_to_a_million(value: float) -> None:
    assert values.action_problem(value) is None
    assert values.problem_of_actions(np.array([value])) is None


@pytest.mark.parametrize("value", [-1, 1e6 + 1, float("nan")])
def test_any_other_value_of_an_action_is_refused(value: float) -> None:
    assert values.action_problem(value) == values.ACTION_VALUE_RULE
    assert values.problem_of_actions(np.array([[1.0, 0.0], [0.0, value]])) == (1, values.ACTION_VALUE_RULE)


@pytest.mark.parametrize("value", [True, "1", None, 10**400])
def test_only_numbers_are_numbers(value: Any) -> None:
    assert values.dwell_problem(value) == values.DWELL_RULE
    assert values.action_problem(value) == values.ACTION_VALUE_RULE
    assert values.score_weight_problem(value) == values.SCORE_WEIGHT_RULE


@pytest.mark.parametrize(("weight", "passes"), [(-1e9, True), (1e9, True), (1.1e9, False), (float("nan"), False)])
def test_a_score_weight_has_a_bound(weight: float, passes: bool) -> None:
    assert values.score_weight_problem(weight) == (None if passes else values.SCORE_WEIGHT_RULE)


@pytest.mark.parametrize("id_", [0, 1, 2**64 - 1, "0", "18446744073709551615"])
def test_an_id_is_an_unsigned_integer_of_64_bits(id_: Any) -> None:
    assert values.id_problem(id_) is None


@pytest.mark.parametrize("id_", [-1, 2**64, "18446744073709551616", "007", "", "-1", "+1", "1_0", "٣", 1.0, True, None])
def test_any_other_id_is_refused(id_: Any) -> None:
    assert values.id_problem(id_) == values.ID_RULE


@pytest.mark.parametrize(
    ("id_", "passes"), [("post:7", True), ("0", True), ("", False), ("x" * 129, False), (7, False)]
)
def test_a_text_id_is_a_short_text(id_: Any, passes: bool) -> None:
    assert values.id_problem(id_, "text") == (None if passes else values.ID_RULES["text"])
    assert values.stored_id_problem(id_, "text") == values.id_problem(id_, "text")


def test_0_is_no_stored_post() -> None:
    assert values.stored_id_problem(0) == values.stored_id_problem("0") == values.ZERO_ID_RULE
    assert values.stored_id_problem(7) is None
    assert values.stored_id_problem(-7) == values.ID_RULE
    assert values.problem_of_stored_ids(np.array([3, 0], np.uint64)) == (1, values.ZERO_ID_RULE)
    assert values.problem_of_stored_ids(np.array([3], np.uint64)) is None
