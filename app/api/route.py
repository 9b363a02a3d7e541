"""How the endpoints of every port are called: with the request, the texts in its path, and what dependencies make of the request."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import Any, get_type_hints

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.caller import CANCELS, CallerGone
from app.replies import JSON

UNSUPPORTED = {
    "query_params": "a query parameter",
    "header_params": "a header parameter",
    "cookie_params": "a cookie parameter",
    "body_params": "a body parameter",
    "http_connection_param_name": "an HTTPConnection",
    "websocket_param_name": "a WebSocket",
    "background_tasks_param_name": "BackgroundTasks",
    "response_param_name": "a Response",
    "security_scopes_param_name": "SecurityScopes",
}
"""What FastAPI lets a function take and this route does not, by the attribute of `Dependant` that has it."""
JSON_TYPE = b"content-type", JSON.encode()


class JsonReply(Response):
    """A reply with status 200 and JSON as its body, made without Starlette's steps for other contents and for headers that it may lack.

    `headers` are few, and their names are always the same.
    """

    def __init__(self, body: bytes, headers: Mapping[str, str]) -> None:
        self.status_code, self.background, self.body = 200, None, body
        fields = [(_field_name(name), value.encode("latin-1")) for name, value in headers.items()]
        self.raw_headers = [*fields, (b"content-length", b"%d" % len(body)), JSON_TYPE]


@lru_cache(64)
def _field_name(name: str) -> bytes:
    return name.lower().encode("latin-1")


class Route(APIRoute):
    """A route without FastAPI's solver of dependencies, which parses the query and the cookies of every request: 30 kB of either took
    fifty times as long as the rest of a request.

    An endpoint is a coroutine function that returns a Response. It takes the request, texts of its path, and dependencies: coroutine
    functions that take the request alone. Raises TypeError where an endpoint is declared with anything else, which would be ignored.

    An endpoint whose body a dependency has read is cancelled when the client disconnects, by this route where the server does not do so.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        _check(self.dependant, path)
        for dependency in self.dependant.dependencies:
            _check(dependency, path)
            if dependency.dependencies or dependency.path_params or dependency.request_param_name is None:
                raise TypeError(f"{path}: {_name(dependency)} must take the request alone")
        for field in self.dependant.path_params:
            if field.field_info.annotation is not str:
                raise TypeError(f"{path}: {field.name} must be a str")
        returned = get_type_hints(endpoint).get("return")
        if not (isinstance(returned, type) and issubclass(returned, Response)):
            raise TypeError(f"{path}: {_name(self.dependant)} must say that it returns a Response")
        self.app = _answering(self.dependant, endpoint)


def _check(function: Dependant, path: str) -> None:
    """Raise TypeError unless it is a coroutine function that takes nothing which this route does not support."""
    if not inspect.iscoroutinefunction(function.call):
        raise TypeError(f"{path}: {_name(function)} must be a coroutine function")
    for attribute, what in UNSUPPORTED.items():
        if getattr(function, attribute):
            raise TypeError(f"{path}: {_name(function)} may not take {what}; this route would ignore it")


def _name(function: Dependant) -> str:
    return getattr(function.call, "__name__", repr(function.call))


def _answering(dependant: Dependant, endpoint: Callable[..., Awaitable[Response]]) -> ASGIApp:
    dependencies = [(dependency.name, dependency.call) for dependency in dependant.dependencies]
    texts = [field.name for field in dependant.path_params]
    request_name = dependant.request_param_name

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        arguments: dict[str, Any] = {name: scope["path_params"][name] for name in texts}
        if request_name is not None:
            arguments[request_name] = request
        for name, call in dependencies:
            value = await call(request)  # type: ignore[misc]
            if name is not None:
                arguments[name] = value
        work = endpoint(**arguments)
        response = await (_until_gone(work, receive) if _must_watch(scope) else work)
        await response(scope, receive, send)

    return app


def _must_watch(scope: Scope) -> bool:
    """Whether the body has been read, and the server does not cancel the request by itself when its client has gone."""
    exchange = scope.get("exchange")
    return exchange is not None and exchange.is_read and CANCELS not in scope.get("extensions", ())


async def _until_gone(work: Awaitable[Response], receive: Receive) -> Response:
    """The endpoint's response. Raises CallerGone, and cancels the endpoint, when the client disconnects."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise CallerGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
