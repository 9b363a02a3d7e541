"""Retrieval as the client sees it: what is asked of a corpus, and the posts that come back, ranked or not. Sends nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from phoenix_ranker_client.messages import Event, Id, Reply, given, user_of


@dataclass(frozen=True, slots=True)
class RetrievalRequest:
    """Which posts to look for. A field that is None takes the service's default; `weights`, `top_k`, `actions_wanted` and
    `score` are for `recommend` only; `context` as in `RankingRequest`."""

    user_id: Id
    history: Sequence[Event] = ()
    k: int | None = None
    exclude: Sequence[Id] | None = None
    exclude_history: bool | None = None
    topics: Sequence[str] | None = None
    min_score: float | None = None
    max_age_seconds: int | None = None
    impression_ts: int | None = None
    weights: Mapping[str, float] | str | None = None
    top_k: int | None = None
    actions_wanted: Sequence[str] | None = None
    context: str | None = None
    score: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The JSON body, with posts as columns."""
        names = (field.name for field in fields(self) if field.name not in ("user_id", "history", "context"))
        return user_of(self) | given(self, *names)


@dataclass(frozen=True, slots=True)
class RetrievedPost:
    """A post of the corpus; `created_at` in Unix seconds, 0 if unknown."""

    post_id: str
    author_id: str
    score: float
    rank: int
    created_at: int
    topics: list[str]


@dataclass(frozen=True, slots=True)
class Retrieval(Reply):
    """The best posts, best first. `visible`: posts left by all filters but `min_score`; `corpus`: `name`, `version`, `posts`, `changes`."""

    ROWS = "posts", RetrievedPost
    model_name: str
    model_version: str
    corpus: dict[str, Any]
    posts: list[RetrievedPost]
    visible: int
    timings_ms: dict[str, float]


@dataclass(frozen=True, slots=True)
class Recommended:
    """A post with its scores, as `Ranked`, and how it was retrieved."""

    post_id: str
    score: float
    rank: int
    probabilities: list[float]
    continuous: dict[str, float]
    retrieval_score: float
    retrieval_rank: int


@dataclass(frozen=True, slots=True)
class Recommendation(Reply):
    """The best posts ranked, best first; `models` has `name` and `version` of `retrieval` and `ranker`, `context` is as in `Ranking`."""

    ROWS = "candidates", Recommended
    models: dict[str, dict[str, str]]
    corpus: dict[str, Any]
    actions: list[str]
    candidates: list[Recommended]
    visible: int
    timings_ms: dict[str, float]
    context: str = ""
