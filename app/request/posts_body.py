"""Bytes → typed bodies of requests for posts, as `body` does it for requests for scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from app.errors import TooLarge
from app.request.body import HistoryArrays, HistoryItem, Id, Strict, Time, Topic, Weights, check_cost, read
from app.request.bounds import MAX_TIME
from app.request.explain import MAX_TOPICS_WANTED, retrieval_rule
from app.request.vocabulary import Vocabulary
from app.settings import Limits

DEFAULT_K = 200


class RetrieveWishes(Strict):
    """What a request for posts says besides whom they are for."""

    k: Annotated[int, Meta(ge=1)] | UnsetType = UNSET
    exclude: list[Id] | UnsetType = UNSET
    exclude_history: bool | UnsetType = UNSET
    topics: Annotated[list[Topic], Meta(max_length=MAX_TOPICS_WANTED)] | UnsetType = UNSET
    min_score: Annotated[float, Meta(ge=-1, le=1)] | UnsetType = UNSET
    max_age_seconds: Annotated[int, Meta(ge=1, le=MAX_TIME)] | UnsetType = UNSET
    impression_ts: Time | UnsetType = UNSET
    request_id: Annotated[str, Meta(max_length=128)] | UnsetType = UNSET

    def check_sizes(self, events: int, limits: Limits) -> None:
        """Raise TooLarge for more posts, or more items of the history, than the limits allow."""
        for name, count, limit in (
            ("history", events, limits.max_history),
            ("exclude", len(self.exclude or ()), limits.max_excluded),
        ):
            if count > limit:
                raise TooLarge(f"{name}: {count} items, and at most {limit} are taken.")
        if (self.k or DEFAULT_K) > limits.max_retrieved:
            raise TooLarge(f"k: at most {limits.max_retrieved} posts are retrieved.")


class RecommendWishes(RetrieveWishes):
    """What a request for posts and their scores says besides."""

    weights: Weights | UnsetType = UNSET
    top_k: Annotated[int, Meta(ge=1)] | UnsetType = UNSET
    actions_wanted: list[str] | UnsetType = UNSET


class RetrieveBody(RetrieveWishes, kw_only=True):
    """A request for posts whose types are right."""

    user_id: Id
    history: list[HistoryItem] | HistoryArrays | UnsetType = UNSET  # type: ignore[valid-type]


class RecommendBody(RecommendWishes, kw_only=True):
    """A request for posts and their scores whose types are right."""

    user_id: Id
    history: list[HistoryItem] | HistoryArrays | UnsetType = UNSET  # type: ignore[valid-type]


PostsBody = RetrieveBody | RecommendBody
_DECODERS: dict[bool, msgspec.json.Decoder[Any]] = {
    False: msgspec.json.Decoder(RetrieveBody),
    True: msgspec.json.Decoder(RecommendBody),
}


def decode_posts(body: bytes | bytearray, limits: Limits, vocabularies: Sequence[Vocabulary]) -> PostsBody:
    """As `body.decode`. `vocabularies`: of the retrieval model, and of the ranker where the posts are to be ranked."""
    ranks = len(vocabularies) > 1
    check_cost(body, limits.max_values)
    typed: PostsBody = read(_DECODERS[ranks], body, lambda: retrieval_rule(vocabularies, ranks=ranks))
    typed.check_sizes(events_of(typed), limits)
    return typed


def events_of(body: PostsBody) -> int:
    """Items of the history, in either shape. Arrays may still differ in length."""
    items: Any = body.history
    if isinstance(items, HistoryArrays):
        items = items.post_id  # type: ignore[attr-defined]
    return 0 if items is UNSET else len(items)
