"""What goes to the service and what comes back, as plain dataclasses and errors. Not for sending anything."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

Id = int | str
R = TypeVar("R")


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
        return body | given(self, "impression_ts", "weights", "top_k", "actions_wanted")


def given(request: Any, *names: str) -> dict[str, Any]:
    """Those of the request's optional fields that are set, as plain JSON."""
    return {name: _plain(value) for name in names if (value := getattr(request, name)) is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) else value


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


def rows_of(kind: type[R], rows: Sequence[Mapping[str, Any]]) -> list[R]:
    """The posts of a reply, each as one of these dataclasses; fields that a later server may add are ignored."""
    values = operator.itemgetter(*(field.name for field in fields(kind)))  # type: ignore[arg-type]
    return [kind(*values(row)) for row in rows]


def fields_of(kind: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a reply of this dataclass, but for its posts; fields that a later server may add are ignored."""
    flat = {f"model_{name}": value for name, value in body.get("model", {}).items()} | dict(body)
    return {name: flat[name] for field in fields(kind) if (name := field.name) not in ("candidates", "posts")}


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
        """From a reply's body."""
        return cls(candidates=rows_of(Ranked, body["candidates"]), **fields_of(cls, body))


@dataclass(frozen=True, slots=True)
class Explained:
    """Why one candidate stands where it stands. `change` and `attention` as on the service's page: what each thing changes, and by layer
    where the model looks."""

    post_id: Id
    score: float
    rank: int
    probabilities: list[float]
    change: dict[str, Any]
    attention: dict[str, Any]


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
        """From a reply's body."""
        return cls(candidates=rows_of(Explained, body["candidates"]), **fields_of(cls, body))


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
    """The error that a problem reply means. `body` is its JSON, or anything else: a proxy may have answered.

    A proxy says 502 where a process died, and 504 where one hangs: another may answer. Our own 504 is the end of the caller's time.
    """
    body = body if isinstance(body, dict) else {}
    kinds = {
        429: Unavailable,
        502: Unavailable,
        503: Unavailable,
        504: DeadlineExceeded if "code" in body else Unavailable,
    }
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
