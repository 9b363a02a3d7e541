"""The client: what it sends, what it makes of replies, when it tries again. Replies are scripted, or the application's own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import orjson
import pytest

from app.client import (
    AsyncRankerClient,
    Candidate,
    DeadlineExceeded,
    Event,
    RankerClient,
    RankerError,
    Ranking,
    RankingRequest,
    RequestRefused,
    ServerFault,
    Unavailable,
)
from app.http.application import create_app
from app.settings import Settings
from tests.app.fakes import FakeEngine, running

CANDIDATES = [Candidate("90", 7, 1, 1779990000), Candidate(2**64 - 1, 5)]
HISTORY = [Event(17, 5, ["favorite"], 3, 12.5), Event(18, 6, {"reply": 0.5})]
GOOD = {
    "model": {"name": "m", "version": "v"},
    "actions": ["favorite"],
    "candidates": [{"post_id": 1, "score": 0.5, "rank": 1, "probabilities": [0.5], "continuous": {}, "new": 1}],
    "history_used": 0,
    "history_dropped": 0,
    "timings_ms": {},
}

Script = Iterator[httpx.Response | Exception]


def scripted(*replies: httpx.Response | Exception, **options: Any) -> tuple[RankerClient, list[httpx.Request]]:
    """A client whose service gives these replies in turn, and the requests that it saw."""
    seen: list[httpx.Request] = []
    script: Script = iter(replies)

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        reply = next(script)
        if isinstance(reply, Exception):
            raise reply
        return reply

    return RankerClient("http://test", http=httpx.Client(transport=httpx.MockTransport(handle)), **options), seen


def ok() -> httpx.Response:
    return httpx.Response(200, json=GOOD)


def refusal(status: int, code: str, retry_after: str | None = None) -> httpx.Response:
    headers = {} if retry_after is None else {"retry-after": retry_after}
    problem = {"status": status, "code": code, "detail": "why", "errors": [{"field": "user_id", "message": "bad"}]}
    return httpx.Response(status, json=problem, headers=headers | {"x-request-id": "theirs"})


def test_a_call_names_itself_and_its_deadline() -> None:
    client, seen = scripted(ok(), api_key="secret")
    ranking = client.rank(1, CANDIDATES, HISTORY, timeout_seconds=5, request_id="mine")
    assert isinstance(ranking, Ranking)
    assert seen[0].headers["x-request-id"] == "mine"
    assert 4000 < int(seen[0].headers["x-request-timeout-ms"]) <= 5000
    assert seen[0].headers["authorization"] == "Bearer secret"
    body = orjson.loads(seen[0].content)
    assert body["candidates"]["post_id"] == ["90", 2**64 - 1]
    assert body["history"]["actions"] == [["favorite"], {"reply": 0.5}]
    assert "weights" not in body


@pytest.mark.parametrize(
    "first", [refusal(429, "overloaded"), refusal(503, "not_ready"), httpx.ConnectError("no"), httpx.ReadError("cut")]
)
def test_a_refusal_for_want_of_room_is_tried_again(first: httpx.Response | Exception) -> None:
    client, seen = scripted(first, ok())
    assert client.rank(1, CANDIDATES, timeout_seconds=5).model_version == "v"
    assert len(seen) == 2
    assert len({request.headers["x-request-id"] for request in seen}) == 1
    deadlines = [int(request.headers["x-request-timeout-ms"]) for request in seen]
    assert deadlines[1] < deadlines[0]


def test_retry_after_is_honoured() -> None:
    client, seen = scripted(refusal(429, "overloaded", "1"), ok())
    started = time.monotonic()
    client.rank(1, CANDIDATES, timeout_seconds=5)
    assert 1.0 <= time.monotonic() - started < 2.0
    assert len(seen) == 2


def test_no_retry_that_the_deadline_forbids() -> None:
    client, seen = scripted(refusal(503, "draining", "30"), ok())
    started = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        client.rank(1, CANDIDATES, timeout_seconds=1)
    assert time.monotonic() - started < 0.5
    assert (caught.value.retry_after_seconds, caught.value.request_id, len(seen)) == (30.0, "theirs", 1)


def test_attempts_are_counted() -> None:
    client, seen = scripted(*[refusal(429, "overloaded")] * 9, attempts=4)
    with pytest.raises(Unavailable):
        client.rank(1, CANDIDATES, timeout_seconds=5)
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (refusal(422, "invalid_request", "1"), RequestRefused),
        (refusal(401, "unauthorized"), RequestRefused),
        (refusal(504, "deadline_exceeded"), DeadlineExceeded),
        (refusal(500, "non_finite_scores"), ServerFault),
        (httpx.Response(502, text="<html>"), ServerFault),
        (httpx.Response(200, text="<html>"), ServerFault),
        (httpx.ReadTimeout("slow"), DeadlineExceeded),
    ],
)
def test_other_failures_are_told_at_once(reply: httpx.Response | Exception, kind: type[RankerError]) -> None:
    client, seen = scripted(reply, ok())
    with pytest.raises(kind) as caught:
        client.rank(1, CANDIDATES, timeout_seconds=5)
    assert len(seen) == 1
    if isinstance(reply, httpx.Response) and reply.headers["content-type"] == "application/json":
        assert caught.value.errors == (("user_id", "bad"),)
        assert caught.value.code == reply.json()["code"]


def in_process(main: Callable[[AsyncRankerClient], Any]) -> Any:
    """Run with a client of the real application around a fake engine."""

    async def run() -> Any:
        async with running(FakeEngine()) as service:
            transport = httpx.ASGITransport(create_app(Settings(), service))
            async with AsyncRankerClient("http://test", http=httpx.AsyncClient(transport=transport)) as client:
                return await main(client)

    return asyncio.run(run())


def test_the_application_understands_it_and_it_the_application() -> None:
    async def main(client: AsyncRankerClient) -> None:
        ranking = await client.rank(
            7, CANDIDATES, HISTORY, weights={"favorite": 1}, actions_wanted=["reply"], impression_ts=1780000000, top_k=2
        )
        assert {candidate.post_id for candidate in ranking.candidates} == {"90", 2**64 - 1}
        assert [candidate.rank for candidate in ranking.candidates] == [1, 2]
        assert ranking.actions == ["reply"]
        assert (ranking.model_name, ranking.history_used) == ("fake", 2)
        assert set(ranking.candidates[0].continuous) == {"dwell_time"}
        with pytest.raises(RequestRefused) as caught:
            await client.rank(7, [])
        assert caught.value.errors == (("candidates", "must not be empty"),)
        results = await client.rank_batch([RankingRequest(7, CANDIDATES), RankingRequest(-7, CANDIDATES)])
        assert isinstance(results[0], Ranking)
        assert isinstance(results[1], RequestRefused)

    in_process(main)


def test_it_needs_nothing_of_the_server() -> None:
    code = "import app.client, sys; print([m for m in sys.modules if m.split('.')[0] in ('torch', 'fastapi', 'numpy', 'uvicorn')])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
