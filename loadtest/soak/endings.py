"""F3 to F7: a server that is stopped, is killed, hangs, or loses its device or its clients, each under load."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from loadtest.generate.http_client import Client, Reply
from loadtest.generate.payload import rank_request
from loadtest.matrix import Row
from loadtest.servers.launch import HOST, Server
from loadtest.soak.corpora import Oracle, search_request
from loadtest.soak.oracle import vanish
from loadtest.soak.servers import HANG, RAISE, STICKY, fake

CLIENTS = 16
STUCK_SECONDS = 5.0
RESTART_SECONDS = 2.0
STALL_EXIT_SECONDS = 6.0
LATE_EXIT_SECONDS = 3.0  # to look, to answer those who wait, and to end
EXIT_ENGINE_LOST = 70
EXIT_SECONDS = 20.0
SETTLE_SECONDS = 10.0  # for what lies unread in the sockets when the last client has gone
LOST_SECONDS = 3.0  # a request that got no reply for so long got none at all


async def _until_refused(client: Client, found: Counter[str], seed: int) -> None:
    """One client that asks until the server no longer listens. A request that was sent and got no reply is lost."""
    draw = random.Random(seed)
    while True:
        reply = await client.ask(rank_request(draw.randrange(1, 10**6), draw.choice((1, 16, 64))))
        if reply.failure and not reply.sent_at:
            return
        found[str(reply.status) if reply.status else f"lost: {reply.failure}"] += 1
        if reply.failure:
            return


def terminations(runs: int, signals: int = 1, **settings: object) -> Row:
    """F3: SIGTERM under load. Every request that was sent is answered 200, and the process exits 0."""
    found: Counter[str] = Counter()
    failed = 0
    for run in range(runs):
        delay = 0.3 if run % 2 else 0.0
        with fake("--forward-ms=5", drain__delay_seconds=delay, **settings) as server, asyncio.Runner() as runner:
            before = sum(found.values()) - found["200"]
            code = runner.run(_terminated(server, found, random.Random(run).uniform(0.1, 0.4), signals))
            failed += code != 0 or sum(found.values()) - found["200"] != before
    answered = found.pop("200", 0)
    what = ", ".join((f"SIGTERM under load, {answered} answered", *(f"{each} × {end}" for end, each in found.items())))
    return Row("F3", what, runs, failed, found.total(), 0, "requests lost or refused")


async def _terminated(server: Server, found: Counter[str], after_seconds: float, signals: int) -> int:
    async with Client(HOST, server.port, max_connections=8 * CLIENTS, timeout_seconds=LOST_SECONDS) as client:
        clients = [asyncio.create_task(_until_refused(client, found, seed)) for seed in range(CLIENTS)]
        await asyncio.sleep(after_seconds)
        for _ in range(signals):
            server.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.02)
        code = await asyncio.to_thread(server.process.wait, EXIT_SECONDS)
        await asyncio.wait(clients, timeout=EXIT_SECONDS)
    return code


def kills(runs: int, sent: signal.Signals = signal.SIGKILL) -> Row:
    """F4: `kill -9` and a start again. No client hangs; ready again within the load time + 2 s."""
    hung, slowest = 0, 0.0
    for _ in range(runs):
        began = time.monotonic()
        with fake("--forward-ms=5") as server, asyncio.Runner() as runner:
            load_seconds = time.monotonic() - began
            hung += runner.run(_killed(server, sent))
        if hung:
            break
        began = time.monotonic()
        with fake("--forward-ms=5"):
            slowest = max(slowest, time.monotonic() - began - load_seconds)
    what = "kill -9 under load, start again"
    return Row("F4", what, runs, hung, max(0.0, slowest), RESTART_SECONDS, "s beyond the load time")


async def _killed(server: Server, sent: signal.Signals) -> int:
    async with Client(HOST, server.port, max_connections=8 * CLIENTS, timeout_seconds=5) as client:
        found: Counter[str] = Counter()
        clients = [asyncio.create_task(_until_refused(client, found, seed)) for seed in range(CLIENTS)]
        await asyncio.sleep(0.3)
        server.process.send_signal(sent)
        _, hanging = await asyncio.wait(clients, timeout=3)
    server.process.kill()
    return len(hanging) + found["lost: timeout"]


def stuck(runs: int, **settings: object) -> Row:
    """F5: a forward that never ends. readyz says 503 within 5 s, callers get 504 at their deadline, the process restarts."""
    return _all_stuck(runs, "engine", rank_request, settings)


def stuck_search(runs: int, **settings: object) -> Row:
    """F5: the same of a search."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = Oracle("stuck", Path(folder), 0)
        served = {"retrieval__checkpoint": corpus.towers, "retrieval__corpus": corpus.corpus}
        return _all_stuck(runs, "search", lambda user: search_request(user - 1, "/retrieve"), served | settings)


def stuck_loop(runs: int, *faults: str, **settings: object) -> Row:
    """F5: the same of a search that is computed in the event loop, which answers nobody from then on. The process restarts, but not
    because it was stopped for longer than a search may hang."""
    chosen = {"queue__stall_exit_seconds": STALL_EXIT_SECONDS, "logs__level": "error", **settings}
    failed, slowest = 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        corpus = Oracle("stuck", Path(folder), 0)
        served = {"retrieval__checkpoint": corpus.towers, "retrieval__corpus": corpus.corpus}
        for _ in range(runs):
            with fake("--searches-in-loop", *faults, **served, **chosen) as server, asyncio.Runner() as runner:
                lasted, seconds, code = runner.run(_stuck_loop(server))
                failed += not lasted or code != EXIT_ENGINE_LOST
                slowest = max(slowest, seconds)
    what = f"search stuck in the loop: exit {EXIT_ENGINE_LOST}"
    return Row("F5", what, runs, failed, slowest, STALL_EXIT_SECONDS + LATE_EXIT_SECONDS, "s until the exit")


async def _stuck_loop(server: Server) -> tuple[bool, float, int | None]:
    """Whether it lasts through a stop, then has a loop that hangs; seconds until it ends, and its exit code."""
    async with Client(HOST, server.port, timeout_seconds=10) as client:
        first = await client.ask(search_request(1, "/retrieve"))  # from then on it is known how long one takes
        server.pause()
        await asyncio.sleep(STALL_EXIT_SECONDS + 1)
        server.resume()
        second = await client.ask(search_request(2, "/retrieve"))
        began = time.monotonic()
        waiting = asyncio.create_task(client.ask(search_request(HANG - 1, "/retrieve")))
        await asyncio.sleep(0.5)
        is_deaf = not await asyncio.to_thread(server.answers, "/livez")
        try:
            code = await asyncio.to_thread(server.process.wait, STALL_EXIT_SECONDS + LATE_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            server.process.kill()  # it hears no other signal
            code = None
        await waiting  # its connection has been reset
    return (first.status, second.status, is_deaf) == (200, 200, True), time.monotonic() - began, code


def _all_stuck(runs: int, what: str, request: Callable[[int], bytes], settings: Mapping[str, object]) -> Row:
    failed, slowest = 0, 0.0
    chosen = {"deadline__default_seconds": 1.0, "queue__stall_exit_seconds": STALL_EXIT_SECONDS, **settings}
    for _ in range(runs):
        with fake(**chosen) as server, asyncio.Runner() as runner:
            seconds, statuses, code = runner.run(_stuck(server, request))
            slowest = max(slowest, seconds)
            failed += statuses != {504} or code != EXIT_ENGINE_LOST
    what = f"{what} stuck: 504 at the deadline, then exit {EXIT_ENGINE_LOST}"
    return Row("F5", what, runs, failed, slowest, STUCK_SECONDS, "s until readyz 503")


async def _stuck(server: Server, request: Callable[[int], bytes]) -> tuple[float, set[int], int | None]:
    """Seconds until it is not ready, how callers were answered, and the exit code where it ends in time."""
    async with Client(HOST, server.port, timeout_seconds=10) as client:
        began = time.monotonic()
        waiting = [asyncio.create_task(client.ask(request(HANG)))]
        await asyncio.sleep(0.1)  # what hangs comes first
        waiting += [asyncio.create_task(client.ask(request(user))) for user in (1, 2, 3)]
        async with asyncio.timeout(4 * STUCK_SECONDS):
            while await asyncio.to_thread(server.answers):  # noqa: ASYNC110  # another process has no event
                await asyncio.sleep(0.05)
        seconds = time.monotonic() - began
        replies = await asyncio.gather(*waiting)
    left = began + STALL_EXIT_SECONDS + LATE_EXIT_SECONDS - time.monotonic()
    try:
        code = await asyncio.to_thread(server.process.wait, left)
    except subprocess.TimeoutExpired:
        code = None
    return seconds, {reply.status for reply in replies}, code


def raising(requests: int) -> list[Row]:
    """F6: one request in ten raises in its forward, the others of its batch get their scores; then the device is lost."""
    with fake("--forward-ms=2", queue__max_wait_seconds=10) as server, asyncio.Runner() as runner:
        wrong = runner.run(_raising(server, requests))
        statuses, code = runner.run(_lost(server))
    unanswered, sticky = statuses.count(200) + statuses.count(0), "sticky error: 503 for all, then exit 70"
    return [
        Row("F6", "a forward raises for one request in ten: 503 for it, 200 for the others", requests, wrong, 0, 0, ""),
        Row("F6", sticky, len(statuses), unanswered, code, 70, "exit code"),
    ]


async def _raising(server: Server, requests: int) -> int:
    async with Client(HOST, server.port, max_connections=64) as client:
        users = [RAISE if row % 10 == 0 else row + 1 for row in range(requests)]
        replies = await asyncio.gather(*(client.ask(rank_request(user)) for user in users))
    return sum(reply.status != (503 if user == RAISE else 200) for user, reply in zip(users, replies, strict=True))


async def _lost(server: Server) -> tuple[list[int], int]:
    async with Client(HOST, server.port, max_connections=16) as client:
        replies: list[Reply] = await asyncio.gather(
            *(client.ask(rank_request(user)) for user in (STICKY, *range(1, 9)))
        )
    return [reply.status for reply in replies if reply.status != 200], await asyncio.to_thread(
        server.process.wait, EXIT_SECONDS
    )


def vanishing(clients: int) -> Row:
    """F7: clients vanish at random moments. The loop survives, the gauges return to 0."""
    with fake("--forward-ms=2", "--candidate-us=20", queue__max_wait_seconds=10) as server, asyncio.Runner() as runner:
        runner.run(_vanishing(server, clients))
        until = time.monotonic() + SETTLE_SECONDS
        while (left := _queued(server)) and time.monotonic() < until:
            time.sleep(0.1)
        alive = server.answers()
        seen = server.metric("ranker_cancelled_total")
    what, failed = f"clients vanish ({seen:.0f} noticed at work)", int(not alive or not seen)
    return Row("F7", what, clients, failed, left, 0, "left in the queue")


def _queued(server: Server) -> float:
    return server.metric("ranker_queue_requests") + server.metric("ranker_queue_candidates")


async def _vanishing(server: Server, clients: int) -> None:
    room = asyncio.Semaphore(64)

    async def one(number: int) -> None:
        draw = random.Random(number)
        async with room:
            sent = rank_request(number + 1, draw.choice((1, 16, 600)))
            await vanish(
                server.port, sent[: draw.randrange(len(sent))] if draw.random() < 0.3 else sent, draw.random() * 0.02
            )

    await asyncio.gather(*(one(number) for number in range(clients)))
