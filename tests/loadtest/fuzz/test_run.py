"""The fuzzer: it finds nothing in the application, and it does find what is planted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http.application import create_app
from app.settings import Logs, Settings
from loadtest.fuzz.calls import MARK, Call
from loadtest.fuzz.mutate import Mutator
from loadtest.fuzz.run import SHARES, Tally, fuzz, series_by_route, sources
from loadtest.soak.fake_engine import FakeEngine
from tests.app.fakes import running

SETTINGS = Settings(logs=Logs(success_sample=0))
Plant = Callable[[ASGIApp], ASGIApp]


def run(requests: int, plant: Plant = lambda app: app, only: str | None = None) -> Tally:
    """Fuzz the application around a fake engine, with something planted in front of it."""

    async def main() -> Tally:
        async with running(FakeEngine()) as service:
            app = create_app(SETTINGS, service)
            calls = sources(app.openapi(), seed=1)
            calls = calls if only is None else {only: calls[only]}
            render = service.metrics.render
            return await fuzz(plant(app), calls, lambda: series_by_route(render()), requests=requests, seconds=60)

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
