"""B15: no path lets one caller crowd out the others. Each path and gRPC method has a row in `loadtest.soak.attackers.ATTACKERS`."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress

import pytest

from app.assembly import build_server
from app.http.application import Application
from app.http.grpc_server import ROUTES
from app.settings import Admin, Grpc, Settings
from loadtest.soak.attackers import ATTACKERS, DEMO_EXPLAINED
from loadtest.soak.crowds import P50_TIMES, P99_TIMES, crowded, explained, unanswered
from loadtest.soak.fake_engine import FakeEngine
from tests.reliability.live import Live, live

pytestmark = pytest.mark.timeout(240)
WINDOW_SECONDS = 0.15
CLIENTS = 4
MOST_TIMES = 5  # the event loop's time for the median path that does not rank; the largest asset takes 2.7
RANKING = ("/context", "/rank", "/rank/{name}", "/rank/batch", "/explain", "/retrieve", "/recommend")


def unwalked(routes: Collection[str]) -> set[str]:
    return set(routes) - {attacker.route for attacker in ATTACKERS.values()}


def test_every_path_is_walked() -> None:
    server = build_server(Settings(admin=Admin(port=1, token_sha256="0" * 64), grpc=Grpc(port=2)))
    apps = [port.routes for port in server.ports]  # type: ignore[attr-defined]
    assert all(isinstance(app, Application) for app in apps)
    routes = {"unmatched", *(path for app in apps for path in (*app.recorder.routes, *app.endpoints))}
    [methods] = [other.recorder.routes for other in server.others]  # type: ignore[attr-defined]
    assert (len(routes) > 25, len(methods) > 5) == (True, True)
    routes |= methods
    assert unwalked(routes) == set()
    assert unwalked({*routes, "/new"}) == {"/new"}, "the control: a path without a row"


ALIKE = (  # one handler answers these: one window has clients of each
    ("GET /openapi.json", "HEAD /openapi.json"),
    ("/rank", "/rank of a model"),
    ("/retrieve", "/recommend"),
    ("infer", "infer by a version"),
    ("GET nothing", "GET an asset that is not there", "GET /rank", "POST /info"),
    ("GET /livez", "GET /readyz", "GET /startupz", "GET /v2/health/live", "GET /v2/health/ready"),
    ("GET a model", "GET a model's state", "GET a version", "GET a version's state"),
    ("a stranger at /admin/reload", "a stranger at /admin/posts", "a stranger at /admin/posts/compact"),
    *(
        tuple(method + told for method in ("ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata"))
        for told in ("", ", 16 at once")
    ),
)  # fmt: skip


def crowds() -> list[tuple[str, ...]]:
    """Four clients of each attacker or of those alike, then one of each beside two of others: what one does by itself is felt there."""
    names = list(ATTACKERS)
    alike = {name: each for each in ALIKE for name in each}
    same = dict.fromkeys(alike.get(name, (name,)) for name in names)
    four = [each if len(each) >= CLIENTS else (each * CLIENTS)[:CLIENTS] for each in same]
    mixed = -(-len(names) // 3)
    return [*four, *(tuple(names[first::mixed]) for first in range(mixed))]


def test_no_path_in_a_closed_loop_slows_a_ranker_down() -> None:
    wrong = []
    with crowded(high=90.0) as crowd:  # a window is too short for more; the long form has the 99th
        for names in crowds():
            found = crowd.measure(names, WINDOW_SECONDS)
            if found.p50 >= P50_TIMES or found.p99 >= P99_TIMES or found.refused:
                wrong.append((names, found))
            elif failed := unanswered(found.answered):
                wrong.append((f"{failed} attacked nothing", found))
    assert not wrong


def test_it_is_red_where_nothing_is_kept_and_nobody_rests() -> None:
    """Even where one client asks for a page that shows it, beside two who ask for others."""
    *_, mixed = (each for each in crowds() if "GET /openapi.json" in each)
    assert len(set(mixed)) == 3
    with crowded("--nothing-kept", "--no-rest", high=90.0) as found:
        assert found.measure(mixed, WINDOW_SECONDS).p50 > 2 * P50_TIMES


def test_impatient_explainers_take_no_ranking_from_others() -> None:
    with explained() as found:
        seen = found.measure([DEMO_EXPLAINED] * CLIENTS, 3.0)
    assert seen.tried >= 156
    assert (seen.refused, seen.p50 < P50_TIMES) == (0, True), seen
    assert seen.answered[DEMO_EXPLAINED][200] > 0
    assert seen.answered[DEMO_EXPLAINED][429] > 0


def loop_seconds(server: Live, name: str, requests: int = 60) -> float:
    """Processor time of the event loop for one request, without those in which something is made that is kept."""
    seen: Counter[int] = Counter()
    ports = {"main": server.port, "admin": server.port}

    async def read() -> float:
        return time.thread_time()

    async def ask(seconds: float, most: int) -> None:
        with suppress(TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(seconds):
                asking = asyncio.ensure_future(ATTACKERS[name].act(ports, seen))
                while sum(seen.values()) < most and not asking.done():  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                asking.cancel()
                await asking

    asyncio.run(ask(5.0, 3))
    before, count = server.call(read()), sum(seen.values())
    asyncio.run(ask(5.0, count + requests))
    assert sum(seen.values()) > count, name
    return float(server.call(read()) - before) / (sum(seen.values()) - count)


def test_no_request_that_ranks_nothing_costs_the_loop_much() -> None:
    """Red where /openapi.json is described, or the settings of /info put together, for each who asks; a scrape has its own test."""
    with live(FakeEngine(), explore={"enabled": True}) as server:
        seconds = {
            name: min(loop_seconds(server, name, 12) for _ in range(2))
            for name, attacker in ATTACKERS.items()
            if attacker.route not in ("/metrics", *RANKING, *ROUTES) and "/admin" not in name and "infer" not in name
        }
    assert [name for name, took in seconds.items() if took > MOST_TIMES * statistics.median(seconds.values())] == []
