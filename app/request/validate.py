"""A typed body → a checked `Request` in columns: ids in range, known names, equal lengths. Not for features: it knows no window.

Both shapes of history and candidates become the same columns. Whatever is not right here is told by `explain`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import msgspec
import numpy as np
import orjson
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import astuple
from numpy.typing import NDArray

from app.request.body import Body, CandidateArrays, HistoryArrays
from app.request.contract import MAX_ID, is_request_id
from app.request.explain import explain, is_id
from app.request.strict_json import parse
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
class Viewer:
    """A user with a history, in the words of one checkpoint. `dwell_seconds` float64 `[h]`, 0 where unknown."""

    user_id: int
    history: Posts
    actions: ActionCells
    dwell_seconds: NDArray[np.float64]


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
    """Check what the types leave open. Raises InvalidRequest with the first ten problems, or MalformedJson for endless integers."""
    with suppress(ValueError, OverflowError, KeyError):
        return _checked(body, vocabulary)
    raise explain(parse(msgspec.json.encode(body)), vocabulary)


def _checked(body: Body, vocabulary: Vocabulary) -> Request:
    """Raises ValueError, OverflowError or KeyError where the body is not right."""
    viewer = viewer_of(body.user_id, body.history, vocabulary)
    echo_ids, authors, surfaces, created_at = columns_of(body.candidates or NO_CANDIDATES)
    candidates = posts_of(echo_ids, authors, surfaces, vocabulary)
    weights, wanted = wishes_of(body.weights, body.actions_wanted, vocabulary)
    top_k, request_id = body.top_k or None, body.request_id
    if not (echo_ids and (top_k is None or top_k <= MAX_ID) and (request_id is UNSET or is_request_id(request_id))):
        raise ValueError
    return Request(
        user_id=viewer.user_id,
        history=viewer.history,
        actions=viewer.actions,
        dwell_seconds=viewer.dwell_seconds,
        candidates=candidates,
        created_at=numbers_of("q", created_at, len(candidates)),
        echo_ids=list(echo_ids),
        impression_ts=body.impression_ts or 0,
        weights=weights,
        top_k=top_k,
        wanted=wanted,
        request_id=request_id or None,
    )


def viewer_of(
    user_id: int | str, history: Sequence[Struct] | HistoryArrays | UnsetType, vocabulary: Vocabulary
) -> Viewer:
    """The user and the history. Raises ValueError, OverflowError or KeyError where they are not right."""
    if not is_id(user_id):
        raise ValueError
    posts, authors, surfaces, actions, dwell_times = columns_of(history or NO_HISTORY)
    seen = posts_of(posts, authors, surfaces, vocabulary)
    return Viewer(int(user_id), seen, cells_of(actions, vocabulary.index), numbers_of("d", dwell_times, len(seen)))


def wishes_of(
    weights: Mapping[str, float] | UnsetType, wanted: Sequence[str] | UnsetType, vocabulary: Vocabulary
) -> tuple[NDArray[np.float64], list[int] | None]:
    """Weights of the combined score, float64 `[A]`, and the columns of the reply. Raises ValueError or KeyError."""
    numbers = vocabulary.weights
    if weights is not UNSET:
        numbers = np.zeros(len(vocabulary.action_names))
        numbers[distinct(weights, vocabulary.index)] = list(weights.values())
    return numbers, None if wanted is UNSET else distinct(wanted, vocabulary.index)


def columns_of(items: Sequence[Struct] | Struct) -> Any:
    """The fields of either shape, each with one entry an item. An optional one may be UNSET, as a whole or in places."""
    if type(items) is list:
        return zip(*map(astuple, items), strict=True)
    columns = astuple(items)  # type: ignore[arg-type]
    if len({len(column) for column in columns if column is not UNSET}) > 1:
        raise ValueError
    return columns


def posts_of(post_ids: Column, author_ids: Column, surfaces: Column, vocabulary: Vocabulary) -> Posts:
    """Checked columns. Raises ValueError or OverflowError."""
    found = Posts(ids_of(post_ids), ids_of(author_ids), numbers_of("q", surfaces, len(post_ids)))
    if found.surfaces.max(initial=0) >= vocabulary.product_surfaces:
        raise ValueError
    return found


def ids_of(values: Column) -> NDArray[np.uint64]:
    """uint64 `[n]` from integers and decimal strings. Strings are read in one go, as one JSON list."""
    with suppress(TypeError):
        return np.asarray(array("Q", values))
    try:
        decimals = ",".join(values).encode()
    except TypeError:  # some of each
        decimals = ",".join(map(str, values)).encode()
    if decimals.translate(None, b"0123456789,"):
        raise ValueError
    numbers = orjson.loads(b"[%b]" % decimals)  # refuses empty strings and leading zeros
    if len(numbers) != len(values) or float in map(type, numbers):  # a comma in a string; 2^64 and more
        raise ValueError
    return np.asarray(array("Q", numbers))


def numbers_of(code: str, values: Column, count: int) -> NDArray[Any]:
    """`[n]` of a numpy type code, 0 where nothing was sent."""
    return np.zeros(count, code) if values is UNSET else np.array([value or 0 for value in values], code)


def distinct(names: Iterable[str], index: Mapping[str, int]) -> list[int]:
    """The columns of names of different actions."""
    columns = [index[name] for name in names]
    if len(set(columns)) < len(columns):
        raise ValueError
    return columns


def cells_of(column: Column, index: Mapping[str, int]) -> ActionCells:
    """The actions of a history. Raises ValueError or KeyError for names that are unknown, or of one action twice."""
    if column is UNSET:
        return NO_ACTIONS
    items: list[Any] = [item or () for item in column]
    rows = [row for row, item in enumerate(items) for _ in item]
    columns = [index[name] for item in items for name in item]
    values = np.ones(len(columns))
    if dict in map(type, items):
        pairs = (item.values() if type(item) is dict else repeat(1.0, len(item)) for item in items)
        values = np.fromiter(chain.from_iterable(pairs), np.float64, len(columns))
        for item in items:
            if type(item) is dict:
                distinct(item, index)
    return ActionCells(np.array(rows, np.int64), np.array(columns, np.int64), values)
