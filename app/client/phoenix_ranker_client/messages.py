"""What goes to the service and what comes back, as plain dataclasses and errors. Not for sending anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Id = int | str


@dataclass(frozen=True, slots=True)
class Event:
    """One item of a history. `actions`: names, or name → value; `dwell_time` in seconds, 0 where unknown."""

    post_id: Id
    author_id: Id
    actions: Sequence[str] | Mapping[str, float] = ()
    product_surface: int = 0
    dwell_time: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A post to score; `created_at` in Unix seconds, 0 where unknown."""

    post_id: Id
    author_id: Id
    product_surface: int = 0
    created_at: int = 0


@dataclass(frozen=True, slots=True)
class RankingRequest:
    """One user's request. `history` runs oldest → newest; None leaves the service's default."""

    user_id: Id
    candidates: Sequence[Candidate]
    history: Sequence[Event] = ()
    impression_ts: int | None = None
    weights: Mapping[str, float] | None = None
    top_k: int | None = None
    actions_wanted: Sequence[str] | None = None

    def to_json(self) -> dict[str, Any]:
        """The body, in arrays."""
        candidates, history = self.candidates, self.history
        body: dict[str, Any] = {
            "user_id": self.user_id,
            "candidates": {
                "post_id": [candidate.post_id for candidate in candidates],
                "author_id": [candidate.author_id for candidate in candidates],
                "product_surface": [candidate.product_surface for candidate in candidates],
                "created_at": [candidate.created_at for candidate in candidates],
            },
            "history": history_json(history),
        }
        optional = {
            "impression_ts": self.impression_ts,
            "weights": None if self.weights is None else dict(self.weights),
            "top_k": self.top_k,
            "actions_wanted": None if self.actions_wanted is None else list(self.actions_wanted),
        }
        return body | {name: value for name, value in optional.items() if value is not None}


def history_json(history: Sequence[Event]) -> dict[str, Any]:
    """A history in arrays."""
    return {
        "post_id": [event.post_id for event in history],
        "author_id": [event.author_id for event in history],
        "actions": [
            dict(event.actions) if isinstance(event.actions, Mapping) else list(event.actions) for event in history
        ],
        "product_surface": [event.product_surface for event in history],
        "dwell_time": [event.dwell_time for event in history],
    }


@dataclass(frozen=True, slots=True)
class Ranked:
    """A candidate's scores. `probabilities` line up with the ranking's `actions`; `continuous` by name, in its unit."""

    post_id: Id
    score: float
    rank: int
    probabilities: list[float]
    continuous: dict[str, float]


@dataclass(frozen=True, slots=True)
class Ranking:
    """The reply to one request, in the request's order, or best first where `top_k` was given."""

    model_name: str
    model_version: str
    actions: list[str]
    candidates: list[Ranked]
    history_used: int
    history_dropped: int
    timings_ms: dict[str, float]

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Ranking:
        """From a reply's body; fields that a later server may add are ignored."""
        return cls(
            body["model"]["name"],
            body["model"]["version"],
            body["actions"],
            [
                Ranked(row["post_id"], row["score"], row["rank"], row["probabilities"], row["continuous"])
                for row in body["candidates"]
            ],
            body["history_used"],
            body["history_dropped"],
            body["timings_ms"],
        )


@dataclass(frozen=True, slots=True)
class Explained:
    """Why one candidate stands where it stands. `change` and `attention` as on the service's page: what each thing changes, and by layer
    where the model looks; `attention` is None where several processes serve."""

    post_id: Id
    score: float
    rank: int
    probabilities: list[float]
    change: dict[str, Any]
    attention: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """The reply to one question, in its order. `events`: `place` and `post_id` of the history items that were left out one by one."""

    model_name: str
    model_version: str
    actions: list[str]
    events: dict[str, list[Any]]
    candidates: list[Explained]
    history_used: int
    history_dropped: int
    timings_ms: dict[str, float]

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Explanation:
        """From a reply's body; fields that a later server may add are ignored."""
        fields = Explained.__slots__
        rows = [Explained(**{name: row[name] for name in fields}) for row in body["candidates"]]
        model, rest = body["model"], (body[name] for name in ("history_used", "history_dropped", "timings_ms"))
        return cls(model["name"], model["version"], body["actions"], body["events"], rows, *rest)


class RankerError(Exception):
    """The service gave no ranking. `status` is 0 where no reply came; `errors` are (field, message) pairs."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        request_id: str,
        retry_after_seconds: float | None = None,
        errors: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__(f"{code} ({status}): {detail} [request {request_id}]")
        self.status = status
        self.code = code
        self.detail = detail
        self.request_id = request_id
        self.retry_after_seconds = retry_after_seconds
        self.errors = tuple(errors)


class RequestRefused(RankerError):
    """The request itself is wrong, too large, or not allowed: the same one will be refused again."""


class Unavailable(RankerError):
    """No room, not ready, draining, engine down, or no connection. Was tried again as often as time allowed."""


class DeadlineExceeded(RankerError):
    """The time was over, here or there."""


class ServerFault(RankerError):
    """The service failed: 500, or a reply that is not one of this service."""


def error_from(status: int, body: Any, request_id: str, retry_after_seconds: float | None) -> RankerError:
    """The error that a problem reply means. `body` is its JSON, or anything else: a proxy may have answered."""
    body = body if isinstance(body, dict) else {}
    kinds = {429: Unavailable, 503: Unavailable, 504: DeadlineExceeded}
    kind = kinds.get(status, RequestRefused if 400 <= status < 500 else ServerFault)
    listed = body.get("errors")
    fields = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    errors = [(str(item.get("field")), str(item.get("message"))) for item in fields]
    code, detail = str(body.get("code", "unknown")), str(body.get("detail", "The reply is not one of this service."))
    return kind(status, code, detail, request_id, retry_after_seconds, errors)


def batch_results(reply: Mapping[str, Any]) -> list[Ranking | RankerError]:
    """A ranking or an error for each request of a batch, in order."""
    return [
        error_from(item["error"]["status"], item["error"], "", None) if "error" in item else Ranking.from_json(item)
        for item in reply["results"]
    ]
