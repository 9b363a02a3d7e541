"""Bytes → typed bodies of requests for posts, as `body` does it for requests for scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from app.errors import TooLarge
from app.request.body import HistoryArrays, HistoryItem, Id, Strict, Time, Topic, Weights, check_cost, read
from app.request.contract import MAX_TIME
from app.request.explain import MAX_TOPICS_WANTED, retrieval_rule
from app.request.vocabulary import Vocabulary
from app.settings import Limits

DEFAULT_K = 200


class RetrieveBody(Strict):
    """A request for posts whose types are right."""

    user_id: Id
    history: list[HistoryItem] | HistoryArrays | UnsetType = UNSET  # type: ignore[valid-type]
    k: Annotated[int, Meta(ge=1)] | UnsetType = UNSET
    exclude: list[Id] | UnsetType = UNSET
    exclude_history: bool | UnsetType = UNSET
    topics: Annotated[list[Topic], Meta(max_length=MAX_TOPICS_WANTED)] | UnsetType = UNSET
    min_score: Annotated[float, Meta(ge=-1, le=1)] | UnsetType = UNSET
    max_age_seconds: Annotated[int, Meta(ge=1, le=MAX_TIME)] | UnsetType = UNSET
    impression_ts: Time | UnsetType = UNSET
    request_id: Annotated[str, Meta(max_length=128)] | UnsetType = UNSET

    @property
    def events(self) -> int:
        """Items of the history, in either shape. Arrays may still differ in length."""
        items: Any = self.history
        if isinstance(items, HistoryArrays):
            items = items.post_id  # type: ignore[attr-defined]
        return 0 if items is UNSET else len(items)


class RecommendBody(RetrieveBody):
    """A request for posts and their scores."""

    weights: Weights | UnsetType = UNSET
    top_k: Annotated[int, Meta(ge=1)] | UnsetType = UNSET
    actions_wanted: list[str] | UnsetType = UNSET


B = TypeVar("B", bound=RetrieveBody)
_RETRIEVE, _RECOMMEND = msgspec.json.Decoder(RetrieveBody), msgspec.json.Decoder(RecommendBody)


def decode_retrieve(body: bytes | bytearray, limits: Limits, vocabulary: Vocabulary) -> RetrieveBody:
    """As `body.decode`, for a request for posts; `vocabulary` is the retrieval model's."""
    return _decoded(_RETRIEVE, body, limits, [vocabulary], ranks=False)


def decode_recommend(body: bytes | bytearray, limits: Limits, vocabularies: Sequence[Vocabulary]) -> RecommendBody:
    """As `body.decode`, for a request for posts and their scores; `vocabularies` of the retrieval model and of the ranker."""
    return _decoded(_RECOMMEND, body, limits, vocabularies, ranks=True)


def _decoded(
    decoder: msgspec.json.Decoder[B],
    body: bytes | bytearray,
    limits: Limits,
    vocabularies: Sequence[Vocabulary],
    *,
    ranks: bool,
) -> B:
    check_cost(body, limits.max_values)
    typed = read(decoder, body, lambda: retrieval_rule(vocabularies, ranks=ranks))
    for name, count, limit in (
        ("history", typed.events, limits.max_history),
        ("exclude", len(typed.exclude or ()), limits.max_excluded),
    ):
        if count > limit:
            raise TooLarge(f"{name}: {count} items, and at most {limit} are taken.")
    if (typed.k or DEFAULT_K) > limits.max_retrieved:
        raise TooLarge(f"k: at most {limits.max_retrieved} posts are retrieved.")
    return typed
