"""Checks whole columns of JSON values at once: a fast pass over the types, a slow one only to find what is wrong. Not for fields' names.

Each check returns the column in numpy, or an empty one after it noted a problem: whoever notes, raises in the end.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from app.errors import MAX_PROBLEMS, InvalidRequest
from app.request.contract import MAX_ACTION_VALUE, MAX_ID

Where = Callable[[int], str]
MAX_ID_DIGITS = len(str(MAX_ID))
ID_RULE = "must be an unsigned 64-bit integer, as a JSON integer or a decimal string without leading zeros"
ACTION_RULE = "must name an action of this checkpoint, or be the decimal string of its index"


class Problems:
    """What is wrong with one request, up to the ten that are reported."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def add(self, field: str, message: str) -> None:
        """Note a problem. Raises InvalidRequest with the tenth: nobody reads more, and looking on costs time."""
        self.found.append((field, message))
        if len(self.found) >= MAX_PROBLEMS:
            raise InvalidRequest(self.found)

    def check(self) -> None:
        """Raise InvalidRequest when anything was noted."""
        if self.found:
            raise InvalidRequest(self.found)

    def locate(self, values: Sequence[Any], where: Where, is_good: Callable[[Any], bool], rule: str) -> None:
        """Note every value that is not good."""
        for index, value in enumerate(values):
            if not is_good(value):
                self.add(where(index), rule)


def ids(values: Sequence[Any], where: Where, problems: Problems) -> NDArray[np.uint64]:
    """uint64 `[n]` from integers and decimal strings."""
    kinds = set(map(type, values))
    found = values
    if str in kinds and kinds <= {int, str}:
        found = _from_decimals(values)
        kinds = set(map(type, found))
    if kinds <= {int}:
        with suppress(OverflowError):  # an id is what fits
            return np.asarray(array("Q", found))
    problems.locate(values, where, is_id, ID_RULE)
    return np.zeros(0, np.uint64)


def _from_decimals(values: Sequence[int | str]) -> Sequence[Any]:
    """The numbers that decimals stand for, read in one go: as one JSON list. The values themselves if one is no decimal."""
    joined = ",".join(map(str, values)).encode()
    if joined.translate(None, b"0123456789,"):
        return values
    try:
        found = orjson.loads(b"[%b]" % joined)
    except orjson.JSONDecodeError:  # an empty string, or a leading zero
        return values
    return found if len(found) == len(values) else values  # a decimal with a comma would make two


def _is_decimal(text: str) -> bool:
    short = 0 < len(text) <= MAX_ID_DIGITS
    return short and text.isascii() and text.isdigit() and (text[0] != "0" or text == "0")


def is_id(value: Any) -> bool:
    """Whether one JSON value is an id."""
    if type(value) is str:
        return _is_decimal(value) and int(value) <= MAX_ID
    return type(value) is int and 0 <= value <= MAX_ID


def integers(values: Sequence[Any], where: Where, problems: Problems, *, low: int, high: int) -> NDArray[np.int64]:
    """int64 `[n]`, each within low … high."""
    if set(map(type, values)) <= {int} and (not values or (min(values) >= low and max(values) <= high)):
        return np.array(values, dtype=np.int64)
    rule = f"must be an integer between {low} and {high}"
    problems.locate(values, where, lambda value: type(value) is int and low <= value <= high, rule)
    return np.zeros(0, np.int64)


def numbers(values: Sequence[Any], where: Where, problems: Problems, *, low: float, high: float) -> NDArray[np.float64]:
    """float64 `[n]`, each within low … high."""
    if set(map(type, values)) <= {int, float} and (not values or (min(values) >= low and max(values) <= high)):
        return np.array(values, dtype=np.float64)
    bounds = f"between {low:g} and {high:g}" if high < float("inf") else f"of at least {low:g}"
    is_good: Callable[[Any], bool] = lambda value: type(value) in (int, float) and low <= value <= high  # noqa: E731
    problems.locate(values, where, is_good, f"must be a number {bounds}")
    return np.zeros(0)


@dataclass(frozen=True, slots=True)
class ActionCells:
    """The actions of a history, as cells of its `[h, A]` matrix: item `rows[i]` has `values[i]` in column `columns[i]`."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    values: NDArray[np.float64]


NO_ACTIONS = ActionCells(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))


def actions(items: Sequence[Any], index: Mapping[str, int], where: Where, problems: Problems) -> ActionCells:
    """Cells from one entry an item: a list of names, or name → value. `index` knows names and decimal strings."""
    kinds = set(map(type, items))
    if not kinds <= {list, dict}:
        rule = "must be a list of names or a map of name to value"
        problems.locate(items, where, lambda item: type(item) in (list, dict), rule)
        return NO_ACTIONS
    try:
        cells = np.array([index[name] for name in chain.from_iterable(items)], dtype=np.int64)
    except (KeyError, TypeError):  # not a name; or not even hashable
        _locate_actions(items, index, where, problems)
        return NO_ACTIONS
    rows = np.repeat(np.arange(len(items)), np.fromiter(map(len, items), np.int64, len(items)))
    if dict not in kinds:
        return ActionCells(rows, cells, np.ones(len(cells)))
    pairs = list(chain.from_iterable(item.values() if type(item) is dict else repeat(1, len(item)) for item in items))
    values = numbers(pairs, lambda pair: where(int(rows[pair])), problems, low=0, high=MAX_ACTION_VALUE)
    for position, item in enumerate(items):
        if type(item) is dict and len(item) > 1 and len({index[name] for name in item}) < len(item):
            problems.add(where(position), "names one action twice, by name and by index")
    return ActionCells(rows, cells, values)


def _locate_actions(items: Sequence[Any], index: Mapping[str, int], where: Where, problems: Problems) -> None:
    for position, item in enumerate(items):
        for place, name in enumerate(item):
            if type(name) is not str or name not in index:
                suffix = "" if type(item) is dict else f"[{place}]"
                problems.add(where(position) + suffix, ACTION_RULE)
