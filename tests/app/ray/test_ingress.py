"""The ingress around real replicas in this process: what it passes on, what it asks again, and what it answers itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request

from app.ray.ingress import Asked, Ingress, Reply, labelled, with_time
from app.settings import Deadline, Limits, Queue, Settings
from tests.app.fakes import run, until
from tests.app.ray.planted import HANG, Planted
from tests.app.serving import good

pytestmark = pytest.mark.anyio


class Lost(Exception):
    """What a handle raises where the replica is gone."""


class Handle:
    """Calls in place of Ray's handle: each goes to the next of `ends`, the last of which takes all further ones."""

    def __init__(self, *ends: Callable[[Asked], Awaitable[Reply]]) -> None:
        self.ends = list(ends)
        self.sessions: list[str] = []
        self.asked: list[Asked] = []

    def options(self, *, session_id: str) -> Any:
        self.sessions.append(session_id)
        return self

    @property
    def answer(self) -> Any:
        return self

    def broadcast(self, method: str) -> Any:
        raise Lost

    def remote(self, asked: Asked) -> Awaitable[Reply]:
        self.asked.append(asked)
        return (self.ends.pop(0) if len(self.ends) > 1 else self.ends[0])(asked)


async def gone(asked: Asked) -> Reply:
    raise Lost


async def broken(asked: Asked) -> Reply:
    raise ZeroDivisionError("secret")


async def silent(asked: Asked) -> Reply:
    await asyncio.sleep(3600)
    raise AssertionError


@asynccontextmanager
async def planted(settings: Settings | None = None) -> AsyncIterator[Planted]:
    replica = Planted(settings or Settings())
    await replica.reconfigure({})
    try:
        yield replica
    finally:
        await replica.end()


async def ask(
    handle: Handle,
    body: Any,
    settings: Settings | None = None,
    method: str = "POST",
    path: str = "/rank",
    **headers: str,
) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body of the reply to one request through an ingress."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {"content-type": "application/json", "content-length": str(len(data))} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    chunks = [data[i : i + 1000] for i in range(0, len(data), 1000)] or [b""]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": chunks.pop(0), "more_body": bool(chunks)}

    raw = [(name.encode(), value.encode()) for name, value in named.items()]
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": raw}
    response = await Ingress(handle, settings or Settings(), (Lost,))(Request(scope, receive))
    assert response.headers["content-length"] == str(len(response.body))
    assert "x-request-id" not in response.headers  # Ray Serve's proxy adds it
    return response.status_code, dict(response.headers), json.loads(bytes(response.body))


def asking(*ends: Any, **more: Any) -> tuple[int, dict[str, str], Any, Handle]:
    """The same with handles of its own, on a fresh loop; `...` among the ends is a real replica."""

    async def main() -> Any:
        async with planted(more.get("settings")) as replica:
            handle = Handle(*(replica.answer if end is ... else end for end in ends))
            return *(await ask(handle, **{"body": good()} | more)), handle

    return run(main())  # type: ignore[no-any-return]


def test_a_reply_is_the_replicas_own_and_goes_by_the_key() -> None:
    status, headers, body, handle = asking(..., x_routing_key="k7", x_request_id="mine")
    assert (status, body["request_id"]) == (200, "page-7")
    assert len(body["candidates"]) == 3
    assert headers["x-model-version"] == "v1"
    assert handle.sessions == ["k7"]
    assert asking(...)[3].sessions == [""]  # without a key Ray Serve draws one


SMALL = Settings(limits=Limits(max_body_bytes=1024))


@pytest.mark.parametrize(
    ("more", "status", "code"),
    [
        ({"body": b"{"}, 400, "malformed_json"),
        ({"body": good(user_id=-1)}, 422, "invalid_request"),
        ({"path": "/nothing"}, 404, "not_found"),
        ({"path": "/rank?"}, 404, "not_found"),  # sent as /rank%3F
        ({"path": "/%72ank"}, 404, "not_found"),  # sent as /%2572ank
        ({"path": "/metrics\n", "method": "GET"}, 404, "not_found"),
        ({"content_type": "text/plain"}, 415, "unsupported_media_type"),
        ({"x_request_timeout_ms": "soon"}, 422, "invalid_request"),
        ({"x_request_timeout_ms": "9" * 13}, 422, "invalid_request"),
        ({"settings": SMALL, "body": b" " * 1025}, 413, "too_large"),
        ({"settings": SMALL, "body": b" " * 5000, "content_length": "0"}, 413, "too_large"),
    ],
)
def test_refusals_are_the_replicas(more: dict[str, Any], status: int, code: str) -> None:
    got, headers, body, _ = asking(..., **more)
    assert (got, body["code"], headers["content-type"]) == (status, code, "application/problem+json")


def test_of_a_body_that_is_too_long_no_more_is_passed_on_than_shows_it() -> None:
    assert asking(..., settings=SMALL, body=b" " * 5000)[3].asked[0].body == b""
    assert len(asking(..., settings=SMALL, body=b" " * 5000, content_length="0")[3].asked[0].body) == 1025


async def test_a_full_queue_is_429_with_the_time_to_come_back() -> None:
    async with planted(Settings(queue=Queue(max_requests=1), deadline=Deadline(default_seconds=0.3))) as replica:
        handle = Handle(replica.answer)
        first = asyncio.ensure_future(ask(handle, good(user_id=HANG), replica.settings))
        await until(lambda: replica.service.admission.requests == 1)
        status, headers, body = await ask(handle, good(), replica.settings)
        assert (status, body["code"]) == (429, "overloaded")
        assert int(headers["retry-after"]) >= 1
        assert (await first)[0] == 504  # the replica's own, at its deadline


def test_a_lost_replica_is_asked_again_elsewhere_once() -> None:
    status, _, body, handle = asking(gone, ...)
    assert (status, len(handle.asked)) == (200, 2)
    assert body["request_id"] == "page-7"
    status, headers, body, handle = asking(gone)
    assert (status, body["code"], headers["retry-after"], len(handle.asked)) == (503, "engine_down", "1", 2)


def test_metrics_without_a_replica_are_503() -> None:
    """As while the only one is replaced."""

    async def main() -> Any:
        return await ask(Handle(gone), b"", method="GET", path="/metrics")

    status, headers, body = run(main())
    assert (status, body["code"], headers["retry-after"]) == (503, "engine_down", "1")


@pytest.mark.parametrize(("end", "status", "code"), [(broken, 500, "internal"), (silent, 504, "deadline_exceeded")])
def test_a_fault_says_nothing_of_itself_and_who_is_silent_is_given_up(end: Any, status: int, code: str) -> None:
    got, _, body, handle = asking(end, x_request_timeout_ms="20")
    assert (got, body["code"], len(handle.asked)) == (status, code, 1)
    assert "secret" not in json.dumps(body)


def test_the_time_that_is_left_is_passed_on() -> None:
    handle = asking(gone, ..., x_request_timeout_ms="5000")[3]
    first, second = (int(dict(asked.headers)[b"x-request-timeout-ms"]) for asked in handle.asked)
    assert 0 < second <= first < 5000
    asked = Asked("GET", "/info", b"", [(b"a", b"b")], b"")
    assert with_time(asked, 1) is asked  # its caller has set none


async def test_a_client_that_disconnects_frees_its_place() -> None:
    async with planted() as replica:
        asked = asyncio.ensure_future(ask(Handle(replica.answer), good(user_id=HANG)))
        await until(lambda: replica.service.admission.requests == 1)
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked
        await until(lambda: replica.service.admission.requests == 0)
        counted = b'ranker_http_requests_total{code="499",method="POST",route="/rank"} 1.0'
        assert counted in (await replica.exposition())[1]


def test_metrics_of_all_replicas_are_one_exposition() -> None:
    async def main() -> bytes:
        async with planted() as replica:
            await ask(Handle(replica.answer), good())
            return (await replica.exposition())[1]

    text = run(main())
    merged = labelled([("a:1", text), ("b:2", text)]).decode()
    families = {family.name: family for family in text_string_to_metric_families(merged)}
    alone = {family.name: family for family in text_string_to_metric_families(text.decode())}
    assert families.keys() == alone.keys()
    for name, family in alone.items():
        assert families[name].type == family.type
        for replica in ("a:1", "b:2"):
            own = [each for each in families[name].samples if each.labels["replica"] == replica]
            assert [(each.name, each.value) for each in own] == [(each.name, each.value) for each in family.samples]
    assert merged.count("# TYPE ranker_http_requests_total counter") == 1
