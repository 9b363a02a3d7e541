"""A decoded request → what the model and the reply need, as numpy columns, checked against one checkpoint.

Each column is made and checked by one call, in either form of the posts. Only if a column is bad, its first bad value is searched for.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, Literal

import numpy as np
import orjson
from msgspec import UNSET, UnsetType
from msgspec.structs import asdict, astuple
from numpy.typing import NDArray

from app.errors import InvalidRequest
from app.schema import ContextRequest, Items, RankRequest, RecommendRequest, UserRequest, count_of
from app.vocabulary import Vocabulary
from model.config import MAX_DWELL_SECONDS, ModelConfig
from model.inputs import Candidates, Context, age_bucket
from weights.text_ids import MAX_TEXT_BYTES, IdKind, is_text_id, text_ids
from weights.values import (
    ID_RULES,
    MAX_ID,
    MAX_TIME,
    codes_problem,
    dwell_problem,
    id_problem,
    problem_of_actions,
    score_weight_problem,
    surface_problem,
    time_problem,
)

NO_ACTION = "must name an action of this checkpoint, or be the decimal string of its index"
NAMED_TWICE = "names an action twice, by name or by index"
NO_MASK = "must be a mask without bits beyond those of the {} actions"


@dataclass(slots=True)
class ReplyOptions:
    """How a request wants its reply.

    `weights`: float64 `[A]`, or `[A + Z]`. `actions`: columns of the actions in the reply, None for all. `has_offset`: whether scores are
    lifted above 0 as `model.ranking.offset` says. `temperature`: of the draw of the ranks, None to rank by score. `name`: what the ranking
    is called; the draw depends on it.
    """

    weights: NDArray[np.float64]
    top_k: int | None = None
    actions: list[int] | None = None
    has_offset: bool = False
    request_id: str | None = None
    reply: Literal["objects", "columns"] = "objects"
    temperature: float | None = None
    name: str = ""


@dataclass(slots=True)
class CheckedRequest:
    """A request that was checked against one checkpoint, whose `vocabulary` this is: what the model reads, and what the reply needs.

    `context`: or its handle. `post_ids` `[C]`: the candidates' ids as they came. `created_at`: Unix seconds, int64 `[C]`, 0 unknown;
    `impression_ts`: Unix seconds, 0 unknown.
    """

    vocabulary: Vocabulary
    context: Context | str
    candidates: Candidates
    post_ids: Sequence[int | str] | NDArray[np.uint64]
    created_at: NDArray[np.int64]
    impression_ts: int
    options: ReplyOptions

    def warnings(self) -> list[str]:
        """Return what the reply warns of. The log may be told as well: see `Vocabulary.warning_of_zeros`."""
        weights = self.options.weights
        return [] if weights.any() else [self.vocabulary.warning_of_zeros(weights)]


def check(request: RankRequest, vocabulary: Vocabulary, config: ModelConfig, name: str = "") -> CheckedRequest:
    """Check a decoded request against the checkpoint with this vocabulary and configuration. Raises InvalidRequest.

    `name`: what the ranking is called where the request has no `request_id`. Values that the checkpoint has no input for are checked and
    do no harm.
    """
    context = context_of(request, vocabulary, config) if request.context is UNSET else request.context
    posts = _Posts.of("candidates", request.candidates)
    created_at = posts.times("created_at")
    post_ids, author_ids = posts.ids(vocabulary.ids)
    surfaces, codes, sent_ids = posts.surfaces(vocabulary), posts.codes(vocabulary), [*posts.column("post_id")]
    options = options_of(request, vocabulary, name)
    ages = age_bucket(request.impression_ts, created_at, config)
    candidates = Candidates(post_ids, author_ids, surfaces, ages, codes=codes)
    return CheckedRequest(vocabulary, context, candidates, sent_ids, created_at, request.impression_ts, options)


def context_of(request: UserRequest | ContextRequest, vocabulary: Vocabulary, config: ModelConfig) -> Context:
    """Return the user and the newest `history_length` history items; no user where the request names a context. Raises InvalidRequest."""
    user_id = 0 if request.user_id is UNSET else _user_id(request.user_id, vocabulary.ids)
    if request.history is UNSET or not count_of(request.history):
        return _without_history(user_id, vocabulary)
    posts = _Posts.of("history", request.history)
    post_ids, author_ids = posts.ids(vocabulary.ids)
    surfaces, actions, dwell = posts.surfaces(vocabulary), posts.actions(vocabulary), posts.dwell_seconds()
    codes = posts.codes(vocabulary)
    first = max(0, len(post_ids) - config.history_length)
    columns: list[NDArray[Any]] = [post_ids, author_ids, actions, surfaces, dwell, codes]
    if first:  # a view would keep the whole history while the request waits
        columns = [column[first:].copy() for column in columns]
    post_ids, author_ids, actions, surfaces, dwell, codes = columns
    # The model clips there anyway; clipping here makes equal tokens equal keys of the cache, and 1e300 fit a float32.
    dwell_seconds = np.minimum(dwell, MAX_DWELL_SECONDS).astype(np.float32)
    return Context(user_id, post_ids, author_ids, actions, surfaces, dwell_seconds, dropped=first, codes=codes)


def _without_history(user_id: int, vocabulary: Vocabulary) -> Context:
    none, actions = np.zeros(0, np.uint64), np.zeros((0, len(vocabulary.action_names)), np.float32)
    return Context(user_id, none, none, actions, np.zeros(0, np.int64), np.zeros(0, np.float32))


def sent_history_ids(request: UserRequest) -> Sequence[int | str]:
    """Return the history's post ids as they came, none where the request names a context."""
    return [] if request.history is UNSET else _Posts.of("history", request.history).column("post_id")


def options_of(request: RankRequest | RecommendRequest, vocabulary: Vocabulary, name: str = "") -> ReplyOptions:
    """Return how the request wants its reply; `name` as in `check`. Raises InvalidRequest."""
    actions = request.actions_wanted
    request_id = None if request.request_id is UNSET else request.request_id
    return ReplyOptions(
        weights=_weights(request.weights, vocabulary),
        top_k=None if request.top_k is UNSET else request.top_k,
        actions=None if actions is UNSET else columns_of(actions, vocabulary.index, "actions_wanted"),
        has_offset=request.score == "offset",
        request_id=request_id,
        reply=request.reply if isinstance(request, RankRequest) else "objects",
        temperature=None if request.explore is UNSET else request.explore.temperature,
        name=request_id or name,
    )


def columns_of(names: Sequence[str], index: Mapping[str, int], path: str) -> list[int]:
    """Return the columns of these actions. Raises InvalidRequest for an unknown action, or one that is named twice."""
    try:
        columns = [*map(index.__getitem__, names)]
    except KeyError:
        place = next(place for place, name in enumerate(names) if name not in index)
        raise InvalidRequest(f"{path}[{place}]", NO_ACTION) from None
    if len({*columns}) < len(columns):
        raise InvalidRequest(path, NAMED_TWICE)
    return columns


def ids_of(sent: Sequence[int | str], kind: IdKind, name: str) -> NDArray[np.uint64]:
    """Return a list of ids as the model reads them, uint64 `[n]`. Raises InvalidRequest; `name` is the list's field."""
    return _ids(sent, kind, lambda row: f"{name}[{row}]")


def bits_of(masks: NDArray[np.uint64], width: int) -> NDArray[np.float32]:
    """Return the bits of words `[h, W]` as 1 or 0, float32 `[h, width]`; bits beyond `width` are ignored."""
    words = masks.astype("<u8").view(np.uint8)
    bits = np.unpackbits(words, axis=1, count=min(width, 64 * masks.shape[1]), bitorder="little")
    actions = np.zeros((len(masks), width), np.float32)
    actions[:, : bits.shape[1]] = bits
    return actions


def _weights(sent: Mapping[str, float] | str | UnsetType, vocabulary: Vocabulary) -> NDArray[np.float64]:
    """The weights of a request, 0 for actions that it does not name; a published set by its name; the checkpoint's own where the request
    has none. Raises InvalidRequest."""
    if not isinstance(sent, Mapping):
        return vocabulary.weights if sent is UNSET else vocabulary.sets[sent]
    index = vocabulary.index
    if not sent.keys() <= index.keys():
        raise InvalidRequest("weights", f"every name {NO_ACTION}")
    columns = [*map(index.__getitem__, sent)]
    if len({*columns}) < len(columns):
        raise InvalidRequest("weights", NAMED_TWICE)
    for name, weight in sent.items():
        if (problem := score_weight_problem(weight)) is not None:
            raise InvalidRequest(f"weights.{name}", problem)
    weights = np.zeros(len(vocabulary.action_names))
    weights[columns] = [*sent.values()]
    return weights


def _user_id(sent: int | str, kind: IdKind) -> int:
    if (problem := id_problem(sent, kind)) is not None:
        raise InvalidRequest("user_id", problem)
    return int(sent) if kind == "uint64" else int(text_ids([str(sent)])[0])


def _ids(sent: Sequence[int | str], kind: IdKind, path: Callable[[int], str]) -> NDArray[np.uint64]:
    """Ids as the model reads them, uint64 `[n]`. Raises InvalidRequest with the path of the first that is none."""
    try:
        return _text_ids(sent) if kind == "text" else _integer_ids(sent)
    except (ValueError, OverflowError, TypeError):
        row = next(row for row, value in enumerate(sent) if id_problem(value, kind))
        raise InvalidRequest(path(row), ID_RULES[kind]) from None


def _text_ids(sent: Sequence[Any]) -> NDArray[np.uint64]:
    """Raises ValueError or TypeError where one is no text id."""
    lengths = [*map(len, sent)]
    is_plain = "".join(sent).isascii() and min(lengths, default=1) > 0 and max(lengths, default=1) <= MAX_TEXT_BYTES
    if not is_plain and not all(map(is_text_id, sent)):
        raise ValueError
    return text_ids(sent)


def _integer_ids(sent: Sequence[Any]) -> NDArray[np.uint64]:
    """Raises ValueError, OverflowError or TypeError where one is neither an integer of 64 bits without sign nor its decimal string."""
    if not sent or type(sent[0]) is int:
        with suppress(TypeError):  # some are strings
            return np.asarray(array("Q", sent))
    written = orjson.dumps(sent).translate(None, b'"')
    if written.translate(None, b"0123456789,") != b"[]":
        raise ValueError
    numbers = orjson.loads(written)  # refuses empty strings and leading zeros
    if len(numbers) != len(sent):  # a comma in a string
        raise ValueError
    return np.asarray(array("Q", numbers))  # 2^64 and more came as a float, which is a TypeError


@dataclass(slots=True)
class _Posts:
    """The columns of `history` or `candidates`, which is `name`, in either form. Each raises InvalidRequest for its first bad value."""

    name: str
    items: Items
    columns: Mapping[str, Sequence[Any]]

    @classmethod
    def of(cls, name: str, items: Items) -> _Posts:
        """The columns of these posts."""
        if not isinstance(items, list):
            return cls(name, items, {field: column for field, column in asdict(items).items() if column is not UNSET})
        fields = items[0].__struct_fields__ if items else ()
        return cls(name, items, dict(zip(fields, zip(*map(astuple, items), strict=True), strict=True)))

    def column(self, field: str) -> Sequence[Any]:
        """One value a post as it was sent; empty where an optional array was left out."""
        return self.columns.get(field, ())

    def path(self, field: str, row: int) -> str:
        """Where the value of one post is."""
        return f"{self.name}[{row}].{field}" if isinstance(self.items, list) else f"{self.name}.{field}[{row}]"

    def ids(self, kind: IdKind) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Ids of the posts and of their authors, each uint64 `[n]`, read in one go: it takes half the time."""
        posts, authors = self.column("post_id"), self.column("author_id")

        def path(row: int) -> str:
            return self.path("post_id", row) if row < len(posts) else self.path("author_id", row - len(posts))

        both = _ids([*posts, *authors], kind, path)
        return both[: len(posts)], both[len(posts) :]

    def times(self, field: str) -> NDArray[np.int64]:
        """Unix seconds, int64 `[n]`."""
        return self._integers(field, MAX_TIME, time_problem)

    def surfaces(self, vocabulary: Vocabulary) -> NDArray[np.int64]:
        """Rows of the surfaces' table, int64 `[n]`."""
        surfaces = vocabulary.product_surfaces
        return self._integers("product_surface", surfaces - 1, lambda value: surface_problem(value, surfaces))

    def dwell_seconds(self) -> NDArray[np.float64]:
        """Seconds, float64 `[n]`."""
        sent = self.column("dwell_time")
        if not sent:
            return np.zeros(count_of(self.items))
        if not (min(sent) >= 0 and max(sent) < math.inf):  # no JSON number is NaN
            raise self._first_problem("dwell_time", sent, dwell_problem)
        return np.array(sent, np.float64)

    def codes(self, vocabulary: Vocabulary) -> NDArray[np.int64]:
        """Content codes, int64 `[n, Q]`; zeros for a post that was sent without any."""
        sent, levels, values = self.column("codes"), vocabulary.code_levels, vocabulary.code_values
        if not any(sent):  # a post that was sent without codes has UNSET, which is false
            return np.zeros((count_of(self.items), levels), np.int64)
        none = [0] * levels
        rows = [codes or none for codes in sent]
        flat = [*chain.from_iterable(rows)]
        if not levels or {*map(len, rows)} != {levels} or min(flat) < 0 or max(flat) > values:
            problems = [(row, codes_problem(codes or (), levels, values)) for row, codes in enumerate(sent)]
            for row, problem in problems:
                if problem is not None:
                    raise InvalidRequest(self.path("codes", row), problem)
            return np.zeros((len(sent), levels), np.int64)  # of a checkpoint that reads none
        return np.asarray(array("q", flat)).reshape(-1, levels)

    def _integers(self, field: str, most: int, problem_of: Callable[[int], str | None]) -> NDArray[np.int64]:
        """Integers from 0 to `most`, int64 `[n]`; zeros where an optional array was left out."""
        sent = self.column(field)
        if not sent:
            return np.zeros(count_of(self.items), np.int64)
        if min(sent) < 0 or max(sent) > most:
            raise self._first_problem(field, sent, problem_of)
        return np.asarray(array("q", sent))

    def _first_problem(
        self, field: str, sent: Sequence[Any], problem_of: Callable[[Any], str | None]
    ) -> InvalidRequest:
        row, problem = next((row, problem) for row, problem in enumerate(map(problem_of, sent)) if problem)
        return InvalidRequest(self.path(field, row), problem)

    def actions(self, vocabulary: Vocabulary) -> NDArray[np.float32]:
        """The value of each action, 0 where it was not taken, float32 `[n, A]`. Items may be masks, lists of names, or maps to values."""
        sent, width = self.column("actions"), len(vocabulary.action_names)
        kinds = {*map(type, sent)}
        if int not in kinds:
            values = np.zeros((count_of(self.items), width), np.float32)
        else:
            masks = sent if kinds == {int} else [item if type(item) is int else 0 for item in sent]
            most = min(2**width - 1, MAX_ID)
            if min(masks) < 0 or max(masks) > most:
                row = next(row for row, mask in enumerate(masks) if not 0 <= mask <= most)
                raise InvalidRequest(self.path("actions", row), NO_MASK.format(width))
            values = bits_of(np.asarray(array("Q", masks)).reshape(-1, 1), width)
        if kinds - {int}:
            items = [() if type(item) is int else item for item in sent] if int in kinds else sent
            self._take_named(items, values, vocabulary.index, has_maps=dict in kinds)
        return values

    def _take_named(
        self, items: Sequence[Any], out: NDArray[np.float32], index: Mapping[str, int], *, has_maps: bool
    ) -> None:
        """Write the actions of lists and maps into `out`, `[n, A]`."""
        width = out.shape[1]
        try:
            places = [row * width + index[name] for row, item in enumerate(items) for name in item]
        except KeyError:
            raise self._unknown_action(items, index) from None
        if len({*places}) < len(places):
            row = next(row for row, item in enumerate(items) if len({index[name] for name in item}) < len(item))
            raise InvalidRequest(self.path("actions", row), NAMED_TWICE)
        values: NDArray[np.float64] | float = 1.0
        if has_maps:
            values_by_item = (item.values() if isinstance(item, dict) else repeat(1.0, len(item)) for item in items)
            values = np.fromiter(chain.from_iterable(values_by_item), np.float64, len(places))
            if (problem := problem_of_actions(values)) is not None:
                place, text = problem
                name = [*chain.from_iterable(items)][place]
                raise InvalidRequest(f"{self.path('actions', places[place] // width)}.{name}", text)
        out.put(places, values)

    def _unknown_action(self, items: Sequence[Any], index: Mapping[str, int]) -> InvalidRequest:
        row = next(row for row, item in enumerate(items) if not index.keys() >= {*item})
        item, path = items[row], self.path("actions", row)
        if isinstance(item, dict):
            return InvalidRequest(path, f"every name {NO_ACTION}")
        return InvalidRequest(
            f"{path}[{next(place for place, name in enumerate(item) if name not in index)}]", NO_ACTION
        )
