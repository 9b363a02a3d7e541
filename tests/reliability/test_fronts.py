"""P1 to P3, and F3 and F5 with several fronts: processes that are killed or stopped, drains, and true sums.

Limits in milliseconds are not asserted here, where others share the machine; `make soak` asserts them.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext

import httpx
import pytest

from loadtest.generate.http_client import Client
from loadtest.generate.payload import rank_request
from loadtest.servers.launch import HOST, Server
from loadtest.soak import endings, fronts
from loadtest.soak.servers import fake

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def few_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fronts, "CLIENTS", 6)


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Server, float]]:
    """A server that outlives what its tests kill, and when it was started."""
    with fake("--forward-ms=2", **fronts.LOGGED) as server:
        yield server, time.monotonic()


@pytest.fixture
def started(running: tuple[Server, float], monkeypatch: pytest.MonkeyPatch) -> float:
    """Have the soak test take that server."""
    monkeypatch.setattr(fronts, "fake", lambda *_, **__: nullcontext(running[0]))
    return running[1]


@pytest.mark.usefixtures("started")
def test_p1_a_killed_front_fails_its_own_requests_alone_and_leaves_no_place() -> None:
    own, retried = fronts.front_kills(1)
    assert own.ok, own
    assert not retried.failed


@pytest.mark.usefixtures("started")
def test_p1_is_red_when_the_requests_of_another_front_are_looked_at() -> None:
    assert fronts.front_kills(1, spared=True)[0].failed


@pytest.mark.usefixtures("started")
def test_p3_a_stopped_front_is_felt_by_no_other_and_it_is_red_when_it_is_killed() -> None:
    row, killed = fronts.stopped_front(1.0, (signal.SIGSTOP, signal.SIGKILL))
    assert not row.failed, row
    assert killed.failed


def test_p2_a_killed_engine_process_is_told_at_once_and_another_one_serves(started: float) -> None:
    left = fronts.ENGINE_LIVED_SECONDS - (time.monotonic() - started)
    [row] = fronts.engine_kills(1, lived_seconds=max(0.5, left))
    assert not row.failed, row


@pytest.mark.usefixtures("started")
def test_p2_is_red_when_no_other_one_comes() -> None:
    """The last one of this server: what has just been started anew is not started again."""
    assert fronts.engine_kills(1, serves_seconds=1.0, lived_seconds=0.5)[0].failed


def test_f3_sigterm_loses_nothing_with_fronts() -> None:
    row = endings.terminations(1, fronts=2)
    assert row.ok, row


def test_f5_a_stuck_engine_is_seen_answered_and_ended() -> None:
    row = endings.stuck(1, fronts=2, engine_loss="exit", queue__stall_seconds=1.0, queue__stall_exit_seconds=2.0)
    assert row.ok, row


async def asked(server: Server, count: int) -> list[int]:
    """Statuses of requests on many connections; every third asks what does not exist."""
    async with Client(HOST, server.port, max_connections=24) as client:
        missing = b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n"
        sent = [rank_request(number) if number % 3 else missing for number in range(1, count + 1)]
        return [reply.status for reply in await asyncio.gather(*(client.ask(each) for each in sent))]


def test_metrics_are_the_sums_of_all_processes_whichever_answers() -> None:
    with fake("--forward-ms=1", fronts=3, queue__max_wait_seconds=0) as server:
        statuses = asyncio.run(asked(server, 300))
        assert (statuses.count(200), statuses.count(404)) == (200, 100)
        ranked = 'ranker_http_requests_total{code="200",method="POST",route="/rank"} 200.0'
        missed = 'ranker_http_requests_total{code="404",method="GET",route="unmatched"} 100.0'
        timed = 'ranker_http_request_duration_seconds_count{method="POST",route="/rank"} 200.0'
        for _ in range(8):  # each on a connection of its own, hence from any front
            lines = httpx.get(f"{server.url}/metrics").text.splitlines()
            assert {ranked, missed, timed, 'ranker_stage_duration_seconds_count{stage="parse"} 200.0'} <= set(lines)
            assert 'ranker_stage_duration_seconds_count{stage="queue"} 200.0' in lines
            names = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
            assert len(names) == len(set(names))  # one series each
        assert server.metric("process_open_fds") > 30  # of four processes
