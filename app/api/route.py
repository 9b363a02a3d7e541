"""How the endpoints of every port are called: with the request, the texts in its path, and what dependencies make of the request."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, get_type_hints

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

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


class Route(APIRoute):
    """A route without FastAPI's solver of dependencies, which parses the query and the cookies of every request: 30 kB of either took
    fifty times as long as the rest of a request.

    An endpoint is a coroutine function that returns a Response. It takes the request, texts of its path, and dependencies: coroutine
    functions that take the request. Raises TypeError where an endpoint is declared with anything else, which would be ignored.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        _check(self.dependant, path)
        for dependency in self.dependant.dependencies:
            _check(dependency, path)
            if dependency.dependencies or dependency.path_params:
                raise TypeError(f"{path}: {_name(dependency)} may take the request alone")
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
    dependencies = [
        (dependency.name, dependency.call, dependency.request_param_name) for dependency in dependant.dependencies
    ]
    texts = [field.name for field in dependant.path_params]
    request_name = dependant.request_param_name

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        arguments: dict[str, Any] = {name: scope["path_params"][name] for name in texts}
        if request_name is not None:
            arguments[request_name] = request
        for name, call, takes_request in dependencies:
            value = await call(**({} if takes_request is None else {takes_request: request}))  # type: ignore[misc]
            if name is not None:
                arguments[name] = value
        response = await endpoint(**arguments)
        await response(scope, receive, send)

    return app
