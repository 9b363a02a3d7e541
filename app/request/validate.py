"""A body → a checked `Request` in columns. Both shapes of history and candidates become the same columns."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.request import rules
from app.request.body import Body, explanation_rule, request_rule
from app.request.ids import echoed, read_ids
from app.request.rules import column_of
from app.request.schema import Candidate, ContextRequest, Post
from app.request.vocabulary import Vocabulary
from weights.text_ids import IdKind


@dataclass(slots=True)
class Posts:
    """Checked columns of history or candidates: ids uint64 `[n]`, surfaces int64 `[n]`. `sent`: the post ids as they came, or as
    `ids.echo_of` writes them; None for integers."""

    post_ids: NDArray[np.uint64]
    author_ids: NDArray[np.uint64]
    surfaces: NDArray[np.int64]
    sent: list[Any] | bytes | None = None

    def __len__(self) -> int:
        return len(self.post_ids)


NOTHING: NDArray[Any] = np.zeros(0)
NO_HISTORY = (Posts(NOTHING, NOTHING, NOTHING), NOTHING, NOTHING)
"""`history`, `actions` and `dwell_seconds` of a request whose history was already read."""
NUMBERS = Candidate.__struct_fields__[len(Post.__struct_fields__) :]


class Viewer(NamedTuple):
    """A user with a history, in one checkpoint's vocabulary; fields as in `Request`."""

    user_id: int
    history: Posts
    actions: NDArray[np.float32]
    dwell_seconds: NDArray[np.float64]


@dataclass(slots=True)
class Request:
    """A valid request.

    `actions` float32 `[h, A]`: the value of each action, 0 if it was not taken. `dwell_seconds` float64 `[h]`. `numbers` int64 `[C]`:
    the candidates' other integer fields by name, 0 where they were left out. `weights` float64 `[A]`, or `[A + Z]` where continuous
    outputs count as well. `has_offset`: whether scores are lifted above 0, as `model.ranking.offset` has it. `wanted` are columns of the
    reply, None for all. `reply` is the form of the reply: JSON, or the outputs that are wanted as tensors, each with whether its data is
    binary. Where `handle` names a context, the user is 0 and the history empty.
    """

    user_id: int
    history: Posts
    actions: NDArray[np.float32]
    dwell_seconds: NDArray[np.float64]
    history_length: int
    candidates: Posts
    weights: NDArray[np.float64]
    top_k: int | None
    wanted: list[int] | None
    request_id: str | None = None
    reply: Literal["objects", "columns"] | dict[str, bool] = "objects"
    handle: str | None = None
    has_offset: bool = False
    numbers: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    impression_ts: int = 0

    @property
    def echo_ids(self) -> list[int | str]:
        """The candidates' post ids as they came."""
        sent, ids = self.candidates.sent, self.candidates.post_ids
        if isinstance(sent, bytes):
            return echoed(sent, len(ids))
        return ids.tolist() if sent is None else sent

    def without_history(self) -> Request:
        """A copy with what the reply needs, so that a waiting request does not keep a long history."""
        history, actions, dwell_seconds = NO_HISTORY
        return replace(self, history=history, actions=actions, dwell_seconds=dwell_seconds)


class Wishes(NamedTuple):
    """What a request asks of the reply, and its context handle; fields as in `Request`, in the same order."""

    weights: NDArray[np.float64]
    top_k: int | None
    wanted: list[int] | None
    request_id: str | None
    reply: Literal["objects", "columns"]
    handle: str | None = None
    has_offset: bool = False


def check(body: Body, vocabulary: Vocabulary) -> Request:
    """Check the body and make the request. Raises InvalidRequest with the first ten problems."""
    rules.check(body.value, request_rule(vocabulary))
    return _request_of(body.value, vocabulary)


def check_context(body: Body, vocabulary: Vocabulary) -> Request:
    """`check` for a context request, which has no candidates."""
    rules.check(body.value, vocabulary.rule("context", lambda: rules.struct_rule(ContextRequest, vocabulary)))
    return _request_of(body.value, vocabulary)


def check_explain(body: Body, vocabulary: Vocabulary) -> tuple[Request, NDArray[np.int64]]:
    """`check`, and the places of the candidates to explain, int64 `[n]`: for each post id the first candidate that has it."""
    rules.check(body.value, explanation_rule(vocabulary))
    request = _request_of(body.value, vocabulary)
    first = {post: place for place, post in reversed([*enumerate(request.candidates.post_ids.tolist())])}
    explained = read_ids(body.value["explain"], vocabulary.ids).tolist()
    return request, np.array([first[post] for post in explained], np.int64)


def _request_of(body: Mapping[str, Any], vocabulary: Vocabulary) -> Request:
    viewer = viewer_of(body, vocabulary)
    weights, top_k, wanted, request_id, reply, handle, has_offset = wishes_of(body, vocabulary)
    candidates = body.get("candidates", [])
    return Request(
        *viewer,
        len(viewer.history),
        _posts(candidates, vocabulary.ids),
        weights,
        top_k,
        wanted,
        request_id,
        reply,
        handle,
        has_offset,
        numbers={name: _numbers("q", candidates, name) for name in NUMBERS},
        impression_ts=body.get("impression_ts", 0),
    )


def viewer_of(body: Mapping[str, Any], vocabulary: Vocabulary) -> Viewer:
    """The user and history of a valid request; user 0 and no history if it names a context."""
    items = body.get("history", [])
    actions, dwell_seconds = _actions(column_of(items, "actions"), vocabulary), _numbers("d", items, "dwell_time")
    user_id = int(read_ids([body["user_id"]], vocabulary.ids)[0]) if "user_id" in body else 0
    return Viewer(user_id, _posts(items, vocabulary.ids), actions, dwell_seconds)


def wishes_of(body: Mapping[str, Any], vocabulary: Vocabulary) -> Wishes:
    """What a valid request asks of the reply."""
    weights, index = vocabulary.weights, vocabulary.index
    if isinstance(given := body.get("weights"), str):
        weights = vocabulary.sets[given]
    elif given is not None:
        weights = np.zeros(len(vocabulary.action_names))
        weights[[index[name] for name in given]] = list(given.values())
    wanted = body.get("actions_wanted")
    columns = None if wanted is None else [index[name] for name in wanted]
    reply, has_offset = body.get("reply", "objects"), body.get("score") == "offset"
    return Wishes(weights, body.get("top_k"), columns, body.get("request_id"), reply, body.get("context"), has_offset)


def _posts(items: Any, kind: IdKind) -> Posts:
    sent, authors = column_of(items, "post_id"), read_ids(column_of(items, "author_id"), kind)
    post_ids, surfaces = read_ids(sent, kind), _numbers("q", items, "product_surface")
    return Posts(post_ids, authors, surfaces, sent if str in map(type, sent) else None)


def _numbers(code: str, items: Any, name: str) -> NDArray[Any]:
    """A field of the posts as an array `[n]` with this type code, 0 where nothing was sent."""
    values = column_of(items, name)
    if None in values:
        values = [value or 0 for value in values]
    return np.asarray(array(code, values))


def _actions(column: list[Any], vocabulary: Vocabulary) -> NDArray[np.float32]:
    width, index = len(vocabulary.action_names), vocabulary.index
    masks = [item if type(item) is int else 0 for item in column]
    found = bits_of(np.array(masks, np.uint64).reshape(-1, 1), width)
    items: list[Any] = [() if not item or type(item) is int else item for item in column]
    places = [row * width + index[name] for row, item in enumerate(items) for name in item]
    values: Any = 1.0
    if dict in map(type, items):
        values = [value for item in items for value in (item.values() if type(item) is dict else [1.0] * len(item))]
    found.ravel()[places] = values
    return found


def bits_of(masks: NDArray[np.uint64], width: int) -> NDArray[np.float32]:
    """The bits of words `[h, W]` as 1 or 0, float32 `[h, width]`; bits beyond `width` are ignored."""
    bits = np.unpackbits(
        masks.astype("<u8").view(np.uint8), axis=1, count=min(width, 64 * masks.shape[1]), bitorder="little"
    )
    found = np.zeros((len(masks), width), np.float32)
    found[:, : bits.shape[1]] = bits
    return found
