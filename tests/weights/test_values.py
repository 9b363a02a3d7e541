"""What a time, an id, a surface, an action's value, a dwell and a score weight may be, each value and a column of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from weights import values

NOW = 1_780_000_000
Rule = tuple[Callable[[Any], str | None], Callable[[Any], tuple[int, str] | None], str]
RULES: dict[str, Rule] = {
    "time": (values.time_problem, values.problem_of_times, values.TIME_RULE),
    "dwell": (values.dwell_problem, values.problem_of_dwells, values.DWELL_RULE),
    "surface": (
        partial(values.surface_problem, surfaces=16),
        partial(values.problem_of_surfaces, surfaces=16),
        "must be an integer between 0 and 15",
    ),
    "score weight": (values.score_weight_problem, values.problem_of_score_weights, values.SCORE_WEIGHT_RULE),
}


@pytest.mark.parametrize(
    ("rule", "right", "wrong", "no_number"),
    [
        ("time", [0, NOW, values.MAX_TIME], [-1], [2.0, True, str(NOW), None, 10**21]),
        ("dwell", [0, 12.5, 1e300], [-0.5, float("nan"), float("inf")], [True, "1", None, 10**400]),
        ("surface", [0, 15], [-1, 16], [2.0, True, "1", None, 10**21]),
        ("score weight", [0, -0.5, -1e9, 1e9], [1.1e9, -1.1e9, float("nan")], [True, "1", None, 10**400]),
    ],
)
def test_a_value_and_a_column_are_judged_alike(
    rule: str, right: list[Any], wrong: list[Any], no_number: list[Any]
) -> None:
    of_one, of_column, sentence = RULES[rule]
    assert [of_one(value) for value in right] == [None] * len(right)
    assert of_column(np.array(right)) is None
    for value in wrong:
        assert of_one(value) == sentence
        assert of_column(np.array([right[0], value])) == (1, sentence)
    assert [of_one(value) for value in no_number] == [sentence] * len(no_number)


@pytest.mark.parametrize(
    ("time", "unit"), [(NOW * 10**3, "milliseconds"), (NOW * 10**6, "microseconds"), (NOW * 10**9, "nanoseconds")]
)
def test_a_time_in_a_finer_unit_is_told_so(time: int, unit: str) -> None:
    sentence = values.time_problem(time)
    assert sentence is not None
    assert "Unix seconds" in sentence
    assert f"looks like {unit}" in sentence
    assert values.problem_of_times(np.array([NOW, time, time])) == (1, sentence)


def test_a_column_of_times_is_of_integers() -> None:
    assert values.problem_of_times(np.array([1.5])) == (0, values.TIME_RULE)
    assert values.problem_of_times(np.array([5, NOW], np.uint64)) is None
    assert values.problem_of_times(np.zeros(0)) is None


def test_a_flag_is_true_or_false_or_1_or_0() -> None:
    for flags in ([True, False], [1.0, 0.0]):
        assert values.problem_of_flags(np.array(flags)) is None
        assert values.problem_of_flags(np.array([*flags, 0.5])) == (2, values.FLAG_RULE)


@pytest.mark.parametrize("value", [-1, 1e6 + 1, float("nan")])
def test_the_value_of_an_action_has_bounds(value: float) -> None:
    assert values.problem_of_actions(np.array([0, 0.5, 1e6])) is None
    assert values.problem_of_actions(np.array([[0, 1], [0.5, value]])) == (1, values.ACTION_VALUE_RULE)


@pytest.mark.parametrize("id_", [0, 2**64 - 1, "0", "18446744073709551615"])
def test_an_id_is_an_unsigned_integer_of_64_bits(id_: Any) -> None:
    assert values.id_problem(id_) is None


@pytest.mark.parametrize("id_", [-1, 2**64, "18446744073709551616", "007", "", "-1", "1_0", "٣", 1.0, True, None])
def test_any_other_id_is_refused(id_: Any) -> None:
    assert values.id_problem(id_) == values.ID_RULE


@pytest.mark.parametrize(("id_", "passes"), [("post:7", True), ("0", True), ("x" * 129, False), (7, False)])
def test_a_text_id_is_a_short_text(id_: Any, passes: bool) -> None:
    assert values.id_problem(id_, "text") == (None if passes else values.ID_RULES["text"])


def test_0_is_no_stored_post() -> None:
    assert values.problem_of_stored_ids(np.array([3, 0], np.uint64)) == (1, values.ZERO_ID_RULE)
    assert values.problem_of_stored_ids(np.array([3], np.uint64)) is None
