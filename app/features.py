"""A decoded request → what the model and the reply need, as numpy columns, checked against one checkpoint.

Each column is made and checked by one call, in either form of the posts. Only if a column is bad, its first bad value is searched for.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import orjson
import structlog
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from app.errors import InvalidRequest
from app.schema import ContextRequest, Items, RankRequest, RecommendRequest, UserRequest, count_of
from model.config import MAX_DWELL_SECONDS, ModelConfig
from model.inputs import Candidates, Context, age_bucket
from weights.actions import SCORE_WEIGHT_SETS, continuous_weights, default_score_weights
from weights.format.manifest import Manifest
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
    time_problem,
)

log = structlog.get_logger("app.features")

NO_ACTION = "must name an action of this checkpoint, or be the decimal string of its index"
NAMED_TWICE = "names an action twice, by name or by index"
NO_MASK = "must be a mask without bits beyond those of the {} actions"
NO_SURFACE = "must be a surface of this checkpoint, an integer between 0 and {}"
NO_WEIGHTS = "All weights in force are 0, so all scores are equal and the ranks mean nothing."
NO_WEIGHTS_KEPT = f"{NO_WEIGHTS} The checkpoint has none: send weights, or give it some with `phoenix-ranker relabel --score-weights`."
MOST_VOCABULARIES = 4
"""Vocabularies that are kept: of a ranker and towers, and of those that they replaced."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What one checkpoint knows.

    `index`: action names, and decimal strings, to columns. `ids`: what callers name users, posts and authors by. `weights`: of the
    checkpoint, float64 `[A]`. `sets`: published weights by name, float64 `[A]`, or `[A + Z]` where they weigh continuous outputs too.
    `code_levels`, `code_values`: of the content codes, 0 for none.
    `model`: name and version as replies tell them, and its `digest`. `scales`: of the continuous outputs to their units, float32 `[Z]`.
    """

    action_names: tuple[str, ...]
    index: Mapping[str, int]
    product_surfaces: int
    code_levels: int
    code_values: int
    ids: IdKind
    weights: NDArray[np.float64]
    sets: Mapping[str, NDArray[np.float64]]
    model: Mapping[str, str]
    digest: str
    continuous_names: tuple[str, ...]
    scales: NDArray[np.float32]

    @classmethod
    def of(cls, manifest: Manifest) -> Vocabulary:
        """Return the vocabulary of the checkpoint with this manifest."""
        names, outputs = manifest.action_names, tuple(output.name for output in manifest.continuous)
        columns = {name: column for column, name in enumerate(names)}
        weights = np.array([manifest.score_weights.get(name, 0.0) for name in names])
        sets = {name: _published(name, manifest) for name in SCORE_WEIGHT_SETS}
        return cls(
            action_names=names,
            index={str(column): column for column in columns.values()} | columns,
            product_surfaces=manifest.config.product_surfaces,
            code_levels=manifest.config.code_levels,
            code_values=manifest.config.code_values,
            ids=manifest.ids,
            weights=weights,
            sets=sets,
            model={"name": manifest.name, "version": manifest.version},
            digest=manifest.digest,
            continuous_names=outputs,
            scales=np.array([output.scale for output in manifest.continuous], np.float32),
        )


def _published(name: str, manifest: Manifest) -> NDArray[np.float64]:
    """The weights of this set for a checkpoint's actions and continuous outputs; its weights for others are left out."""
    weights = default_score_weights(manifest.action_names, name)
    actions = [weights.get(action, 0.0) for action in manifest.action_names]
    outputs = continuous_weights(name, manifest.continuous)
    return np.array([*actions, *outputs] if any(outputs) else actions)


class Vocabularies:
    """The vocabularies of the manifests used last, by identity."""

    def __init__(self) -> None:
        self._last: list[tuple[Manifest, Vocabulary]] = []
        self._warned: list[Vocabulary] = []

    def of(self, manifest: Manifest) -> Vocabulary:
        """Return the vocabulary of this checkpoint, made once."""
        for known, vocabulary in self._last:
            if known is manifest:
                return vocabulary
        vocabulary = Vocabulary.of(manifest)
        self._last = [(manifest, vocabulary), *self._last[: MOST_VOCABULARIES - 1]]
        return vocabulary

    def log_once(self, vocabulary: Vocabulary, warnings: Sequence[str]) -> None:
        """Log once for each checkpoint that it has no weights, where a reply says so."""
        if NO_WEIGHTS_KEPT in warnings and not any(vocabulary is known for known in self._warned):
            self._warned = [vocabulary, *self._warned[: MOST_VOCABULARIES - 1]]
            log.warning("scores_mean_nothing", detail=NO_WEIGHTS_KEPT, **vocabulary.model)


@dataclass(slots=True)
class Wishes:
    """What a request asks of the reply.

    `weights`: float64 `[A]`, or `[A + Z]`. `wanted`: columns of the actions in the reply, None for all. `has_offset`: whether scores are
    lifted above 0 as `model.ranking.offset` says. `warnings`: sentences for the reply. `temperature`: of the draw of the ranks, None to
    rank by score. `name`: what the ranking is called, as the reply tells it; the draw depends on it.
    """

    weights: NDArray[np.float64]
    top_k: int | None = None
    wanted: list[int] | None = None
    has_offset: bool = False
    request_id: str | None = None
    reply: Literal["objects", "columns"] = "objects"
    warnings: Sequence[str] = ()
    temperature: float | None = None
    name: str = ""


def context_of(asked: UserRequest | ContextRequest, vocabulary: Vocabulary, config: ModelConfig) -> Context:
    """Return the user and the newest `history_length` history items; no user where the request names a context. Raises InvalidRequest.

    Values that the checkpoint has no input for are checked and do no harm.
    """
    user_id = 0 if asked.user_id is UNSET else _user_id(asked.user_id, vocabulary.ids)
    if asked.history is UNSET or not count_of(asked.history):
        return _without_history(user_id, vocabulary)
    posts = _Posts("history", asked.history)
    post_ids, author_ids = posts.ids("post_id", vocabulary.ids), posts.ids("author_id", vocabulary.ids)
    surfaces, actions, dwell = posts.surfaces(vocabulary), posts.actions(vocabulary), posts.dwell_seconds()
    codes = posts.codes(vocabulary)
    first = max(0, len(post_ids) - config.history_length)

    def newest(column: NDArray[Any]) -> NDArray[Any]:
        return column[first:].copy() if first else column  # a view would keep the whole history while the request waits

    # The model clips there anyway; clipping here makes equal tokens equal keys of the cache, and 1e300 fit a float32.
    dwell = np.minimum(newest(dwell), MAX_DWELL_SECONDS).astype(np.float32)
    columns = newest(post_ids), newest(author_ids), newest(actions), newest(surfaces)
    return Context(user_id, *columns, dwell, dropped=first, codes=newest(codes))


def _without_history(user_id: int, vocabulary: Vocabulary) -> Context:
    none, actions = np.zeros(0, np.uint64), np.zeros((0, len(vocabulary.action_names)), np.float32)
    return Context(user_id, none, none, actions, np.zeros(0, np.int64), np.zeros(0, np.float32))


def candidates_of(asked: RankRequest, vocabulary: Vocabulary, config: ModelConfig) -> Candidates:
    """Return all candidates in the request's order, with their age buckets at `impression_ts`. Raises InvalidRequest."""
    posts = _Posts("candidates", asked.candidates)
    return Candidates(
        post_ids=posts.ids("post_id", vocabulary.ids),
        author_ids=posts.ids("author_id", vocabulary.ids),
        surfaces=posts.surfaces(vocabulary),
        age_buckets=age_bucket(asked.impression_ts, posts.times("created_at"), config),
        codes=posts.codes(vocabulary),
    )


def created_at_of(asked: RankRequest) -> NDArray[np.int64]:
    """Return when each candidate was created, in Unix seconds, int64 `[C]`; 0 where that is unknown. Raises InvalidRequest."""
    return _Posts("candidates", asked.candidates).times("created_at")


def sent_ids(asked: RankRequest) -> list[int | str]:
    """Return the candidates' post ids as they came."""
    return _Posts("candidates", asked.candidates).column("post_id")


def sent_history_ids(asked: UserRequest) -> list[int | str]:
    """Return the history's post ids as they came, none where the request names a context."""
    return [] if asked.history is UNSET else _Posts("history", asked.history).column("post_id")


def wishes_of(asked: RankRequest | RecommendRequest, vocabulary: Vocabulary) -> Wishes:
    """Return what the request asks of the reply. Raises InvalidRequest."""
    given = asked.weights
    if isinstance(given, dict):
        weights = _weights(given, vocabulary)
    elif given is UNSET:
        weights = vocabulary.weights
    else:
        weights = vocabulary.sets[given]
    wanted = asked.actions_wanted
    return Wishes(
        weights=weights,
        top_k=None if asked.top_k is UNSET else asked.top_k,
        wanted=None if wanted is UNSET else columns_of(wanted, vocabulary.index, "actions_wanted"),
        has_offset=asked.score == "offset",
        request_id=None if asked.request_id is UNSET else asked.request_id,
        reply=asked.reply if isinstance(asked, RankRequest) else "objects",
        warnings=warnings_of(weights, vocabulary),
        temperature=None if asked.explore is UNSET else asked.explore.temperature,
    )


def warnings_of(weights: NDArray[np.floating], vocabulary: Vocabulary) -> list[str]:
    """Return what a reply should warn of: weights `[A]` or `[A + Z]` that are all 0."""
    if weights.any():
        return []
    return [NO_WEIGHTS_KEPT if weights is vocabulary.weights else NO_WEIGHTS]


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
    found = np.zeros((len(masks), width), np.float32)
    found[:, : bits.shape[1]] = bits
    return found


def _weights(given: Mapping[str, float], vocabulary: Vocabulary) -> NDArray[np.float64]:
    """The weights that a request brings, 0 where it names none. Raises InvalidRequest."""
    index = vocabulary.index
    if not given.keys() <= index.keys():
        raise InvalidRequest("weights", f"every name {NO_ACTION}")
    columns = [*map(index.__getitem__, given)]
    if len({*columns}) < len(columns):
        raise InvalidRequest("weights", NAMED_TWICE)
    for name, weight in given.items():
        if (problem := score_weight_problem(weight)) is not None:
            raise InvalidRequest(f"weights.{name}", problem)
    weights = np.zeros(len(vocabulary.action_names))
    weights[columns] = [*given.values()]
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
    try:
        return np.asarray(array("Q", sent))
    except TypeError:  # some are strings
        written = orjson.dumps(sent)[1:-1].translate(None, b'"')
    if written.translate(None, b"0123456789,"):
        raise ValueError
    numbers = orjson.loads(b"[%b]" % written)  # refuses empty strings and leading zeros
    if len(numbers) != len(sent):  # a comma in a string
        raise ValueError
    return np.asarray(array("Q", numbers))  # 2^64 and more came as a float, which is a TypeError


@dataclass(slots=True)
class _Posts:
    """The columns of `history` or `candidates`, which is `name`, in either form. Each raises InvalidRequest for its first bad value."""

    name: str
    items: Items

    def column(self, field: str) -> list[Any]:
        """One value a post as it was sent; empty where an optional array was left out."""
        if isinstance(self.items, list):
            return [*map(attrgetter(field), self.items)]
        found: list[Any] | UnsetType = getattr(self.items, field)
        return [] if found is UNSET else found

    def path(self, field: str, row: int) -> str:
        """Where the value of one post is."""
        return f"{self.name}[{row}].{field}" if isinstance(self.items, list) else f"{self.name}.{field}[{row}]"

    def ids(self, field: str, kind: IdKind) -> NDArray[np.uint64]:
        """Ids, uint64 `[n]`."""
        return _ids(self.column(field), kind, lambda row: self.path(field, row))

    def times(self, field: str) -> NDArray[np.int64]:
        """Unix seconds, int64 `[n]`."""
        return self._integers(field, MAX_TIME, time_problem)

    def surfaces(self, vocabulary: Vocabulary) -> NDArray[np.int64]:
        """Rows of the surfaces' table, int64 `[n]`."""
        last = vocabulary.product_surfaces - 1

        def problem_of(value: int) -> str | None:
            return None if 0 <= value <= last else NO_SURFACE.format(last)

        return self._integers("product_surface", last, problem_of)

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
        sent, (levels, values) = self.column("codes"), (vocabulary.code_levels, vocabulary.code_values)
        if not any(sent):  # a post that was sent without codes has UNSET, which is false
            return np.zeros((count_of(self.items), levels), np.int64)
        none = [0] * levels
        rows = [codes or none for codes in sent]
        flat = [*chain.from_iterable(rows)]
        if not levels or {*map(len, rows)} != {levels} or min(flat) < 0 or max(flat) > values:
            found = [(row, codes_problem(codes or (), levels, values)) for row, codes in enumerate(sent)]
            for row, problem in found:
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
            found = np.zeros((count_of(self.items), width), np.float32)
        else:
            masks = sent if kinds == {int} else [item if type(item) is int else 0 for item in sent]
            most = min(2**width - 1, MAX_ID)
            if min(masks) < 0 or max(masks) > most:
                row = next(row for row, mask in enumerate(masks) if not 0 <= mask <= most)
                raise InvalidRequest(self.path("actions", row), NO_MASK.format(width))
            found = bits_of(np.asarray(array("Q", masks)).reshape(-1, 1), width)
        if kinds - {int}:
            items = [() if type(item) is int else item for item in sent] if int in kinds else sent
            self._take_named(items, found, vocabulary.index, has_maps=dict in kinds)
        return found

    def _take_named(
        self, items: Sequence[Any], found: NDArray[np.float32], index: Mapping[str, int], *, has_maps: bool
    ) -> None:
        """Write the actions of lists and maps into `found`, `[n, A]`."""
        width = found.shape[1]
        try:
            places = [row * width + index[name] for row, item in enumerate(items) for name in item]
        except KeyError:
            raise self._unknown_action(items, index) from None
        if len({*places}) < len(places):
            row = next(row for row, item in enumerate(items) if len({index[name] for name in item}) < len(item))
            raise InvalidRequest(self.path("actions", row), NAMED_TWICE)
        values: NDArray[np.float64] | float = 1.0
        if has_maps:
            each = (item.values() if isinstance(item, dict) else repeat(1.0, len(item)) for item in items)
            values = np.fromiter(chain.from_iterable(each), np.float64, len(places))
            if (problem := problem_of_actions(values)) is not None:
                place, text = problem
                name = [*chain.from_iterable(items)][place]
                raise InvalidRequest(f"{self.path('actions', places[place] // width)}.{name}", text)
        found.put(places, values)

    def _unknown_action(self, items: Sequence[Any], index: Mapping[str, int]) -> InvalidRequest:
        row = next(row for row, item in enumerate(items) if not index.keys() >= {*item})
        item, path = items[row], self.path("actions", row)
        if isinstance(item, dict):
            return InvalidRequest(path, f"every name {NO_ACTION}")
        return InvalidRequest(
            f"{path}[{next(place for place, name in enumerate(item) if name not in index)}]", NO_ACTION
        )
