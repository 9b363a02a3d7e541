"""History or candidates in either shape → the same columns of JSON values. Not for what the values mean: that is `columns`."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.request import columns
from app.request.columns import Problems, Where
from app.request.contract import Post

MAX_HINTED_NAME = 32  # a longer unknown name is no typing error, and comparing it costs time
MISSING = object()


@dataclass(frozen=True, slots=True)
class Table:
    """Items as columns. An optional column that no item has is left out, and reads as zeros."""

    name: str
    columns: dict[str, list[Any]]
    length: int
    is_columnar: bool

    def where(self, field: str) -> Where:
        """How a problem names an entry of this column: `candidates[3].post_id`, or `candidates.post_id[3]`."""
        if self.is_columnar:
            return lambda index: f"{self.name}.{field}[{index}]"
        return lambda index: f"{self.name}[{index}].{field}"

    def ids(self, field: str, problems: Problems) -> NDArray[np.uint64]:
        """A column of ids, uint64 `[n]`."""
        given = self.columns.get(field)
        return np.zeros(self.length, np.uint64) if given is None else columns.ids(given, self.where(field), problems)

    def integers(self, field: str, problems: Problems, *, high: int) -> NDArray[np.int64]:
        """A column of integers from 0 to high, int64 `[n]`."""
        given = self.columns.get(field)
        if given is None:
            return np.zeros(self.length, np.int64)
        return columns.integers(given, self.where(field), problems, low=0, high=high)

    def numbers(self, field: str, problems: Problems) -> NDArray[np.float64]:
        """A column of numbers that are not negative, float64 `[n]`."""
        given = self.columns.get(field)
        if given is None:
            return np.zeros(self.length)
        return columns.numbers(given, self.where(field), problems, low=0, high=float("inf"))


def read_table(items: Any, name: str, kind: type[Post], problems: Problems) -> Table:
    """The columns of `kind`'s fields, all of one length. After a problem some are missing, or the table is empty."""
    if type(items) is list:
        return _from_objects(items, name, kind, problems)
    if type(items) is dict:
        return _from_arrays(items, name, kind, problems)
    problems.add(name, "must be a list of objects or one object of equal-length arrays")
    return Table(name, {}, 0, False)


def _note_missing(column: list[Any], path: str, problems: Problems) -> None:
    problems.locate(column, lambda index: path.format(index), lambda value: value is not MISSING, "is required")


@cache
def _defaults(kind: type[Post]) -> dict[str, Any]:
    """Optional fields and what they are when missing."""
    return {name: field.default for name, field in kind.model_fields.items() if not field.is_required()}


def _from_objects(items: list[Any], name: str, kind: type[Post], problems: Problems) -> Table:
    if not set(map(type, items)) <= {dict}:
        problems.locate(items, lambda index: f"{name}[{index}]", lambda item: type(item) is dict, "must be an object")
        return Table(name, {}, 0, False)
    present = set().union(*items)
    if not present <= kind.model_fields.keys():
        for index, item in enumerate(items):
            refuse_unknown(item, kind.model_fields.keys(), f"{name}[{index}]", problems)
    defaults, found = _defaults(kind), {}
    for field in kind.model_fields:
        if field in defaults and field not in present:
            continue
        try:
            found[field] = list(map(itemgetter(field), items))
        except KeyError:  # some items lack it
            column = [item.get(field, defaults.get(field, MISSING)) for item in items]
            if field in defaults:
                found[field] = column
            else:
                _note_missing(column, f"{name}[{{}}].{field}", problems)
    return Table(name, found, len(items), False)


def _from_arrays(items: dict[str, Any], name: str, kind: type[Post], problems: Problems) -> Table:
    refuse_unknown(items, kind.model_fields.keys(), name, problems)
    found = {}
    for field in kind.model_fields:
        if field not in items:
            if field not in _defaults(kind):
                problems.add(f"{name}.{field}", "is required")
        elif type(items[field]) is not list:
            problems.add(f"{name}.{field}", "must be an array with one entry an item")
        else:
            found[field] = items[field]
    lengths = {len(column) for column in found.values()}
    if len(lengths) > 1:
        problems.add(name, "must hold arrays of equal length")
        return Table(name, {}, 0, True)
    return Table(name, found, max(lengths, default=0), True)


def refuse_unknown(given: Collection[str], known: Collection[str], path: str, problems: Problems) -> None:
    """Note the fields that nobody knows. Their names are the caller's, so only the nearest known one is shown."""
    for field in given:
        if field in known:
            continue
        near = difflib.get_close_matches(field, known, n=1) if len(field) <= MAX_HINTED_NAME else []
        hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
        problems.add(path, f"has an unknown field{hint}")
