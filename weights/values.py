"""Says what times, ids, surfaces, dwells, values of actions and score weights may be. Whoever reads files, feeds or requests asks here.

A check returns what is wrong, or None. `..._problem(value)` judges one value as JSON gives it; `problem_of_...(column)` judges a numpy
column `[n]` and returns the first bad row with its sentence. No sentence repeats the value, so each is safe to show to anybody, and each
reads on behind a name: "created_at must be Unix seconds, …".
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.bounds import MAX_CODE, MAX_CODE_LEVELS
from weights.text_ids import TEXT_RULE, IdKind, is_text_id

MAX_ID = 2**64 - 1
MAX_TIME = 253_402_300_799
"""Unix seconds of the last second of the year 9999. Milliseconds, microseconds and nanoseconds of any day since 1978 lie above it."""
MAX_ACTION_VALUE = 1e6
_ACTION_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")  # never a number: a decimal string in a request is an index
MAX_SCORE_WEIGHT = 1e9
"""Bound of a score weight's magnitude, in manifests and in requests."""

TIME_RULE = f"must be Unix seconds, an integer between 0 and {MAX_TIME} (0: unknown)"
DWELL_RULE = "must be seconds, a finite number of at least 0 (0: unknown)"
ACTION_NAME_RULE = "must be letters, digits and underscores, a letter first, at most 64"
ACTION_VALUE_RULE = f"must be a number between 0 and {MAX_ACTION_VALUE:g}"
SCORE_WEIGHT_RULE = f"must be a number between {-MAX_SCORE_WEIGHT:g} and {MAX_SCORE_WEIGHT:g}"
SURFACE_RULE = "must be an integer between 0 and {}"
CODES_RULE = f"must be a list of at most {MAX_CODE_LEVELS} content codes, integers between 0 (none) and {MAX_CODE}"
FLAG_RULE = "must be true or false, or 1 or 0"
ID_RULE = "must be an unsigned 64-bit integer, as an integer or a decimal string without leading zeros"
ID_RULES: dict[IdKind, str] = {"uint64": ID_RULE, "text": f"{TEXT_RULE}, as all ids of this checkpoint are"}
ZERO_ID_RULE = "must not be 0, which is padding"

MAX_POSITION, MAX_ROW_WEIGHT = 1_000_000, 1_000_000
_FINER_UNITS = (("milliseconds", 10**3), ("microseconds", 10**6), ("nanoseconds", 10**9))

DAY_SECONDS = 86_400

Problem = tuple[int, str]
"""The first bad row of a column, and what is wrong with its value."""


def time_problem(value: Any) -> str | None:
    """What is wrong with a time, Unix seconds; 0 is an unknown time. A number in a finer unit is told which one it looks like."""
    if type(value) is not int:
        return TIME_RULE
    if 0 <= value <= MAX_TIME:
        return None
    for unit, per_second in _FINER_UNITS:
        if 0 <= value <= MAX_TIME * per_second:
            return f"{TIME_RULE}; this looks like {unit}: divide by {per_second}"
    return TIME_RULE


def dwell_problem(value: Any) -> str | None:
    """What is wrong with a dwell, the seconds spent on a post. There is no upper bound: the model clips at 30 s."""
    return None if _is_number(value) and value >= 0 else DWELL_RULE


def action_name_problem(value: Any) -> str | None:
    """What is wrong with the name of an action or of a continuous output."""
    return None if type(value) is str and _ACTION_NAME.fullmatch(value) else ACTION_NAME_RULE


def score_weight_problem(value: Any) -> str | None:
    """What is wrong with a weight of the combined score."""
    return None if _is_number(value) and abs(value) <= MAX_SCORE_WEIGHT else SCORE_WEIGHT_RULE


def surface_problem(value: Any, surfaces: int) -> str | None:
    """What is wrong with a product surface, for a model that knows this many."""
    return None if type(value) is int and 0 <= value < surfaces else SURFACE_RULE.format(surfaces - 1)


def id_problem(value: Any, kind: IdKind = "uint64") -> str | None:
    """What is wrong with the id of a user, post or author as JSON has it. 0 passes: an anonymous user, an unknown author, padding."""
    if kind == "text":
        return None if is_text_id(value) else ID_RULES[kind]
    if type(value) is str:
        is_decimal = value.isascii() and value.isdecimal() and len(value) <= len(str(MAX_ID))
        value = int(value) if is_decimal and (value == "0" or value[0] != "0") else None
    return None if type(value) is int and 0 <= value <= MAX_ID else ID_RULE


def codes_rule(levels: int, values: int) -> str:
    """What the content codes of a post must be for a model with `levels` codes of 1 … `values`; for any model if `levels` is 0."""
    if not levels:
        return CODES_RULE
    return f"must be a list of {levels} content codes, integers between 0 (none) and {values}, or an empty list"


def codes_problem(codes: Sequence[int], levels: int = 0, values: int = 0) -> str | None:
    """What is wrong with the content codes of one post; see `codes_rule`."""
    most = values if levels else MAX_CODE
    fits = len(codes) in (0, levels) if levels else len(codes) <= MAX_CODE_LEVELS
    if fits and (not codes or (min(codes) >= 0 and max(codes) <= most)):
        return None
    return codes_rule(levels, values)


def problem_of_codes(column: NDArray[np.int64], levels: int = 0, values: int = 0) -> Problem | None:
    """`codes_problem` of a column of codes, int64 `[n, Q]`."""
    most, width = (values if levels else MAX_CODE), column.shape[1]
    if width > MAX_CODE_LEVELS or (levels and width not in (0, levels)):
        return (0, codes_rule(levels, values)) if len(column) else None
    row = _first(((column < 0) | (column > most)).any(1)) if width else None
    return None if row is None else (row, codes_rule(levels, values))


def problem_of_times(column: NDArray[Any]) -> Problem | None:
    """`time_problem` of a column of integers; a column of another kind is refused at its first row."""
    if column.dtype.kind not in "iu":
        return (0, TIME_RULE) if len(column) else None
    row = _first((column < 0) | (column > MAX_TIME))
    return None if row is None else (row, time_problem(int(column[row])) or TIME_RULE)


def problem_of_dwells(column: NDArray[Any]) -> Problem | None:
    """`dwell_problem` of a column of numbers."""
    row = _first(~(np.isfinite(column) & (column >= 0)))
    return None if row is None else (row, DWELL_RULE)


def problem_of_surfaces(column: NDArray[np.int64], surfaces: int) -> Problem | None:
    """`surface_problem` of a column of integers."""
    row = _first((column < 0) | (column >= surfaces))
    return None if row is None else (row, SURFACE_RULE.format(surfaces - 1))


def problem_of_actions(column: NDArray[Any]) -> Problem | None:
    """What is wrong with a column of values of actions, numbers or booleans, `[n]` or `[n, A]`: 1 for taken, 0 for not taken, or how much
    of it."""
    bad = ~((column >= 0) & (column <= MAX_ACTION_VALUE))
    row = _first(bad if bad.ndim == 1 else bad.any(axis=1))
    return None if row is None else (row, ACTION_VALUE_RULE)


def problem_of_score_weights(column: NDArray[np.float64]) -> Problem | None:
    """`score_weight_problem` of a column of numbers."""
    row = _first(~(abs(column) <= MAX_SCORE_WEIGHT))
    return None if row is None else (row, SCORE_WEIGHT_RULE)


def problem_of_positions(column: NDArray[np.int64]) -> Problem | None:
    """What is wrong with a column of places in a list: 1 is the first, 0 is unknown."""
    row = _first((column < 0) | (column > MAX_POSITION))
    return (
        None
        if row is None
        else (row, f"must be an integer between 0 and {MAX_POSITION:,} (1: the first place, 0: unknown)")
    )


def problem_of_propensities(column: NDArray[np.float64]) -> Problem | None:
    """What is wrong with a column of probabilities with which a post got its place; 0 is unknown."""
    row = _first(~((column >= 0) & (column <= 1)))
    return None if row is None else (row, "must be a probability between 0 and 1 (0: unknown)")


def problem_of_weights(column: NDArray[np.float32]) -> Problem | None:
    """What is wrong with a column that says how often each row counts in training."""
    row = _first(~((column >= 0) & (column <= MAX_ROW_WEIGHT)))
    return None if row is None else (row, f"must be a number between 0 and {MAX_ROW_WEIGHT:,}")


def problem_of_flags(column: NDArray[Any]) -> Problem | None:
    """What is wrong with a column of numbers or booleans that says of each row whether an action was taken."""
    row = _first((column != 0) & (column != 1))
    return None if row is None else (row, FLAG_RULE)


def problem_of_stored_ids(column: NDArray[np.uint64]) -> Problem | None:
    """What is wrong with ids of a corpus or a log, uint64: 0, which is padding and no post. No text has the hash 0."""
    row = _first(column == 0)
    return None if row is None else (row, ZERO_ID_RULE)


def _first(bad: Any) -> int | None:
    return int(bad.argmax()) if bad.any() else None


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False
