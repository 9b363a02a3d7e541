"""The fuzzer: it finds nothing in the application, and it does find what is planted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.assembly import create_grpc_server
from app.http.application import create_app
from app.http.grpc_server import ROUTES
from app.request import protobuf
from app.settings import Grpc, Logs, Settings
from loadtest.fuzz.calls import MARK, Answer, Call, complaint
from loadtest.fuzz.mutate import Mutator
from loadtest.fuzz.run import SHARES, Tally, fuzz, series_by_route, sources
from loadtest.fuzz.wires import GrpcBridge
from loadtest.soak.fake_engine import FakeEngine
from tests.app.fakes import running

SETTINGS = Settings(logs=Logs(success_sample=0), grpc=Grpc(port=0))
Plant = Callable[[ASGIApp], ASGIApp]


def run(requests: int, plant: Plant = lambda app: app, only: str | None = None) -> Tally:
    """Fuzz the application around a fake engine, with something planted in front of it."""

    async def main() -> Tally:
        async with running(FakeEngine()) as service:
            app = create_app(SETTINGS, service)
            server = create_grpc_server(app, SETTINGS)
            await server.start()
            bridge = GrpcBridge(app, f"127.0.0.1:{server.port}")
            calls = sources(app.openapi(), 1, service.model.manifest)
            calls = calls if only is None else {only: calls[only]}
            render = service.metrics.render
            tally = await fuzz(plant(bridge), calls, lambda: series_by_route(render()), requests=requests, seconds=60)
            await bridge.close()
            await server.stop(1.0)
            return tally

    return asyncio.run(main())


def changing(change: Callable[[Message], Message]) -> Plant:
    """Replies are not what the application said."""

    def plant(app: ASGIApp) -> ASGIApp:
        async def planted(scope: Scope, receive: Receive, send: Send) -> None:
            async def corrupted(message: Message) -> None:
                await send(change(message))

            await app(scope, receive, corrupted)

        return planted

    return plant


def failing(app: ASGIApp) -> ASGIApp:
    """Raises for each tenth request."""
    count = 0

    async def planted(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal count
        count += 1
        if count % 10 == 0:
            raise KeyError("planted")
        await app(scope, receive, send)

    return planted


def test_nothing_is_found() -> None:
    tally = run(2000)
    assert [row.ok for row in tally.rows()] == [True, True, True], tally.failures
    assert set(tally.sent) == set(SHARES)
    assert {200, 400, 404, 413, 415, 422} <= set(tally.statuses)  # it reaches every corner, the good one too
    assert tally.statuses[429] < 100  # bodies that are refused unread show nothing


def rewriting(old: bytes, new: bytes) -> Plant:
    """These bytes of every body are others."""
    return changing(
        lambda message: message | {"body": message["body"].replace(old, new)} if "body" in message else message
    )


PLANTS: dict[str, Plant] = {
    "raised KeyError": failing,
    "status 500": changing(lambda message: message | {"status": 500} if message.get("status") == 422 else message),
    "an error that shows the input": rewriting(b'"detail":"', b'"detail":"' + MARK.encode()),
    "scores that are null": rewriting(b'"score":', b'"score":null,"s":'),
    "scores that are no JSON": rewriting(b'"score":', b'"score":NaN,"s":'),
    "a long error": rewriting(b'"detail":"', b'"detail":"' + b" " * 5000),
}


@pytest.mark.parametrize(("plant", "found"), [(plant, found) for found, plant in PLANTS.items()], ids=list(PLANTS))
def test_what_is_planted_is_found(plant: Plant, found: str) -> None:
    tally = run(400, plant, only="mutations")
    assert tally.failed[found] > 0
    assert not tally.rows()[0].ok
    assert tally.failures


def longer_data(message: Message) -> Message:
    """Binary replies have some bytes more."""
    return (
        message | {"body": message["body"] + bytes(4)} if b'"binary_data_size"' in message.get("body", b"") else message
    )


WIRE_PLANTS: dict[str, Plant] = {
    "data that no tensor has": changing(longer_data),
    "tensors of other numbers than their shapes say": rewriting(b'"datatype":"FP64"', b'"datatype":"FP32"'),
    "scores that are no tensors": rewriting(b'"outputs":', b'"zutputs":'),
    "an error that shows the input": rewriting(b'"detail":"', b'"detail":"' + MARK.encode()),
    "raised KeyError": failing,
}


@pytest.mark.parametrize(
    ("plant", "found"), [(plant, found) for found, plant in WIRE_PLANTS.items()], ids=list(WIRE_PLANTS)
)
def test_what_is_planted_on_the_other_wires_is_found(plant: Plant, found: str) -> None:
    assert run(600, plant, only="wires").failed[found] > 0


def test_a_message_with_odd_numbers_is_found() -> None:
    reply = protobuf.CLASSES["ModelInferResponse"]()
    reply.outputs.add(name="score", datatype="FP64", shape=[2])
    for data, complained in (([1.0, 2.0], False), ([1.0, np.nan], True), ([1.0], True)):
        del reply.raw_output_contents[:]
        reply.raw_output_contents.append(np.array(data).tobytes())
        headers = {b"content-type": b"application/grpc", b"x-request-id": b"x"}
        assert bool(complaint(Answer(200, headers, reply.SerializeToString()))) == complained


def test_each_wire_is_reached_with_good_requests_and_bad_ones() -> None:
    seen: set[tuple[str, bytes]] = set()

    def watching(app: ASGIApp) -> ASGIApp:
        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            async def noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    seen.add((scope["path"], dict(message["headers"])[b"content-type"]))
                await send(message)

            await app(scope, receive, noted)

        return watched

    assert run(1500, watching, only="wires").rows()[0].ok
    assert seen >= {
        ("/rank", b"application/json"), ("/rank", b"application/octet-stream"), ("/rank", b"application/problem+json"),
        ("/v2/models/fake/infer", b"application/json"), ("/v2/models/fake/infer", b"application/octet-stream"),
        ("/v2/models/fake/infer", b"application/problem+json"),
        (ROUTES[-1], b"application/grpc"), (ROUTES[-1], b"application/problem+json"),
    }  # fmt: skip


def test_series_that_grow_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Everything:
        def __contains__(self, path: str) -> bool:
            return True

    monkeypatch.setattr("app.http.observe.frozenset", lambda routes: Everything(), raising=False)
    monkeypatch.setattr("loadtest.fuzz.run.WARM_UP_CALLS", 100)
    assert run(600, only="paths").new_series > 100


def test_a_seed_repeats_its_calls() -> None:
    corpus = [b'{"user_id":1,"history":[],"candidates":[{"post_id":1,"author_id":2}]}']
    first, second, other = (Mutator(seed, corpus) for seed in (3, 3, 4))
    calls: list[list[Call]] = [[mutator.call() for _ in range(200)] for mutator in (first, second, other)]
    assert calls[0] == calls[1]
    assert calls[0] != calls[2]


def test_the_corpus_is_good() -> None:
    tally: Any = run(200, only="mutations")
    assert tally.statuses[200] > 10
