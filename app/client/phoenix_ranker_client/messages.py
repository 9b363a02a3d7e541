"""What goes to the service and what comes back, as plain dataclasses and errors."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

Id = int | str
R = TypeVar("R", bound="Reply")


@dataclass(frozen=True, slots=True)
class Event:
    """One item of a history. `actions`: names, or name → value; `dwell_time` in seconds, 0 if unknown."""

    post_id: Id
    author_id: Id
    actions: Sequence[str] | Mapping[str, float] = ()
    product_surface: int = 0
    dwell_time: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A post to score; `created_at` in Unix seconds, 0 if unknown."""

    post_id: Id
    author_id: Id
    product_surface: int = 0
    created_at: int = 0


@dataclass(frozen=True, slots=True)
class RankingRequest:
    """One user's request. `history` runs oldest → newest; a field that is None takes the service's default. `context`: a handle from the
    service for this user and history, sent in their place. `weights`: by action, or the name of a published set. `score`: "sum", or
    "offset" for scores above 0."""

    user_id: Id
    candidates: Sequence[Candidate]
    history: Sequence[Event] = ()
    impression_ts: int | None = None
    weights: Mapping[str, float] | str | None = None
    top_k: int | None = None
    actions_wanted: Sequence[str] | None = None
    context: str | None = None
    score: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The JSON body, with posts as columns."""
        body = user_of(self) | {"candidates": columns_of(Candidate, self.candidates)}
        return body | given(self, "impression_ts", "weights", "top_k", "actions_wanted", "score")


def user_of(request: Any) -> dict[str, Any]:
    """The fields that say whom a request is for: the context handle if it has one, else user and history. An empty handle beside a
    history is none: the service has not kept that context."""
    if request.context or (request.context == "" and not request.history):
        return {"context": request.context}
    return {"user_id": request.user_id, "history": columns_of(Event, request.history)}


def given(request: Any, *names: str) -> dict[str, Any]:
    """The named optional fields that are set, as plain JSON."""
    return {name: _plain(value) for name in names if (value := getattr(request, name)) is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) else value


def columns_of(kind: type, posts: Sequence[Any]) -> dict[str, list[Any]]:
    """Candidates or a history as columns: one list per field."""
    return {field.name: [_plain(getattr(post, field.name)) for post in posts] for field in fields(kind)}


class Reply:
    """A reply that holds posts. `ROWS`: the name of the field with the posts, and the dataclass of one post."""

    __slots__ = ()
    ROWS: ClassVar[tuple[str, type]]

    @classmethod
    def from_json(cls: type[R], body: Mapping[str, Any]) -> R:
        """Build it from a reply's body. Ignores unknown fields, which a later server may add."""
        name, kind = cls.ROWS
        values = operator.itemgetter(*(field.name for field in fields(kind)))
        flat = {f"model_{part}": value for part, value in body.get("model", {}).items()} | dict(body)
        flat[name] = [kind(*values(row)) for row in body[name]]
        return cls(**{field.name: flat[field.name] for field in fields(cls) if field.name in flat})  # type: ignore[arg-type]  # a dataclass


@dataclass(frozen=True, slots=True)
class Ranked:
    """A candidate's scores. `probabilities` line up with the ranking's `actions`; `continuous` by name, in its unit."""

    post_id: Id
    score: float
    rank: int
    probabilities: list[float]
    continuous: dict[str, float]


@dataclass(frozen=True, slots=True)
class Ranking(Reply):
    """The reply to one request, in the request's order, or best first if `top_k` was given. `context`: the handle of user and history,
    empty if the service does not keep them."""

    ROWS = "candidates", Ranked
    model_name: str
    model_version: str
    actions: list[str]
    candidates: list[Ranked]
    history_used: int
    history_dropped: int
    timings_ms: dict[str, float]
    context: str = ""


@dataclass(frozen=True, slots=True)
class Explained:
    """Why one candidate has its rank. `change`: for each thing, the scores with it less those without it; `attention`: where the model
    looks, by layer. The service's page shows both."""

    post_id: Id
    score: float
    rank: int
    probabilities: list[float]
    change: dict[str, Any]
    attention: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Explanation(Reply):
    """The reply to one `explain` call, in the order asked. `events`: `place` and `post_id` of the history items that were left out one
    at a time; `context` as in `Ranking`."""

    ROWS = "candidates", Explained
    model_name: str
    model_version: str
    actions: list[str]
    events: dict[str, list[Any]]
    candidates: list[Explained]
    history_used: int
    history_dropped: int
    timings_ms: dict[str, float]
    context: str = ""


class RankerError(Exception):
    """The service gave no ranking. `status` is 0 if no reply came; `errors` are (field, message) pairs."""

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


class ContextUnknown(RequestRefused):
    """The service does not know the handle, or no longer does. A call that also has user and history is then sent again with them."""


class Unavailable(RankerError):
    """No room, not ready, draining, engine down, no connection, or the request arrived too slowly. Raised after the last retry."""


class DeadlineExceeded(RankerError):
    """The deadline passed, in the client or in the service."""


class ServerFault(RankerError):
    """The service failed: a 500, or a reply that this service does not send."""


def error_from(status: int, body: Any, request_id: str, retry_after_seconds: float | None) -> RankerError:
    """The error that a problem reply means. `body` is its JSON, or anything else: a proxy may have answered.

    A proxy sends 502 when a process died and 504 when one hangs, so another process may answer. The service's own 504 has a `code` and
    means that the deadline passed.
    """
    body = body if isinstance(body, dict) else {}
    kinds = {
        408: Unavailable,
        412: ContextUnknown if body.get("code") == "context_unknown" else RequestRefused,
        429: Unavailable,
        502: Unavailable,
        503: Unavailable,
        504: DeadlineExceeded if "code" in body else Unavailable,
    }
    kind = kinds.get(status, RequestRefused if 400 <= status < 500 else ServerFault)
    listed = body.get("errors")
    fields = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    errors = [(str(item.get("field")), str(item.get("message"))) for item in fields]
    code, detail = str(body.get("code", "unknown")), str(body.get("detail", "The reply is not from this service."))
    return kind(status, code, detail, request_id, retry_after_seconds, errors)


def batch_results(reply: Mapping[str, Any]) -> list[Ranking | RankerError]:
    """A ranking or an error for each request of a batch, in order."""
    return [
        error_from(item["error"]["status"], item["error"], "", None) if "error" in item else Ranking.from_json(item)
        for item in reply["results"]
    ]
