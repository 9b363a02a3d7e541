"""Retrieval as the client sees it: what is asked of a corpus, and the posts that come back, ranked or not. Sends nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phoenix_ranker_client.messages import Event, Id, history_json


@dataclass(frozen=True, slots=True)
class RetrievalRequest:
    """Which posts to look for. None leaves the service's default; `weights`, `top_k` and `actions_wanted` are for `recommend` alone."""

    user_id: Id
    history: Sequence[Event] = ()
    k: int | None = None
    exclude: Sequence[Id] | None = None
    exclude_history: bool | None = None
    topics: Sequence[str] | None = None
    min_score: float | None = None
    max_age_seconds: int | None = None
    impression_ts: int | None = None
    weights: Mapping[str, float] | None = None
    top_k: int | None = None
    actions_wanted: Sequence[str] | None = None

    def to_json(self) -> dict[str, Any]:
        """The body, in arrays."""
        lists = {"exclude": self.exclude, "topics": self.topics, "actions_wanted": self.actions_wanted}
        optional = {
            "k": self.k,
            "exclude_history": self.exclude_history,
            "min_score": self.min_score,
            "max_age_seconds": self.max_age_seconds,
            "impression_ts": self.impression_ts,
            "weights": None if self.weights is None else dict(self.weights),
            "top_k": self.top_k,
            **{name: None if values is None else list(values) for name, values in lists.items()},
        }
        body = {"user_id": self.user_id, "history": history_json(self.history)}
        return body | {name: value for name, value in optional.items() if value is not None}


@dataclass(frozen=True, slots=True)
class RetrievedPost:
    """A post of the corpus; `created_at` in Unix seconds, 0 where unknown."""

    post_id: str
    author_id: str
    score: float
    rank: int
    created_at: int
    topics: list[str]


@dataclass(frozen=True, slots=True)
class Retrieval:
    """The best posts, best first. `visible`: how many the filters left; `corpus`: `name`, `version`, `posts`, `changes`."""

    model_name: str
    model_version: str
    corpus: dict[str, Any]
    posts: list[RetrievedPost]
    visible: int
    timings_ms: dict[str, float]

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Retrieval:
        """From a reply's body; fields that a later server may add are ignored."""
        fields = RetrievedPost.__slots__
        posts = [RetrievedPost(**{name: row[name] for name in fields}) for row in body["posts"]]
        model = body["model"]
        return cls(model["name"], model["version"], body["corpus"], posts, body["visible"], body["timings_ms"])


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
class Recommendation:
    """The best posts ranked, best first; `models` has `name` and `version` of `retrieval` and `ranker`."""

    models: dict[str, dict[str, str]]
    corpus: dict[str, Any]
    actions: list[str]
    candidates: list[Recommended]
    visible: int
    timings_ms: dict[str, float]

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Recommendation:
        """From a reply's body; fields that a later server may add are ignored."""
        fields = Recommended.__slots__
        rows = [Recommended(**{name: row[name] for name in fields}) for row in body["candidates"]]
        return cls(body["models"], body["corpus"], body["actions"], rows, body["visible"], body["timings_ms"])
