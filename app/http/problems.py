"""Errors → `application/problem+json` (RFC 9457). Not for deciding what is an error: that is `errors`."""

from __future__ import annotations

import math
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from app.errors import BadRequest, InternalError, NotFound, RequestMethod, ServiceError, TooLarge

MEDIA_TYPE = "application/problem+json"
MAX_RETRY_AFTER_SECONDS = 3600


def problem(error: ServiceError, request_id: str | None = None) -> dict[str, Any]:
    """The problem object of an error, at most 4 KiB as JSON; nothing in it comes from the request's body."""
    content: dict[str, Any] = {
        "type": f"urn:ranker:problem:{error.code}",
        "title": error.title,
        "status": error.status,
        "code": error.code,
        "detail": error.detail,
    }
    if error.problems:
        content["errors"] = [{"field": field, "message": message} for field, message in error.problems]
    if request_id is not None:
        content["request_id"] = request_id
    return content


def problem_headers(error: ServiceError) -> list[tuple[bytes, bytes]]:
    """Headers that belong to the error: whole seconds of Retry-After, at least one, and its own."""
    headers = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    if error.retry_after_seconds is not None:
        seconds = min(MAX_RETRY_AFTER_SECONDS, max(1, math.ceil(error.retry_after_seconds)))
        headers.append((b"retry-after", str(seconds).encode()))
    return headers


def problem_response(error: ServiceError, request_id: str | None = None) -> Response:
    """The reply to a request that failed."""
    body = orjson.dumps(problem(error, request_id))
    response = Response(body, status_code=error.status, media_type=MEDIA_TYPE)
    response.raw_headers.extend(problem_headers(error))
    return response


def from_http_exception(error: HTTPException) -> ServiceError:
    """What the framework raised, in our words: its own details may hold parts of the request."""
    kinds: dict[int, type[ServiceError]] = {404: NotFound, 405: RequestMethod, 413: TooLarge}
    if error.status_code in kinds:
        return kinds[error.status_code]()
    return BadRequest() if 400 <= error.status_code < 500 else InternalError()


async def on_service_error(request: Request, error: Exception) -> Response:
    """Handler for errors raised by plain endpoints."""
    assert isinstance(error, ServiceError)
    request.state.exchange.code = error.code
    return problem_response(error, request.state.exchange.request_id)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Handler for the framework's own: unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    response = await on_service_error(request, from_http_exception(error))
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response
