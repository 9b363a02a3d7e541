"""What can go wrong with a request, as typed exceptions that carry their HTTP status and stable code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import msgspec

MAX_RETRY_AFTER_SECONDS = 3600


class FieldProblem(NamedTuple):
    """One thing that is wrong with a request. `field` is a path such as `candidates[3].post_id`, empty for the whole body."""

    field: str
    message: str


class ServiceError(Exception):
    """A request that gets no scores. `detail` is a sentence for people and holds nothing that the caller sent.

    `status`, `code` and `title` belong to the class, so that a code always means one status; the title follows from the code unless the
    class has another one. `retry_after_seconds` is a guess of when a retry can succeed, None where a retry is pointless.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"
    title: ClassVar[str] = "Internal error"
    default_detail: ClassVar[str] = "The server failed to answer this request."
    headers: Mapping[str, str] = {}
    problems: tuple[FieldProblem, ...] = ()

    def __init_subclass__(cls, status: int | None = None, code: str | None = None, title: str | None = None) -> None:
        if status is not None and code is not None:
            cls.status, cls.code = status, code
            cls.title = title or code.replace("_", " ").capitalize()

    def __init__(self, detail: str | None = None, *, retry_after_seconds: float | None = None) -> None:
        self.detail = self.default_detail if detail is None else detail
        self.retry_after_seconds = retry_after_seconds
        super().__init__(self.detail)

    @property
    def retry_after(self) -> int | None:
        """Whole seconds for the Retry-After header, at least one; None where a retry is pointless."""
        if self.retry_after_seconds is None:
            return None
        return min(MAX_RETRY_AFTER_SECONDS, max(1, math.ceil(self.retry_after_seconds)))

    def problem(self, request_id: str | None = None) -> dict[str, Any]:
        """The problem object (RFC 9457); nothing in it comes from the request's body."""
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
    """The body is not one JSON document in UTF-8."""

    default_detail = "The body is not valid JSON."


class BadRequest(ServiceError, status=400, code="bad_request"):
    """The request cannot be read at all, for example because its body is marked as gzip but is not."""

    default_detail = "The request cannot be read."


class Unauthorized(ServiceError, status=401, code="unauthorized"):
    """The service requires an API key, and the request has no valid one."""

    default_detail = "A valid API key is required: Authorization: Bearer KEY, or X-API-Key: KEY."
    headers: Mapping[str, str] = {"WWW-Authenticate": "Bearer"}


class NotFound(ServiceError, status=404, code="not_found"):
    """There is nothing at this path."""

    default_detail = "There is nothing at this path."


class ModelNotFound(NotFound):
    """No model of this name or version serves here."""

    default_detail = "No such model serves here."


class NoCorpus(ServiceError, status=404, code="no_corpus"):
    """Nothing can be retrieved: this process has no retrieval model and corpus, and asking again does not change that."""

    default_detail = "This process serves no corpus: set retrieval.checkpoint and retrieval.corpus."


class MethodNotAllowed(ServiceError, status=405, code="method_not_allowed"):
    """The path exists, the method does not."""

    default_detail = "This path does not take this method."


class ChangedByFeed(ServiceError, status=409, code="changed_by_feed"):
    """Only the feed may change the posts of this process; otherwise replicas would differ."""

    default_detail = (
        "Posts change only through the feed in retrieval.feed: send the change there, and every replica applies it."
    )


class ReloadBusy(ServiceError, status=409, code="reload_in_progress"):
    """Another checkpoint is being loaded."""

    default_detail = "Another checkpoint is being loaded."


class ContextUnknown(ServiceError, status=412, code="context_unknown"):
    """The handle is not in this cache for this API key. Send the whole request, with user and history."""

    default_detail = "This handle is unknown or has expired: send the user and the history."


class TooLarge(ServiceError, status=413, code="too_large"):
    """More bytes, candidates or requests than the limits allow."""

    default_detail = "The request is larger than the limits allow."


class TargetTooLong(ServiceError, status=414, code="target_too_long", title="Path and query too long"):
    """The path and the query are longer than any endpoint needs."""

    default_detail = "The path and the query are longer than any endpoint needs."


class UnsupportedMediaType(ServiceError, status=415, code="unsupported_media_type"):
    """The body has a media type, charset or compression that this endpoint does not take."""

    default_detail = "This path does not take the body's media type: send application/json in UTF-8, for example."


class UnsupportedCoding(UnsupportedMediaType):
    """The body has an unsupported content coding. Only this 415 has the header that lists the supported ones."""

    default_detail = "The body may be compressed with gzip only."
    headers: Mapping[str, str] = {"Accept-Encoding": "gzip"}


class InvalidRequest(ServiceError, status=422, code="invalid_request"):
    """The body is valid JSON but not a valid request; `errors` has the first field that is wrong."""

    default_detail = "The request is not valid."

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.problems = (FieldProblem(field, message),)


class ReloadRefused(ServiceError, status=422, code="checkpoint_refused"):
    """The checkpoint was refused; the old one keeps serving."""


class Overloaded(ServiceError, status=429, code="overloaded"):
    """The queue is full, or a key has used up its share of it; or too many explanations, changes of posts or body bytes are under way."""

    default_detail = "The queue is full."


class NonFiniteScores(ServiceError, status=500, code="non_finite_scores", title="Non-finite scores"):
    """The model gave NaN or infinity for this request; such numbers are never sent."""

    default_detail = "The model gave scores that are not finite numbers."


class NotReady(ServiceError, status=503, code="not_ready"):
    """No checkpoint can serve yet."""

    default_detail = "The service is starting."


class Draining(ServiceError, status=503, code="draining"):
    """The process is about to stop and takes no new request."""

    default_detail = "The service is shutting down."


class EngineDown(ServiceError, status=503, code="engine_down"):
    """The engine failed or stopped making progress."""

    default_detail = "The engine cannot compute scores."


class ChangeNotStored(ServiceError, status=503, code="not_stored"):
    """A change of posts, or a corpus with its changes, could not be written to disk. Nothing was changed."""


class CorpusNotLoaded(ServiceError, status=503, code="corpus_not_loaded"):
    """Nothing can be retrieved now: the corpus is being loaded or was replaced."""

    default_detail = "The corpus is being loaded."


class CorpusBehind(ServiceError, status=503, code="corpus_behind"):
    """The corpus of this process does not have the change yet that the request asks for."""

    default_detail = "This process has not yet applied the change that X-Corpus-At-Least names."


class LogLost(ServiceError, status=503, code="log_lost", title="Log of changes lost"):
    """The log of changes was removed, cut or replaced while the process served it. Nothing was changed."""


class DeadlineExceeded(ServiceError, status=504, code="deadline_exceeded"):
    """The deadline passed before the scores were computed."""

    default_detail = "The deadline passed before the scores were computed."


class StorageFull(ServiceError, status=507, code="storage_full", title="Insufficient storage"):
    """The disk or the quota is full, or the file system is read-only: nothing was changed."""


def service_error_of(error: Exception) -> ServiceError:
    """Return the ServiceError to report for any exception. What a library says is not repeated: it may quote the caller."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, msgspec.ValidationError):
        return InvalidRequest("", InvalidRequest.default_detail)
    if isinstance(error, msgspec.DecodeError):
        return MalformedJson()
    if isinstance(error, MemoryError):
        return EngineDown("There is not enough memory for this request now.", retry_after_seconds=1.0)
    return InternalError()


def error_class(code: str) -> type[ServiceError]:
    """Return the class with this code, or InternalError where there is none."""
    return next((kind for kind in ServiceError.__subclasses__() if kind.code == code), InternalError)
