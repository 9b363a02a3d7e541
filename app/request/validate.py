"""A typed body → a checked `Request` in columns: ids in range, known names, equal lengths. Not for features: it knows no window.

Both shapes of history and candidates become the same columns. Whatever is not right here is told by `explain`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import astuple
from numpy.typing import NDArray

from app.request.body import explanation_rule, request_rule
from app.request.explain import explain
from app.request.ids import MAX_ID, read_ids
from app.request.schema import (
    Candidate,
    CandidateColumns,
    ExplainRequest,
    HistoryColumns,
    Post,
    RankRequest,
    is_request_id,
)
from app.request.vocabulary import Vocabulary

Column = Any  # a sequence with one entry an item, or UNSET


@dataclass(slots=True)
class Posts:
    """Checked columns of history or candidates: ids uint64 `[n]`, surfaces int64 `[n]`."""

    post_ids: NDArray[np.uint64]
    author_ids: NDArray[np.uint64]
    surfaces: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.post_ids)


NO_HISTORY, NO_CANDIDATES = HistoryColumns([], []), CandidateColumns([], [])
NOTHING: NDArray[Any] = np.zeros(0)
NO_POSTS = Posts(NOTHING, NOTHING, NOTHING)
NUMBERS = Candidate.__struct_fields__[len(Post.__struct_fields__) :]


@dataclass(frozen=True, slots=True)
class Viewer:
    """A user with a history, in the words of one checkpoint; fields as in `Request`."""

    user_id: int
    history: Posts
    actions: NDArray[np.float32]
    dwell_seconds: NDArray[np.float64]


@dataclass(slots=True)
class Request:
    """A valid request. `quoted` bool `[C]`: which of the candidates' post ids came as text, None where none did.

    `actions` float32 `[h, A]`, the value of each action, 0 where it was not taken. `dwell_seconds` float64 `[h]`. `numbers` int64 `[C]`:
    the candidates' other integer fields by name, 0 where they were left out. `weights` float64 `[A]`. `wanted` are columns of the
    reply, None for all. `reply` is the form of the reply: JSON, or the outputs that are wanted as tensors, each with whether its data is
    binary.
    """

    user_id: int
    history_length: int
    history: Posts
    actions: NDArray[np.float32]
    dwell_seconds: NDArray[np.float64]
    candidates: Posts
    numbers: Mapping[str, NDArray[np.int64]]
    quoted: NDArray[np.bool_] | None
    impression_ts: int
    weights: NDArray[np.float64]
    top_k: int | None
    wanted: list[int] | None
    request_id: str | None
    reply: Literal["objects", "columns"] | dict[str, bool] = "objects"

    @property
    def echo_ids(self) -> list[int | str]:
        """The candidates' post ids as they came."""
        ids: list[int | str] = self.candidates.post_ids.tolist()
        return (
            ids
            if self.quoted is None
            else [str(id_) if is_text else id_ for id_, is_text in zip(ids, self.quoted, strict=True)]
        )

    def without_history(self) -> Request:
        """All that the reply needs, so that a long history is not kept while the request waits."""
        return replace(self, history=NO_POSTS, actions=NOTHING, dwell_seconds=NOTHING)


def check(body: RankRequest, vocabulary: Vocabulary) -> Request:
    """Check what the types leave open. Raises InvalidRequest with the first ten problems."""
    with suppress(ValueError, OverflowError, KeyError):
        return _checked(body, vocabulary)
    raise explain(msgspec.to_builtins(body), request_rule(vocabulary))


def check_explain(body: ExplainRequest, vocabulary: Vocabulary) -> tuple[Request, NDArray[np.int64]]:
    """As `check`, with the places of the candidates to explain, int64 `[n]`: of each the first with that post id."""
    with suppress(ValueError, OverflowError, KeyError):
        request = _checked(body, vocabulary)
        first = {post: place for place, post in reversed([*enumerate(request.candidates.post_ids.tolist())])}
        return request, np.array([first[post] for post in read_ids(body.explain).tolist()], np.int64)
    raise explain(msgspec.to_builtins(body), explanation_rule(vocabulary))


def _checked(body: RankRequest, vocabulary: Vocabulary) -> Request:
    """Raises ValueError, OverflowError or KeyError where the body is not right."""
    check_wishes(body)
    posts, authors, surfaces, actions, dwell_times = _columns(body.history or NO_HISTORY)
    echo_ids, candidate_authors, candidate_surfaces, *numbers = _columns(body.candidates or NO_CANDIDATES)
    events, count = len(posts), len(echo_ids)
    ids = read_ids([body.user_id, *posts, *authors, *echo_ids, *candidate_authors])
    history = Posts(ids[1 : 1 + events], ids[1 + events : 1 + 2 * events], _surfaces(surfaces, events, vocabulary))
    of_candidates = ids[1 + 2 * events :].copy()  # a view would keep the ids of the history
    candidates = Posts(of_candidates[:count], of_candidates[count:], _surfaces(candidate_surfaces, count, vocabulary))
    if not count:
        raise ValueError
    weights, wanted = wishes_of(body.weights, body.actions_wanted, vocabulary)
    quoted = np.array([type(value) is str for value in echo_ids])
    return Request(
        user_id=int(ids[0]),
        history_length=events,
        history=history,
        actions=_actions(actions, events, vocabulary),
        dwell_seconds=_numbers("d", dwell_times, events),
        candidates=candidates,
        numbers={name: _numbers("q", values, count) for name, values in zip(NUMBERS, numbers, strict=True)},
        quoted=quoted if quoted.any() else None,
        impression_ts=body.impression_ts or 0,
        weights=weights,
        top_k=body.top_k or None,
        wanted=wanted,
        request_id=body.request_id or None,
        reply=body.reply or "objects",
    )


def viewer_of(user_id: int | str, items: Sequence[Struct] | Struct | UnsetType, vocabulary: Vocabulary) -> Viewer:
    """A user and a history by themselves. Raises ValueError, OverflowError or KeyError where they are not right."""
    posts, authors, surfaces, actions, dwell_times = _columns(items or NO_HISTORY)
    events = len(posts)
    ids = read_ids([user_id, *posts, *authors])
    history = Posts(ids[1 : 1 + events], ids[1 + events :], _surfaces(surfaces, events, vocabulary))
    return Viewer(int(ids[0]), history, _actions(actions, events, vocabulary), _numbers("d", dwell_times, events))


def wishes_of(
    weights: Mapping[str, float] | UnsetType, wanted: Sequence[str] | UnsetType, vocabulary: Vocabulary
) -> tuple[NDArray[np.float64], list[int] | None]:
    """Weights of the combined score, float64 `[A]`, and columns of the reply. Raises ValueError or KeyError."""
    numbers = vocabulary.weights
    if weights is not UNSET:
        numbers = np.zeros(len(vocabulary.action_names))
        numbers[_distinct(weights, vocabulary.index)] = list(weights.values())
    return numbers, None if wanted is UNSET else _distinct(wanted, vocabulary.index)


def check_wishes(wishes: Any) -> None:
    """What the types of the others leave open. Raises ValueError."""
    top_k, request_id = wishes.top_k, wishes.request_id
    if not ((top_k is UNSET or top_k <= MAX_ID) and (request_id is UNSET or is_request_id(request_id))):
        raise ValueError


def _columns(items: Sequence[Struct] | Struct) -> Any:
    """The fields of either shape, each with one entry an item. An optional one may be UNSET, as a whole or in places."""
    if type(items) is list:
        return zip(*map(astuple, items), strict=True)
    columns = astuple(items)  # type: ignore[arg-type]
    if len({len(column) for column in columns if column is not UNSET}) > 1:
        raise ValueError
    return columns


def _surfaces(values: Column, count: int, vocabulary: Vocabulary) -> NDArray[np.int64]:
    found = _numbers("q", values, count)
    if count and np.maximum.reduce(found) >= vocabulary.product_surfaces:
        raise ValueError
    return found


def _numbers(code: str, values: Column, count: int) -> NDArray[Any]:
    """`[n]` of a numpy type code, 0 where nothing was sent."""
    if values is UNSET:
        return np.zeros(count, code)
    if UNSET in values:
        values = [value or 0 for value in values]
    return np.asarray(array(code, values))


def _distinct(names: Iterable[str], index: Mapping[str, int]) -> list[int]:
    """The columns of names of different actions."""
    columns = [index[name] for name in names]
    if len(set(columns)) < len(columns):
        raise ValueError
    return columns


def _actions(column: Column, events: int, vocabulary: Vocabulary) -> NDArray[np.float32]:
    width, index = len(vocabulary.action_names), vocabulary.index
    found = np.zeros((events, width), np.float32)
    if column is UNSET:
        return found
    items: list[Any] = [item or () for item in column]
    places = [row * width + index[name] for row, item in enumerate(items) for name in item]
    values: Any = 1.0
    if dict in map(type, items):
        values = [value for item in items for value in (item.values() if type(item) is dict else [1.0] * len(item))]
        for item in items:
            if type(item) is dict and len(set(map(index.__getitem__, item))) < len(item):
                raise ValueError
    found.ravel()[places] = values
    return found
