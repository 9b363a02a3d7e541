"""What can go wrong with a request, as typed exceptions that carry their HTTP status and stable code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

MAX_PROBLEMS = 10


class FieldProblem(NamedTuple):
    """One thing that is wrong with a request. `field` is a dotted path such as `candidates[3].post_id`, `` for the whole body."""

    field: str
    message: str


class ServiceError(Exception):
    """A request that gets no scores. `detail` is a sentence for people and holds nothing that the caller sent.

    `status`, `code` and `title` belong to the class, so that a code always means one status; the title follows from the code unless the
    class has another one.
    `retry_after_seconds` is an honest guess of when a retry can succeed, None where a retry is pointless. `may_wait`: a caller who
    sends again at once need not be told at once.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"
    title: ClassVar[str] = "Internal error"
    default_detail: ClassVar[str] = "The server failed to answer this request."
    headers: ClassVar[Mapping[str, str]] = {}
    is_general: ClassVar[bool] = True
    """Whether every endpoint that ranks may answer so; `/docs` shows it at each of them."""

    def __init_subclass__(
        cls, status: int | None = None, code: str | None = None, title: str | None = None, is_general: bool = True
    ) -> None:
        if status is not None and code is not None:
            cls.status, cls.code, cls.is_general = status, code, is_general
            cls.title = title or code.replace("_", " ").capitalize()

    def __init__(
        self, detail: str | None = None, *, retry_after_seconds: float | None = None, may_wait: bool = False
    ) -> None:
        self.detail = self.default_detail if detail is None else detail
        self.retry_after_seconds = retry_after_seconds
        self.may_wait = may_wait
        self.problems: tuple[FieldProblem, ...] = ()
        super().__init__(self.detail)

    def problem(self, request_id: str | None = None) -> dict[str, Any]:
        """The problem object (RFC 9457), at most 4 KiB as JSON; nothing in it comes from the request's body."""
        content: dict[str, Any] = {
            "type": f"urn:ranker:problem:{self.code}",
            "title": self.title,
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
        }
        if self.problems:
            content["errors"] = [problem._asdict() for problem in self.problems]
        if request_id is not None:
            content["request_id"] = request_id
        return content


class InternalError(ServiceError):
    """A fault of the server that no other class names."""


class MalformedJson(ServiceError, status=400, code="malformed_json", title="Malformed JSON"):
    """The body is not one strict JSON document in UTF-8."""

    default_detail = "The body is not valid JSON."


class BadRequest(ServiceError, status=400, code="bad_request"):
    """The request cannot be read at all: a header that breaks its own rules, say."""

    default_detail = "The request cannot be read."


class RequestTimeout(ServiceError, status=408, code="request_timeout", title="Request Timeout", is_general=False):
    """The request came too slowly."""

    default_detail = "The request did not arrive in time."


class Unauthorized(ServiceError, status=401, code="unauthorized"):
    """API keys are configured, and the request sent none of them."""

    default_detail = "A valid API key is required: Authorization: Bearer KEY."
    headers: ClassVar[Mapping[str, str]] = {"WWW-Authenticate": "Bearer"}


class NotFound(ServiceError, status=404, code="not_found", is_general=False):
    """There is nothing at this path."""

    default_detail = "There is nothing at this path."


class RequestMethod(ServiceError, status=405, code="method_not_allowed", is_general=False):
    """The path exists, the method does not."""

    default_detail = "This path does not take this method."


class NotAcceptable(ServiceError, status=406, code="not_acceptable"):
    """The reply would be of a media type that the Accept header does not allow."""

    default_detail = "The reply to this request is of a media type that its Accept header rules out."


class ContextUnknown(ServiceError, status=412, code="context_unknown"):
    """No context of this caller has this handle here. Handles name what is in a cache, so the request is to be sent whole."""

    default_detail = "This handle is unknown or has expired: send the user and the history."


class TooLarge(ServiceError, status=413, code="too_large"):
    """More bytes, candidates or requests than the limits allow."""

    default_detail = "The request is larger than the limits allow."


class UnsupportedMediaType(ServiceError, status=415, code="unsupported_media_type"):
    """The body is of another media type or charset, or compressed otherwise than with gzip."""

    default_detail = "This path does not take the body's media type: send application/json in UTF-8, for example."


class UnsupportedCoding(UnsupportedMediaType):
    """The body has an unsupported content coding. Only this 415 has the header that lists the supported ones."""

    default_detail = "The body may be compressed with gzip only."
    headers: ClassVar[Mapping[str, str]] = {"Accept-Encoding": "gzip"}


class InvalidRequest(ServiceError, status=422, code="invalid_request"):
    """Valid JSON that is not a valid request. Carries the first ten problems; `found` counts all that were seen."""

    default_detail = "The request is not valid."

    def __init__(self, problems: Sequence[tuple[str, str]], *, found: int | None = None) -> None:
        self.found = max(found or 0, len(problems))
        kept = tuple(FieldProblem(field, message) for field, message in problems[:MAX_PROBLEMS])
        super().__init__(_summary(kept, self.found))
        self.problems = kept


class Overloaded(ServiceError, status=429, code="overloaded"):
    """The queue is full, or a key has used up its share of it."""

    default_detail = "The queue is full."


class NotReady(ServiceError, status=503, code="not_ready"):
    """No checkpoint can serve yet."""

    default_detail = "The service is starting."


class Draining(ServiceError, status=503, code="draining"):
    """The process is about to stop and takes no new request."""

    default_detail = "The service is shutting down."


class EngineDown(ServiceError, status=503, code="engine_down"):
    """The engine failed or stopped making progress."""

    default_detail = "The engine cannot compute scores."


class ChangeNotStored(ServiceError, status=503, code="not_stored", is_general=False):
    """A change of posts, or a corpus with its changes, could not be put on the disk. Nothing has changed."""


class CorpusNotLoaded(ServiceError, status=503, code="corpus_not_loaded", is_general=False):
    """Nothing can be retrieved: this process has no retrieval model and corpus, or has not loaded them yet."""

    default_detail = "This process serves no corpus: set retrieval.checkpoint and retrieval.corpus."


class CorpusBehind(ServiceError, status=503, code="corpus_behind", is_general=False):
    """The corpus of this process has not had the change that the request wants to see."""

    default_detail = "This process has not yet applied the change that X-Corpus-At-Least names."


class ChangedByFeed(ServiceError, status=409, code="changed_by_feed", is_general=False):
    """The posts of this process change by its feed alone, or replicas would differ."""

    default_detail = (
        "Posts change only through the feed in retrieval.feed: send the change there, and every replica applies it."
    )


class DeadlineExceeded(ServiceError, status=504, code="deadline_exceeded"):
    """The caller's time was over before the scores were there."""

    default_detail = "The deadline passed before the scores were computed."


class ReloadRefused(ServiceError, status=422, code="checkpoint_refused", is_general=False):
    """The checkpoint was refused; the one that served before serves on."""


class StorageFull(ServiceError, status=507, code="storage_full", title="Insufficient storage", is_general=False):
    """The disk or the quota is full, or the file system is read-only: nothing was changed."""


class LogLost(ServiceError, status=503, code="log_lost", title="Log of changes lost", is_general=False):
    """The log of changes is gone, cut or replaced beside the process that serves them: nothing was changed."""


class ReloadBusy(ServiceError, status=409, code="reload_in_progress", is_general=False):
    """Another checkpoint is being loaded."""

    default_detail = "Another checkpoint is being loaded."


class NonFiniteScores(ServiceError, status=500, code="non_finite_scores", title="Non-finite scores"):
    """The model gave NaN or infinity for this request; such numbers are never sent."""

    default_detail = "The model gave scores that are not finite numbers."


def told(error: Exception) -> ServiceError:
    """Return the ServiceError to report for any exception."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, MemoryError):
        return EngineDown("There is not enough memory for this request now.", retry_after_seconds=1.0)
    return InternalError()


def error_class(code: str) -> type[ServiceError]:
    """Return the class with this code, or InternalError where there is none."""
    return next((kind for kind in ServiceError.__subclasses__() if kind.code == code), InternalError)


def general() -> list[type[ServiceError]]:
    """Return the errors that every ranking endpoint may answer with."""
    return [kind for kind in ServiceError.__subclasses__() if kind.is_general]


def _summary(problems: Sequence[FieldProblem], found: int) -> str:
    if not problems:
        return InvalidRequest.default_detail
    field, message = problems[0]
    first = f"{field}: {message}" if field else message
    return first if found == 1 else f"{first} (and {found - 1} more)"
