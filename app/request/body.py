"""Bytes → typed bodies: the types, required fields, unknown fields and bounds of a request are checked while its JSON is read.

What is wrong with one that does not fit its type is said by `explain`. `contract` is the plain definition of the same, and
tests hold all three to the same verdict. Ids in range, known names and equal lengths are left to `validate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from app.errors import InvalidRequest, MalformedJson, TooLarge
from app.request.contract import MAX_ACTION_VALUE, MAX_TIME, MAX_WEIGHT
from app.request.explain import MAX_ID_DIGITS, MAX_TOPIC_LETTERS, MAX_TOPICS_WANTED, explain, explain_retrieval
from app.request.strict_json import parse, refuse_duplicates
from app.request.vocabulary import Vocabulary
from app.settings import Limits

Id = int | Annotated[str, Meta(max_length=MAX_ID_DIGITS)]  # what it holds is checked column by column
Surface = Annotated[int, Meta(ge=0)]
Time = Annotated[int, Meta(ge=0, le=MAX_TIME)]
Dwell = Annotated[float, Meta(ge=0)]
Actions = list[str] | dict[str, Annotated[float, Meta(ge=0, le=MAX_ACTION_VALUE)]]
Topic = Annotated[str, Meta(max_length=MAX_TOPIC_LETTERS)]
Weights = dict[str, Annotated[float, Meta(ge=-MAX_WEIGHT, le=MAX_WEIGHT)]]


class Strict(Struct, forbid_unknown_fields=True, gc=False):
    """Unknown fields are errors, and so is `null`. The garbage collector need not look: JSON has no cycles."""


class HistoryItem(Strict):
    """Fields as in `HistoryArrays`, in the same order."""

    post_id: Id
    author_id: Id
    product_surface: Surface | UnsetType = UNSET
    actions: Actions | UnsetType = UNSET
    dwell_time: Dwell | UnsetType = UNSET


class HistoryArrays(Strict):
    """One entry an item."""

    post_id: list[Id]
    author_id: list[Id]
    product_surface: list[Surface] | UnsetType = UNSET
    actions: list[Actions] | UnsetType = UNSET
    dwell_time: list[Dwell] | UnsetType = UNSET


class Candidate(Strict):
    """Fields as in `CandidateArrays`, in the same order."""

    post_id: Id
    author_id: Id
    product_surface: Surface | UnsetType = UNSET
    created_at: Time | UnsetType = UNSET


class CandidateArrays(Strict):
    """One entry an item."""

    post_id: list[Id]
    author_id: list[Id]
    product_surface: list[Surface] | UnsetType = UNSET
    created_at: list[Time] | UnsetType = UNSET


class Body(Strict):
    """A request whose types are right. Ids, names and lengths are still to be checked."""

    user_id: Id
    candidates: list[Candidate] | CandidateArrays
    history: list[HistoryItem] | HistoryArrays | UnsetType = UNSET
    impression_ts: Time | UnsetType = UNSET
    weights: Weights | UnsetType = UNSET
    top_k: Annotated[int, Meta(ge=1)] | UnsetType = UNSET
    actions_wanted: list[str] | UnsetType = UNSET
    request_id: Annotated[str, Meta(max_length=128)] | UnsetType = UNSET


class RetrieveBody(Strict):
    """A request for posts whose types are right."""

    user_id: Id
    history: list[HistoryItem] | HistoryArrays | UnsetType = UNSET
    k: Annotated[int, Meta(ge=1)] | UnsetType = UNSET
    exclude: list[Id] | UnsetType = UNSET
    exclude_history: bool | UnsetType = UNSET
    topics: Annotated[list[Topic], Meta(max_length=MAX_TOPICS_WANTED)] | UnsetType = UNSET
    min_score: Annotated[float, Meta(ge=-1, le=1)] | UnsetType = UNSET
    max_age_seconds: Annotated[int, Meta(ge=1, le=MAX_TIME)] | UnsetType = UNSET
    impression_ts: Time | UnsetType = UNSET
    request_id: Annotated[str, Meta(max_length=128)] | UnsetType = UNSET


class RecommendBody(RetrieveBody):
    """A request for posts and their scores."""

    weights: Weights | UnsetType = UNSET
    top_k: Annotated[int, Meta(ge=1)] | UnsetType = UNSET
    actions_wanted: list[str] | UnsetType = UNSET


R = TypeVar("R", bound=Struct)
DEFAULT_K = 200

_BODY = msgspec.json.Decoder(Body)
_ENCODER = msgspec.json.Encoder()


def decode(body: bytes | bytearray, limits: Limits, vocabulary: Vocabulary) -> Body:
    """The typed body, with no more candidates and history than the limits allow.

    Raises MalformedJson, TooLarge or InvalidRequest. A body with more values than the longest request within the limits is
    refused before it is read: they are counted by the bytes that begin or separate them.
    """
    most = 5 * limits.max_candidates + _history_values(limits, vocabulary)
    typed = _typed(_BODY, body, most, lambda value: explain(value, vocabulary))
    _limit("candidates", count_items(typed.candidates), limits.max_candidates)
    _limit("history", count_items(typed.history), limits.max_history)
    return typed


_RETRIEVE, _RECOMMEND = msgspec.json.Decoder(RetrieveBody), msgspec.json.Decoder(RecommendBody)


def decode_retrieve(body: bytes | bytearray, limits: Limits, vocabulary: Vocabulary) -> RetrieveBody:
    """As `decode`, for a request for posts; `vocabulary` is the retrieval model's."""
    return _retrieval(_RETRIEVE, body, limits, [vocabulary], ranks=False)


def decode_recommend(body: bytes | bytearray, limits: Limits, vocabularies: Sequence[Vocabulary]) -> RecommendBody:
    """As `decode`, for a request for posts and their scores; `vocabularies` of the retrieval model and of the ranker."""
    return _retrieval(_RECOMMEND, body, limits, vocabularies, ranks=True)


B = TypeVar("B", bound=RetrieveBody)


def _retrieval(
    decoder: msgspec.json.Decoder[B],
    body: bytes | bytearray,
    limits: Limits,
    vocabularies: Sequence[Vocabulary],
    *,
    ranks: bool,
) -> B:
    most = limits.max_excluded + MAX_TOPICS_WANTED + _history_values(limits, vocabularies[-1])
    typed = _typed(decoder, body, most, lambda value: explain_retrieval(value, vocabularies, ranks=ranks))
    _limit("history", count_items(typed.history), limits.max_history)
    _limit("exclude", len(typed.exclude or ()), limits.max_excluded)
    if (typed.k or DEFAULT_K) > limits.max_retrieved:
        raise TooLarge(f"k: at most {limits.max_retrieved} posts are retrieved.")
    return typed


def _history_values(limits: Limits, vocabulary: Vocabulary) -> int:
    actions = len(vocabulary.action_names)
    return (7 + actions) * limits.max_history + 4 * actions + 100


def _typed(
    decoder: msgspec.json.Decoder[R], body: bytes | bytearray, most: int, explained: Callable[[Any], InvalidRequest]
) -> R:
    if len(body) > most and len(body) - len(body.translate(None, b",[{")) > most:
        check_syntax(body)
        raise TooLarge(f"The body holds more than {most} values.")
    try:
        typed = decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise explained(parse(body)) from None
    refuse_duplicates(body, _ENCODER.encode(typed))
    return typed


def _limit(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise TooLarge(f"{name}: {count} items, and at most {limit} are taken.")


def count_items(items: Sequence[Struct] | HistoryArrays | CandidateArrays | UnsetType) -> int:
    """Items in either shape: how much work they ask for. Whether arrays are equally long is not known yet."""
    if isinstance(items, HistoryArrays | CandidateArrays):
        return len(items.post_id)
    return 0 if items is UNSET else len(items)


def check_syntax(body: bytes | bytearray) -> None:
    """Raise MalformedJson for what is not JSON, making no objects; what `strict_json` refuses beyond that may pass."""
    try:
        msgspec.json.decode(body, type=Raw)
    except msgspec.DecodeError as error:
        raise MalformedJson(f"The body is not valid JSON: {error}.") from None
    except RecursionError:
        raise MalformedJson("The body is nested too deeply.") from None


class BatchDecoder:
    """Splits a batch into the bytes of its requests, of which at most `limit` are taken."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # Of an array that is longer than its struct the rest is skipped: a million items cost no objects.
        fields = [(f"item_{place}", Raw, UNSET) for place in range(limit + 1)]
        items = msgspec.defstruct("Items", fields, array_like=True)
        named = msgspec.defstruct("Named", [("requests", items)], forbid_unknown_fields=True)
        self._bare, self._named = msgspec.json.Decoder(items), msgspec.json.Decoder(named)

    def split(self, body: bytes | bytearray) -> tuple[list[bytes], bool]:
        """The JSON of each request, and whether they came as a bare array. Raises MalformedJson, InvalidRequest or TooLarge."""
        items, is_bare = self._read(body)
        found = [bytes(item) for item in msgspec.structs.astuple(items) if item is not UNSET] if items else []
        if not found:
            raise InvalidRequest([("requests", "must be a list of requests that is not empty, and nothing else")])
        if len(found) > self.limit:
            raise TooLarge(f"requests: at most {self.limit} are taken.")
        if not is_bare and body.count(b":") != 1 + sum(item.count(b":") for item in found):
            raise MalformedJson("The body has the key requests twice.")
        return found, is_bare

    def _read(self, body: bytes | bytearray) -> tuple[Struct | None, bool]:
        with suppress(msgspec.DecodeError, RecursionError):
            return self._named.decode(body).requests, False  # type: ignore[attr-defined]
        with suppress(msgspec.DecodeError, RecursionError):
            return self._bare.decode(body), True
        check_syntax(body)
        return None, True
