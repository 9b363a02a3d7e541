"""Errors → `application/problem+json` replies (RFC 9457). Not for deciding what is an error: that is `errors`."""

from __future__ import annotations

import math
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from app.errors import BadRequest, InternalError, NotFound, RequestMethod, ServiceError, TooLarge
from app.http.asgi import exchange_of

MEDIA_TYPE = "application/problem+json"
MAX_RETRY_AFTER_SECONDS = 3600


def problem_response(error: ServiceError, request_id: str) -> Response:
    """The reply to a request that failed, with the error's own headers and Retry-After in whole seconds, at least one."""
    headers = {name.lower(): value for name, value in error.headers.items()}
    if error.retry_after_seconds is not None:
        seconds = min(MAX_RETRY_AFTER_SECONDS, max(1, math.ceil(error.retry_after_seconds)))
        headers["retry-after"] = str(seconds)
    return Response(orjson.dumps(error.problem(request_id)), error.status, headers, MEDIA_TYPE)


async def on_service_error(request: Request, error: Exception) -> Response:
    """Handler for the errors that endpoints raise."""
    assert isinstance(error, ServiceError)
    exchange = exchange_of(request.scope)
    exchange.code = error.code
    return problem_response(error, exchange.request_id)


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
