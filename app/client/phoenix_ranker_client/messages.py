"""What goes to the service and what comes back, as plain dataclasses and errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import MISSING, dataclass, fields
from operator import attrgetter, itemgetter
from typing import Any, ClassVar, TypeVar

from phoenix_ranker_client.encoding import Unsendable

Id = int | str
R = TypeVar("R", bound="Reply")


def _keep(item: Any, names: Iterable[str]) -> None:
    """Keep what a generator in one of these fields yields: it can be read only once."""
    for name in names:
        if isinstance(value := getattr(item, name), Iterator):
            object.__setattr__(item, name, tuple(value))


@dataclass(frozen=True, slots=True)
class Event:
    """One item of a history. `actions`: names, or name → value; `dwell_time` in seconds, 0 if unknown; `codes`: content codes, empty for
    none."""

    post_id: Id
    author_id: Id
    actions: Sequence[str] | Mapping[str, float] = ()
    product_surface: int = 0
    dwell_time: float = 0.0
    codes: Sequence[int] = ()

    def __post_init__(self) -> None:
        _keep(self, ("actions", "codes"))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A post to score; `created_at` in Unix seconds, 0 if unknown; `codes`: content codes, empty for none."""

    post_id: Id
    author_id: Id
    product_surface: int = 0
    created_at: int = 0
    codes: Sequence[int] = ()

    def __post_init__(self) -> None:
        _keep(self, ("codes",))


class Request:
    """A body for one user: `user_id` with `history`, oldest → newest, or `context`, a handle that the service gave for both. A field
    that is None takes the service's default. A request with a handle and a history is sent again whole where the handle is unknown."""

    __slots__ = ()
    user_id: Id
    history: Sequence[Event] | None
    context: str | None

    def __post_init__(self) -> None:
        _keep(self, (field.name for field in fields(self)))  # type: ignore[arg-type]  # every subclass is a dataclass

    def to_json(self, *, whole: bool = False) -> dict[str, Any]:
        """The body, with posts as columns, for `encode`. `whole`: with user and history even where there is a handle. Raises Unsendable
        for an item that is neither an Event or Candidate nor a mapping with its fields."""
        handled = ("user_id", "history", "context")
        body: dict[str, Any] = (
            {"context": self.context}
            if self.context and not whole
            else {"user_id": self.user_id, "history": _columns(Event, self.history, "history")}
        )
        for field in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, field.name)
            if field.name == "candidates":
                body["candidates"] = _columns(Candidate, value, "candidates")
            elif field.name not in handled and value is not None:
                body[field.name] = value
        return body


@dataclass(frozen=True, slots=True)
class ContextRequest(Request):
    """A user and a history to be computed ahead."""

    user_id: Id
    history: Sequence[Event] | None = None
    context: str | None = None


@dataclass(frozen=True, slots=True)
class RankingRequest(Request):
    """What to rank. `weights`: by action, or the name of a published set. `score`: "sum", or "offset" for scores above 0. `explore`:
    `{"temperature": 0.1}` draws the ranks at random, in units of the score; not for `explain`. `explain`: post ids, for `explain` alone."""

    user_id: Id
    candidates: Sequence[Candidate]
    history: Sequence[Event] | None = None
    impression_ts: int | None = None
    weights: Mapping[str, float] | str | None = None
    top_k: int | None = None
    actions_wanted: Sequence[str] | None = None
    context: str | None = None
    score: str | None = None
    explain: Sequence[Id] | None = None
    explore: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class RetrievalRequest(Request):
    """Which posts to look for. `weights`, `top_k`, `actions_wanted`, `score` and `explore` are for `recommend` alone."""

    user_id: Id
    history: Sequence[Event] | None = None
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
    explore: Mapping[str, float] | None = None


class Reply:
    """A reply that holds posts. `ROWS`: the name of the field with the posts, and the dataclass of one post. `request_id` of each reply is
    the name that the service gave the request in its logs, and drew its ranks by."""

    __slots__ = ()
    ROWS: ClassVar[tuple[str, type]]

    @classmethod
    def from_json(cls: type[R], body: Mapping[str, Any]) -> R:
        """Build it from a reply's body. Ignores unknown fields, which a later server may add."""
        name, kind = cls.ROWS
        rows = body[name]
        first = rows[0] if rows else {}
        values_of = itemgetter(
            *(field.name for field in fields(kind) if field.default is MISSING or field.name in first)
        )
        flat = {f"model_{part}": value for part, value in body.get("model", {}).items()} | dict(body)
        flat[name] = [kind(*values_of(row)) for row in rows]
        return cls(**{field.name: flat[field.name] for field in fields(cls) if field.name in flat})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Ranked:
    """A candidate's scores. `probabilities` line up with the ranking's `actions`; `continuous` by name, in its unit. `propensity`: with
    `explore`, the probability that the candidate got its rank, given those above it; else None."""

    post_id: Id
    score: float
    rank: int
    probabilities: list[float]
    continuous: dict[str, float]
    propensity: float | None = None


@dataclass(frozen=True, slots=True)
class Ranking(Reply):
    """The reply to one request, in its order or, with `top_k`, best first. `context`: the handle of user and history for later requests,
    empty where the service does not keep it. `warnings`: sentences for people."""

    ROWS = "candidates", Ranked
    model_name: str
    model_version: str
    actions: list[str]
    candidates: list[Ranked]
    history_used: int
    history_dropped: int
    timings_ms: dict[str, float]
    context: str = ""
    warnings: Sequence[str] = ()
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Explained:
    """An explained candidate. `change`: for each thing, the scores with it less those without it; `attention`: where the model looks, by
    layer."""

    post_id: Id
    score: float
    rank: int
    probabilities: list[float]
    change: dict[str, Any]
    attention: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Explanation(Reply):
    """The reply to one `explain` call, in the order asked. `events`: `place` and `post_id` of the history items that were left out one at
    a time. `context`, `warnings`: as in `Ranking`."""

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
    warnings: Sequence[str] = ()
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class RetrievedPost:
    """A post of the corpus; `created_at` in Unix seconds, 0 if unknown; `codes`: content codes, empty if none of the posts has any."""

    post_id: str
    author_id: str
    score: float
    rank: int
    created_at: int
    topics: list[str]
    codes: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Retrieval(Reply):
    """The best posts, best first. `visible`: posts left by all filters but `min_score`; `corpus`: `name`, `version`, `posts`, `changes`,
    `sequence`. `context`: the handle that the request named, else empty."""

    ROWS = "posts", RetrievedPost
    model_name: str
    model_version: str
    corpus: dict[str, Any]
    posts: list[RetrievedPost]
    visible: int
    history_used: int
    history_dropped: int
    timings_ms: dict[str, float]
    context: str = ""
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Recommended:
    """A ranked post, with how it was retrieved. `propensity`: as in `Ranked`."""

    post_id: str
    score: float
    rank: int
    probabilities: list[float]
    continuous: dict[str, float]
    retrieval_score: float
    retrieval_rank: int
    propensity: float | None = None


@dataclass(frozen=True, slots=True)
class Recommendation(Reply):
    """The best posts ranked, best first. `models`: `name` and `version` of `retrieval` and `ranker`. `corpus`: as in `Retrieval`.
    `history_used`, `history_dropped`: of the ranking model. `context`, `warnings`: as in `Ranking`."""

    ROWS = "candidates", Recommended
    models: dict[str, dict[str, str]]
    corpus: dict[str, Any]
    actions: list[str]
    candidates: list[Recommended]
    visible: int
    history_used: int
    history_dropped: int
    timings_ms: dict[str, float]
    context: str = ""
    warnings: Sequence[str] = ()
    request_id: str = ""


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
        self.status, self.code, self.detail, self.request_id = status, code, detail, request_id
        self.retry_after_seconds = retry_after_seconds
        self.errors = tuple(errors)

    def __reduce__(self) -> tuple[Any, ...]:
        """Its arguments are not those of Exception, from which pickle would make it again."""
        named = (self.status, self.code, self.detail, self.request_id, self.retry_after_seconds, self.errors)
        return type(self), named, self.__dict__


class RequestRefused(RankerError):
    """The request itself is wrong, too large, or not allowed: the same one will be refused again."""


class ContextUnknown(RequestRefused):
    """The service does not know the handle, or no longer does, and the call had no history to send in its place."""


class NoCorpus(RequestRefused):
    """This service only ranks: it has no corpus to retrieve from, and asking again does not change that."""


class Unavailable(RankerError):
    """No room, not ready, draining, engine down, or no connection. Raised after the last retry."""


class DeadlineExceeded(RankerError):
    """The deadline passed, in the client or in the service."""


class ServerFault(RankerError):
    """The service failed."""


class UnexpectedReply(RankerError):
    """The reply is none that this service sends: a redirect, a proxy's page, or another service's. `base_url` may be wrong."""


def error_from(
    status: int, body: Any, request_id: str, retry_after_seconds: float | None = None, unexpected: str = ""
) -> RankerError:
    """The error that a problem reply means. `body` is its JSON, or anything else: a proxy may have answered. `unexpected` is the detail
    for a reply that this service does not send.

    A proxy sends 502 when a process died and 504 when one hangs, so another process may answer. The service's own 504 has a `code` and
    means that the deadline passed.
    """
    body = body if isinstance(body, dict) else {}
    kinds: dict[int, type[RankerError]] = {429: Unavailable, 502: Unavailable, 503: Unavailable}
    kinds[404] = NoCorpus if body.get("code") == "no_corpus" else RequestRefused
    kinds[412] = ContextUnknown if body.get("code") == "context_unknown" else RequestRefused
    kinds[504] = DeadlineExceeded if "code" in body else Unavailable
    kind = kinds.get(status, RequestRefused if 400 <= status < 500 else ServerFault)
    if "code" not in body and status < 500 and status != 429:
        kind = UnexpectedReply
    listed = body.get("errors")
    errors = (
        [(str(item.get("field")), str(item.get("message"))) for item in listed or () if isinstance(item, dict)]
        if isinstance(listed, list)
        else []
    )
    detail = str(body.get("detail", unexpected))
    return kind(status, str(body.get("code", "unknown")), detail, request_id, retry_after_seconds, errors)


def _columns(kind: type, posts: Any, place: str) -> dict[str, list[Any]]:
    """One list for each field; codes are left out where no post has any. `place` names the posts in errors."""
    try:
        rows = [
            post if isinstance(post, kind) else _post(kind, post, f"{place}[{row}]")
            for row, post in enumerate(posts or ())
        ]
    except (TypeError, ValueError) as error:
        if isinstance(error, Unsendable):
            raise
        raise Unsendable(place, f"must be a sequence of {kind.__name__}, not a {type(posts).__name__}") from error
    columns = {field.name: list(map(attrgetter(field.name), rows)) for field in fields(kind)}
    for row, codes in enumerate(columns["codes"]):
        if not isinstance(codes, Sized):
            raise Unsendable(f"{place}.codes[{row}]", f"must be a sequence of integers, not a {type(codes).__name__}")
    if not any(map(len, columns["codes"])):
        del columns["codes"]
    return columns


def _post(kind: type, post: Any, place: str) -> Any:
    """A mapping as an Event or a Candidate. Raises Unsendable."""
    names = [field.name for field in fields(kind)]
    if isinstance(post, Mapping) and {"post_id", "author_id"} <= set(post) <= set(names):
        return kind(**post)
    raise Unsendable(place, f"must be {kind.__name__}(…), or a mapping with its fields: {', '.join(names)}")
