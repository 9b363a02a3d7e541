"""Errors → `application/problem+json` replies (RFC 9457). Not for deciding what is an error: that is `errors`."""

from __future__ import annotations

import math
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from app.errors import BadRequest, InternalError, NotFound, RequestMethod, ServiceError, TooLarge
from app.telemetry.exchange import Exchange

MEDIA_TYPE = "application/problem+json"
MAX_RETRY_AFTER_SECONDS = 3600


def retry_after(error: ServiceError) -> int | None:
    """Whole seconds, at least one, after which a retry can succeed; None where it cannot."""
    if error.retry_after_seconds is None:
        return None
    return min(MAX_RETRY_AFTER_SECONDS, max(1, math.ceil(error.retry_after_seconds)))


def problem_reply(error: ServiceError, exchange: Exchange) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body of the reply to a request that failed."""
    headers = [(b"content-type", MEDIA_TYPE.encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    if (seconds := retry_after(error)) is not None:
        headers.append((b"retry-after", b"%d" % seconds))
    problem = error.problem(exchange.request_id)
    if exchange.route.startswith("/v2"):
        problem["error"] = error.detail  # clients of that protocol look here
    return error.status, headers, orjson.dumps(problem)


async def on_service_error(request: Request, error: Exception) -> Response:
    """Handler for the errors that endpoints raise."""
    assert isinstance(error, ServiceError)
    exchange: Exchange = request.scope["state"]["exchange"]
    exchange.code = error.code
    status, headers, body = problem_reply(error, exchange)
    response = Response(body, status)
    response.raw_headers.extend(headers)
    return response


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Handler for the framework's own, such as an unknown path or a wrong method, whose details may hold parts of the request."""
    assert isinstance(error, HTTPException)
    kinds: dict[int, type[ServiceError]] = {404: NotFound, 405: RequestMethod, 413: TooLarge}
    other = BadRequest if 400 <= error.status_code < 500 else InternalError
    response = await on_service_error(request, kinds.get(error.status_code, other)())
    for name, value in (error.headers or {}).items():
        response.headers[name] = "GET, HEAD" if (name, value) == ("Allow", "GET") else value  # see HeadAsGet
    return response


HANDLERS: dict[Any, Any] = {ServiceError: on_service_error, HTTPException: on_http_exception}
