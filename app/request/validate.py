"""A typed body → a checked `Request` in columns: ids in range, known names, equal lengths. Not for features: it knows no window.

Both shapes of history and candidates become the same columns. Whatever is not right here is told by `explain`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, Struct
from msgspec.structs import astuple
from numpy.typing import NDArray

from app.request.body import Body, CandidateArrays, HistoryArrays
from app.request.contract import MAX_ID, is_request_id
from app.request.explain import explain
from app.request.ids import is_id, read_ids
from app.request.vocabulary import Vocabulary

Column = Any  # a sequence with one entry an item, or UNSET


@dataclass(frozen=True, slots=True)
class Posts:
    """Checked columns of history or candidates: ids uint64 `[n]`, surfaces int64 `[n]`."""

    post_ids: NDArray[np.uint64]
    author_ids: NDArray[np.uint64]
    surfaces: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.post_ids)


@dataclass(frozen=True, slots=True)
class ActionCells:
    """The actions of a history, as cells of its `[h, A]` matrix: item `rows[i]` has `values[i]` in column `columns[i]`."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    values: NDArray[np.float64]


NO_HISTORY, NO_CANDIDATES = HistoryArrays([], []), CandidateArrays([], [])
NO_ACTIONS = ActionCells(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))


@dataclass(frozen=True, slots=True)
class Request:
    """A valid request. `echo_ids` are the candidates' post ids as they came.

    `dwell_seconds` float64 `[h]`, `created_at` int64 `[C]` in Unix seconds, 0 where unknown. `weights` float64 `[A]`.
    `wanted` are columns of the reply, None for all.
    """

    user_id: int
    history: Posts
    actions: ActionCells
    dwell_seconds: NDArray[np.float64]
    candidates: Posts
    created_at: NDArray[np.int64]
    echo_ids: list[int | str]
    impression_ts: int
    weights: NDArray[np.float64]
    top_k: int | None
    wanted: list[int] | None
    request_id: str | None


def check(body: Body, vocabulary: Vocabulary) -> Request:
    """Check what the types leave open. Raises InvalidRequest with the first ten problems."""
    with suppress(ValueError, OverflowError, KeyError):
        return _checked(body, vocabulary)
    raise explain(msgspec.to_builtins(body), vocabulary)


def _checked(body: Body, vocabulary: Vocabulary) -> Request:
    """Raises ValueError, OverflowError or KeyError where the body is not right."""
    posts, authors, surfaces, actions, dwell_times = _columns(body.history or NO_HISTORY)
    history = _posts(posts, authors, surfaces, vocabulary)
    echo_ids, authors, surfaces, created_at = _columns(body.candidates or NO_CANDIDATES)
    candidates = _posts(echo_ids, authors, surfaces, vocabulary)
    weights, wanted = vocabulary.weights, None
    if body.weights is not UNSET:
        weights = np.zeros(len(vocabulary.action_names))
        weights[_distinct(body.weights, vocabulary.index)] = list(body.weights.values())
    if body.actions_wanted is not UNSET:
        wanted = _distinct(body.actions_wanted, vocabulary.index)
    top_k, request_id = body.top_k or None, body.request_id
    if not (
        is_id(body.user_id)
        and echo_ids
        and (top_k is None or top_k <= MAX_ID)
        and (request_id is UNSET or is_request_id(request_id))
    ):
        raise ValueError
    return Request(
        user_id=int(body.user_id),
        history=history,
        actions=_cells(actions, vocabulary.index),
        dwell_seconds=_numbers("d", dwell_times, len(history)),
        candidates=candidates,
        created_at=_numbers("q", created_at, len(candidates)),
        echo_ids=list(echo_ids),
        impression_ts=body.impression_ts or 0,
        weights=weights,
        top_k=top_k,
        wanted=wanted,
        request_id=request_id or None,
    )


def _columns(items: Sequence[Struct] | Struct) -> Any:
    """The fields of either shape, each with one entry an item. An optional one may be UNSET, as a whole or in places."""
    if type(items) is list:
        return zip(*map(astuple, items), strict=True)
    columns = astuple(items)  # type: ignore[arg-type]
    if len({len(column) for column in columns if column is not UNSET}) > 1:
        raise ValueError
    return columns


def _posts(post_ids: Column, author_ids: Column, surfaces: Column, vocabulary: Vocabulary) -> Posts:
    found = Posts(read_ids(post_ids), read_ids(author_ids), _numbers("q", surfaces, len(post_ids)))
    if found.surfaces.max(initial=0) >= vocabulary.product_surfaces:
        raise ValueError
    return found


def _numbers(code: str, values: Column, count: int) -> NDArray[Any]:
    """`[n]` of a numpy type code, 0 where nothing was sent."""
    return np.zeros(count, code) if values is UNSET else np.array([value or 0 for value in values], code)


def _distinct(names: Iterable[str], index: Mapping[str, int]) -> list[int]:
    """The columns of names of different actions."""
    columns = [index[name] for name in names]
    if len(set(columns)) < len(columns):
        raise ValueError
    return columns


def _cells(column: Column, index: Mapping[str, int]) -> ActionCells:
    if column is UNSET:
        return NO_ACTIONS
    items: list[Any] = [item or () for item in column]
    lengths = np.fromiter(map(len, items), np.int64, len(items))
    rows = np.repeat(np.arange(len(items)), lengths)
    columns = np.array([index[name] for item in items for name in item], np.int64)
    values = np.ones(len(columns))
    is_map = [type(item) is dict for item in items]
    if any(is_map):
        pairs = (item.values() if type(item) is dict else repeat(1.0, len(item)) for item in items)
        values = np.fromiter(chain.from_iterable(pairs), np.float64, len(columns))
        in_map = np.repeat(np.array(is_map), lengths)
        named = np.zeros((len(items), len(index)), bool)
        named[rows[in_map], columns[in_map]] = True
        if np.count_nonzero(named) < np.count_nonzero(in_map):  # one action by name and by index
            raise ValueError
    return ActionCells(rows, columns, values)
