"""What an endpoint may be declared with: what our routes would ignore is refused at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, BackgroundTasks, Cookie, Depends, Header, Query, Response, WebSocket
from fastapi.security import SecurityScopes
from starlette.requests import HTTPConnection, Request
from starlette.testclient import TestClient

from app.api.route import Route
from tests.support.asgi import served


async def told(request: Request) -> str:
    return request.headers["x-told"]


async def nested(told: Annotated[str, Depends(told)]) -> str:
    return told


async def part(place: str) -> str:
    return place


async def nothing() -> str:
    return ""


async def generated(request: Request) -> AsyncIterator[str]:
    yield "text"


async def with_query(number: int) -> Response: ...
async def with_query_of_a_name(name: Annotated[str, Query()]) -> Response: ...
async def with_header(name: Annotated[str, Header()]) -> Response: ...
async def with_cookie(name: Annotated[str, Cookie()]) -> Response: ...
async def with_body(item: dict[str, int]) -> Response: ...
async def with_tasks(tasks: BackgroundTasks) -> Response: ...
async def with_response(response: Response) -> Response: ...
async def with_connection(connection: HTTPConnection) -> Response: ...
async def with_websocket(websocket: WebSocket) -> Response: ...
async def with_scopes(scopes: SecurityScopes) -> Response: ...
async def with_dependency_on_path(text: Annotated[str, Depends(part)]) -> Response: ...
async def with_nested(text: Annotated[str, Depends(nested)]) -> Response: ...
async def with_dependency_on_nothing(text: Annotated[str, Depends(nothing)]) -> Response: ...
async def with_generator(text: Annotated[str, Depends(generated)]) -> Response: ...
async def with_dictionary() -> dict[str, int]: ...
async def with_number(place: int) -> Response: ...
def with_thread() -> Response: ...


REFUSED = [with_query, with_query_of_a_name, with_header, with_cookie, with_body, with_tasks, with_response, with_connection,
           with_websocket, with_scopes, with_dependency_on_path, with_nested, with_dependency_on_nothing, with_generator, with_dictionary,
           with_number, with_thread]  # fmt: skip


@pytest.mark.parametrize("endpoint", REFUSED, ids=lambda endpoint: endpoint.__name__)
def test_what_a_route_would_ignore_is_refused(endpoint: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="/path"):
        APIRouter(route_class=Route).post("/path/{place}")(endpoint)


def test_a_dependency_of_a_route_is_refused_alike() -> None:
    with pytest.raises(TypeError, match="/path"):
        APIRouter(route_class=Route).get("/path", dependencies=[Depends(nested)])(answer)


async def answer(request: Request, place: str, text: Annotated[str, Depends(told)]) -> Response:
    return Response(f"{place} {text} {request.url.query}")


def test_a_route_gives_path_request_and_dependencies() -> None:
    router = APIRouter(route_class=Route)
    router.get("/path/{place}")(answer)
    reply = TestClient(router).get("/path/here?a=b", headers={"x-told": "text"})
    assert reply.text == "here text a=b"


def test_overrides_of_dependencies_are_refused() -> None:
    with served() as (client, _), pytest.raises(TypeError):
        client.app.dependency_overrides[told] = nested  # type: ignore[attr-defined]


def test_every_endpoint_is_called_by_our_route() -> None:
    with served() as (client, _):
        routes = [route for route in client.app.routes if hasattr(route, "endpoint")]  # type: ignore[attr-defined]
        assert routes
        assert all(isinstance(route, Route) for route in routes)
