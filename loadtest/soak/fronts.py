"""P1 to P3: several fronts under load while one is killed or stopped, or while their engine process is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from loadtest.matrix import Row
from loadtest.servers.launch import Server, wait_until
from loadtest.soak.clients import Callers, percentile
from loadtest.soak.endings import queued
from loadtest.soak.servers import fake

CLIENTS = 16
TRIES = 4
LIVED_SECONDS = 1.2  # a front that ran for less than a second is only restarted after a pause
SPARE_SECONDS = 20.0  # for the next spare front to finish its imports under load
ASLEEP_SECONDS = 0.2
BACK_SECONDS = 1.0
HELD_SECONDS = 0.05
TOLD_SECONDS = 0.1
SERVES_SECONDS = 30.0
ENGINE_LIVED_SECONDS = 6.0  # an engine process that ran for less is not restarted
LOGGED: dict[str, Any] = {"fronts": 2, "logs__level": "info", "logs__format": "json"}


def process_of(server: Server, front: int | None) -> int:
    """The process id of a front, or of the engine process."""
    event = "engine_started" if front is None else "front_started"
    return [int(line["process"]) for line in server.lines if line["event"] == event and line.get("front") == front][-1]


def spare_waits(server: Server) -> bool:
    """Whether the spare process, neither a front nor the engine, has finished its imports and sleeps."""
    supervisor = server.process.pid
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    others = {int(child) for child in children} - {process_of(server, front) for front in (1, 2, None)}
    before = {process: _scheduled(process) for process in others}
    time.sleep(ASLEEP_SECONDS)
    return any(_scheduled(process) == seen for process, seen in before.items())


def _scheduled(process: int) -> list[str]:
    """Time that a process has run, and time that it has waited for a core; empty if it is gone."""
    try:
        return Path(f"/proc/{process}/schedstat").read_text().split()[:2]
    except OSError:
        return []


def peers_of(process: int) -> set[int]:
    """The client ports of a process's connections."""
    inodes = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[2].partition(":")[2], 16) for row in rows if row[3] == "01" and row[9] in inodes}


def front_kills(kills: int, spared: bool = False) -> list[Row]:
    """P1: `kill -9` of one front after the other. The control `spared` checks the other front's requests and must be red."""
    with fake("--forward-ms=2", **LOGGED) as server:
        with Callers(server.port, CLIENTS, tries=TRIES) as callers:
            killed = [_kill_front(server, callers, 1 + kill % 2, spared) for kill in range(kills)]
        left = queued(server)
    foreign, slowest = sum(found for found, _ in killed), max(seconds for _, seconds in killed)
    lost = sum(reply.status == 0 for reply in callers.replies)
    tried = sum(reply.status == 200 for reply in callers.replies)
    what = f"fronts killed: {lost} requests in flight lost, none of another front"
    retried = "requests that failed with the clients' retries"
    return [
        Row("P1", what, kills, foreign, left, 0, "left"),
        Row("P1", retried, tried, callers.given_up, slowest, BACK_SECONDS, "s"),
    ]


def _kill_front(server: Server, callers: Callers, front: int, spared: bool) -> tuple[int, float]:
    """Kill a front. Return how many requests of other fronts were lost, and the seconds until a new front accepts."""
    time.sleep(LIVED_SECONDS)
    wait_until(lambda: spare_waits(server), SPARE_SECONDS)
    process = process_of(server, front)
    os.kill(process, signal.SIGSTOP)  # so that its connections no longer change
    own, first = peers_of(process_of(server, 3 - front) if spared else process), len(callers.replies)
    began, written = time.time(), len(server.lines)
    os.kill(process, signal.SIGKILL)
    if not wait_until(lambda: _listening_at(server, front, written), 10 * BACK_SECONDS):
        return 1, float("inf")
    foreign = sum(reply.status == 0 and reply.port not in own for reply in callers.replies[first:])
    return foreign, (_listening_at(server, front, written) or 0.0) - began


def _listening_at(server: Server, front: int, after: int) -> float | None:
    """Unix time at which a front began to accept, or None. Log lines before `after` do not count."""
    for line in server.lines[after:]:
        if line["event"] == "listening" and line.get("front") == front:
            return datetime.fromisoformat(line["time"]).timestamp()
    return None


def engine_kills(
    kills: int, serves_seconds: float = SERVES_SECONDS, lived_seconds: float = ENGINE_LIVED_SECONDS, **settings: object
) -> list[Row]:
    """P2: `kill -9` of the engine process. Waiting callers get 503 at once, and a new engine process serves."""
    slowest, missing = 0.0, 0
    with (
        fake("--forward-ms=20", **LOGGED, **settings) as server,
        Callers(server.port, CLIENTS, tries=TRIES) as callers,
    ):
        for _ in range(kills):
            process = process_of(server, None)  # reads a long log
            time.sleep(lived_seconds)
            first = len(callers.replies)
            os.kill(process, signal.SIGSTOP)  # so that some callers wait for it
            time.sleep(HELD_SECONDS)
            killed = time.monotonic()
            os.kill(process, signal.SIGKILL)
            time.sleep(0.5)
            waited = [reply for reply in callers.replies[first:] if reply.asked_at < killed and reply.status != 200]
            slowest = max([slowest, *(reply.done_at - killed for reply in waited)])
            missing += not waited
            first = len(callers.replies)
            missing += not wait_until(lambda: 200 in [each.status for each in callers.replies[first:]], serves_seconds)  # noqa: B023
    lost = sum(reply.status == 0 for reply in callers.replies)
    refused = sum(reply.status == 503 for reply in callers.replies)
    return [Row("P2", f"engine processes killed: {refused} × 503", kills, lost + missing, slowest, TOLD_SECONDS, "s")]


def stopped_front(seconds: float, by: Sequence[signal.Signals] = (signal.SIGSTOP,)) -> list[Row]:
    """P3: SIGSTOP of a front. Clients of the other front get every reply, no later than before; then the first front resumes.

    One row per signal in `by`; the control sends another signal.
    """
    with fake("--forward-ms=2", **LOGGED) as server:
        return [_stop_front(server, seconds, stopped) for stopped in by]


def _stop_front(server: Server, seconds: float, stopped: signal.Signals) -> Row:
    with Callers(server.port, CLIENTS, tries=TRIES) as callers:
        time.sleep(seconds)
        process, others = process_of(server, 1), peers_of(process_of(server, 2))
        first = len(callers.replies)
        before = [reply for reply in callers.replies[:first] if reply.port in others]
        os.kill(process, stopped)
        time.sleep(seconds)
        during = [reply for reply in callers.replies[first:] if reply.port in others]
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)
    failed = sum(reply.status != 200 for reply in callers.replies) + (not server.answers()) + (not during)
    ratio = percentile(during) / max(percentile(before), 1e-9)
    return Row("P3", "a front stopped: p99 of the other's clients", len(during), failed, ratio, 1.5, "× before")
