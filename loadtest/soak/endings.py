"""F3 to F7: a server under load that is stopped, is killed, hangs, loses its device or loses its clients."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping

from app.exits import EXIT_ENGINE_LOST
from loadtest.generate.payload import rank_request
from loadtest.matrix import Row
from loadtest.servers.launch import Server, wait_until
from loadtest.soak.clients import Callers, ask_all, vanish
from loadtest.soak.corpora import corpora, search_request
from loadtest.soak.servers import HANG, RAISE, STICKY, fake

CLIENTS = 16
STUCK_SECONDS = 5.0
RESTART_SECONDS = 2.0
STALL_EXIT_SECONDS = 6.0
LATE_EXIT_SECONDS = 3.0  # to notice, to answer waiting callers, and to exit
EXIT_SECONDS = 20.0
SETTLE_SECONDS = 10.0  # for requests still unread in the sockets after the last client has gone
LOST_SECONDS = 3.0  # a request without a reply for this long counts as lost


def terminations(runs: int, signals: int = 1, **settings: object) -> Row:
    """F3: SIGTERM under load. Every request that was sent gets 200, and the process exits with 0."""
    found: Counter[str] = Counter()
    failed = 0
    for run in range(runs):
        delay = 0.3 if run % 2 else 0.0
        with (
            fake("--forward-ms=5", drain__delay_seconds=delay, **settings) as server,
            Callers(server.port, CLIENTS, until_gone=True, timeout_seconds=LOST_SECONDS) as callers,
        ):
            time.sleep(random.Random(run).uniform(0.1, 0.4))
            for _ in range(signals):
                server.process.send_signal(signal.SIGTERM)
                time.sleep(0.02)
            code = server.process.wait(EXIT_SECONDS)
            callers.ended(EXIT_SECONDS)
        failed += code != 0 or set(callers.ends()) != {"200"}
        found += callers.ends()
    answered = found.pop("200", 0)
    what = ", ".join((f"SIGTERM under load, {answered} answered", *(f"{each} × {end}" for end, each in found.items())))
    return Row("F3", what, runs, failed, found.total(), 0, "requests lost or refused")


def kills(runs: int, sent: signal.Signals = signal.SIGKILL) -> Row:
    """F4: `kill -9` and restart. No client hangs, and the server is ready again within the load time + 2 s."""
    hung, slowest = 0, 0.0
    for _ in range(runs):
        began = time.monotonic()
        with fake("--forward-ms=5") as server:
            load_seconds = time.monotonic() - began
            with Callers(server.port, CLIENTS, until_gone=True, timeout_seconds=5) as callers:
                time.sleep(0.3)
                server.process.send_signal(sent)
                hung += not callers.ended(3)
            server.process.kill()
        hung += callers.ends()["lost: timeout"]
        if hung:
            break
        began = time.monotonic()
        with fake("--forward-ms=5"):
            slowest = max(slowest, time.monotonic() - began - load_seconds)
    return Row("F4", "kill -9 under load, start again", runs, hung, slowest, RESTART_SECONDS, "s beyond the load time")


def stuck(runs: int, **settings: object) -> Row:
    """F5: a forward that never ends. readyz gives 503 within 5 s, callers get 504 at their deadline, the process exits to be restarted."""
    return _stuck(runs, "engine", rank_request, settings)


def stuck_search(runs: int, **settings: object) -> Row:
    """F5: the same with a search that never ends."""
    with corpora("a") as served:
        searched = served["a"].settings | settings
        return _stuck(runs, "search", lambda user: search_request(user - 1, "/retrieve"), searched)


def _stuck(runs: int, what: str, request: Callable[[int], bytes], settings: Mapping[str, object]) -> Row:
    failed, slowest = 0, 0.0
    chosen = {"deadline__default_seconds": 1.0, "queue__stall_exit_seconds": STALL_EXIT_SECONDS, **settings}
    for _ in range(runs):
        with fake(**chosen) as server:
            began = time.monotonic()
            hung = iter([HANG])  # the request that hangs comes first
            with Callers(server.port, 4, lambda _, hung=hung: request(next(hung, 1)), timeout_seconds=10) as callers:  # type: ignore[misc]
                time.sleep(0.1)
                callers.stop = True  # each has asked once
                wait_until(lambda: not server.answers(), 4 * STUCK_SECONDS, 0.05)
                slowest = max(slowest, time.monotonic() - began)
            code = _exit_code(server, began + STALL_EXIT_SECONDS + LATE_EXIT_SECONDS - time.monotonic())
            # A request that arrived before the one that hangs got 200, and its caller sent another.
            statuses = sorted(reply.status for reply in callers.replies if reply.status != 200)
            failed += statuses != [504] * 4 or code != EXIT_ENGINE_LOST
    what = f"{what} stuck: 504 at the deadline, then exit {EXIT_ENGINE_LOST}"
    return Row("F5", what, runs, failed, slowest, STUCK_SECONDS, "s until readyz 503")


def stuck_loop(runs: int, *faults: str, **settings: object) -> Row:
    """F5: the same with a search in the event loop, which then answers nothing. The process exits to be restarted; a SIGSTOP that
    lasts longer than a search may hang must not make it exit."""
    chosen = {"queue__stall_exit_seconds": STALL_EXIT_SECONDS, "logs__level": "error", **settings}
    failed, slowest = 0, 0.0
    with corpora("a") as served:
        for _ in range(runs):
            with fake("--searches-in-loop", *faults, **served["a"].settings, **chosen) as server:
                [first] = ask_all(server.port, [search_request(1, "/retrieve")])  # measures how long one takes
                server.pause()
                time.sleep(STALL_EXIT_SECONDS + 1)
                server.resume()
                [second] = ask_all(server.port, [search_request(2, "/retrieve")])
                began = time.monotonic()
                with Callers(
                    server.port, 1, lambda _: search_request(HANG - 1, "/retrieve"), until_gone=True
                ) as callers:
                    time.sleep(0.5)
                    is_deaf = not server.answers("/livez")
                    code = _exit_code(server, STALL_EXIT_SECONDS + LATE_EXIT_SECONDS)
                    slowest = max(slowest, time.monotonic() - began)
                    callers.ended(EXIT_SECONDS)  # its connection has been reset
                failed += (first.status, second.status, is_deaf, code) != (200, 200, True, EXIT_ENGINE_LOST)
    what = f"search stuck in the loop: exit {EXIT_ENGINE_LOST}"
    return Row("F5", what, runs, failed, slowest, STALL_EXIT_SECONDS + LATE_EXIT_SECONDS, "s until the exit")


def _exit_code(server: Server, seconds: float) -> int | None:
    """Exit code of a process that should end in time. Otherwise kill it, as it may ignore other signals, and return None."""
    try:
        return server.process.wait(seconds)
    except subprocess.TimeoutExpired:
        server.process.kill()
        return None


def raising(requests: int) -> list[Row]:
    """F6: one request in ten raises in its forward; the others of its batch get scores. Then the device is lost."""
    users = [RAISE if row % 10 == 0 else row + 1 for row in range(requests)]
    with fake("--forward-ms=2", queue__max_wait_seconds=10) as server:
        replies = ask_all(server.port, [rank_request(user) for user in users], together=64)
        for _ in range(5):  # a busy machine refuses some: they come again, as told
            if not (refused := [place for place, reply in enumerate(replies) if reply.status == 429]):
                break
            time.sleep(1)
            later = ask_all(server.port, [rank_request(users[place]) for place in refused])
            for place, reply in zip(refused, later, strict=True):
                replies[place] = reply
        wrong = sum(reply.status != (503 if user == RAISE else 200) for user, reply in zip(users, replies, strict=True))
        lost = ask_all(server.port, [rank_request(user) for user in (STICKY, *range(1, 9))], together=16)
        code = server.process.wait(EXIT_SECONDS)
    statuses = [reply.status for reply in lost if reply.status != 200]
    what = "a forward raises for one request in ten: 503 for it, 200 for the others"
    sticky = "sticky error: 503 for all, then exit 70"
    return [
        Row("F6", what, requests, wrong, 0, 0, ""),
        Row("F6", sticky, len(statuses), statuses.count(0), code, EXIT_ENGINE_LOST, "exit code"),
    ]


def vanishing(clients: int) -> Row:
    """F7: clients vanish at random moments. The event loop survives and the gauges return to 0."""
    with fake("--forward-ms=2", "--candidate-us=20", queue__max_wait_seconds=10) as server:
        asyncio.run(_vanish(server.port, clients))
        wait_until(lambda: not queued(server), SETTLE_SECONDS, 0.1)
        left, alive, seen = queued(server), server.answers(), server.metric("ranker_cancelled_total")
    what, failed = f"clients vanish ({seen:.0f} noticed at work)", int(not alive or not seen)
    return Row("F7", what, clients, failed, left, 0, "left in the queue")


def queued(server: Server) -> float:
    """Requests plus candidates in the queue."""
    return server.metric("ranker_queue_requests") + server.metric("ranker_queue_candidates")


async def _vanish(port: int, clients: int) -> None:
    room = asyncio.Semaphore(64)

    async def one(number: int) -> None:
        draw = random.Random(number)
        async with room:
            sent = rank_request(number + 1, draw.choice((1, 16, 600)))
            cut = draw.randrange(len(sent)) if draw.random() < 0.3 else len(sent)
            await vanish(port, sent[:cut], draw.random() * 0.02)

    await asyncio.gather(*(one(number) for number in range(clients)))
