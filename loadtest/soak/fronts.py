"""P1 to P3: several fronts, of which one is killed or stopped, or which lose their engine process, each under load."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from loadtest.generate.payload import rank_request
from loadtest.matrix import Row
from loadtest.servers.launch import HOST, Server
from loadtest.soak.servers import fake

CLIENTS = 16
TRIES = 4
PAUSE_SECONDS = 0.02  # before a client tries again
LIVED_SECONDS = 1.2  # a front that lived for less than a second is started again after a pause
SPARE_SECONDS = 20.0  # for the next spare front to import what it needs, beside the load
ASLEEP_SECONDS = 0.2
BACK_SECONDS = 1.0
TOLD_SECONDS = 0.1
SERVES_SECONDS = 30.0
ENGINE_LIVED_SECONDS = 6.0  # one that lived less is not started again
LOGGED: dict[str, Any] = {"fronts": 2, "logs__level": "info", "logs__format": "json"}
ANSWERED = re.compile(rb"HTTP/1\.1 (\d{3}) .*?content-length: (\d+)", re.DOTALL)


@dataclass
class Asked:
    """One attempt of one request: the client's port, its status (0: none came), and when it began and ended."""

    port: int
    status: int
    began: float
    ended: float


@dataclass
class Clients:
    """Closed-loop clients, a connection each, that ask again where no reply came, or a 503 where `patient`."""

    port: int
    patient: bool = False
    stop: bool = False
    given_up: int = 0
    asked: list[Asked] = field(default_factory=list)

    async def run(self, count: int) -> None:
        """Until `stop` is set."""
        await asyncio.gather(*(self._client(random.Random(seed)) for seed in range(count)))

    async def _client(self, draw: random.Random) -> None:
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        while not self.stop:
            payload = rank_request(draw.randrange(1, 10**6), draw.choice((1, 16, 64)))
            for attempt in range(TRIES):
                streams = await self._ask(streams, payload)
                if self.asked[-1].status == 200 or self.stop:
                    break
                if attempt == TRIES - 1 and not self.patient:
                    self.given_up += 1
                await asyncio.sleep(PAUSE_SECONDS)
        if streams is not None:
            streams[1].close()

    async def _ask(
        self, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None, payload: bytes
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """One attempt; the connection while it lasts."""
        began, port, status = time.monotonic(), 0, 0
        try:
            reader, writer = streams or await asyncio.open_connection(HOST, self.port)
            port = writer.get_extra_info("sockname")[1]
            writer.write(payload)
            head = await reader.readuntil(b"\r\n\r\n")
            found = ANSWERED.match(head)
            assert found is not None
            await reader.readexactly(int(found[2]))
            status, streams = int(found[1]), (reader, writer)
            if b"connection: close" in head:
                writer.close()
                streams = None
        except (OSError, asyncio.IncompleteReadError):
            streams = None
        self.asked.append(Asked(port, status, began, time.monotonic()))
        return streams


def process_of(server: Server, front: int | None) -> int:
    """The process id of a front, or of the engine process."""
    event = "engine_started" if front is None else "front_started"
    return [int(line["process"]) for line in server.lines if line["event"] == event and line.get("front") == front][-1]


def spare_waits(server: Server) -> bool:
    """Whether a process that is neither a front nor the engine process has nothing more to do."""
    supervisor = server.process.pid
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    others = {int(child) for child in children} - {process_of(server, front) for front in (1, 2, None)}
    before = {process: _scheduled(process) for process in others}
    time.sleep(ASLEEP_SECONDS)
    return any(_scheduled(process) == seen for process, seen in before.items())


def _scheduled(process: int) -> list[str]:
    """How long it has run, and how long it has waited for a core."""
    try:
        return Path(f"/proc/{process}/schedstat").read_text().split()[:2]
    except OSError:
        return []


def peers_of(process: int) -> set[int]:
    """The clients' ports of a process's connections."""
    inodes = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[2].partition(":")[2], 16) for row in rows if row[3] == "01" and row[9] in inodes}


async def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition came to hold in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if await asyncio.to_thread(condition):
            return True
        await asyncio.sleep(0.01)
    return False


def front_kills(kills: int, spared: bool = False) -> list[Row]:
    """P1: `kill -9` of one front after the other. `spared` kills one and looks at the other's requests: it must be red."""
    with fake("--forward-ms=2", **LOGGED) as server, asyncio.Runner() as runner:
        clients, foreign, slowest = runner.run(_kill_fronts(server, kills, spared))
        left = server.metric("ranker_queue_requests") + server.metric("ranker_queue_candidates")
    lost = sum(asked.status == 0 for asked in clients.asked)
    tried = sum(asked.status == 200 for asked in clients.asked)
    return [
        Row(
            "P1",
            f"fronts killed: {lost} requests in flight lost, none of another front",
            kills,
            foreign,
            left,
            0,
            "left",
        ),
        Row(
            "P1", "requests that failed with the clients' retries", tried, clients.given_up, slowest, BACK_SECONDS, "s"
        ),
    ]


async def _kill_fronts(server: Server, kills: int, spared: bool) -> tuple[Clients, int, float]:
    clients, foreign, slowest = Clients(server.port), 0, 0.0
    running = asyncio.create_task(clients.run(CLIENTS))
    for kill in range(kills):
        await asyncio.sleep(LIVED_SECONDS)
        await until(lambda: spare_waits(server), SPARE_SECONDS)
        front = 1 + kill % 2
        process = process_of(server, front)
        os.kill(process, signal.SIGSTOP)  # so that what it holds is known
        own, first = peers_of(process_of(server, 3 - front) if spared else process), len(clients.asked)
        began, written = time.time(), len(server.lines)
        os.kill(process, signal.SIGKILL)
        is_back = lambda front=front, written=written: _listening_at(server, front, written) is not None  # noqa: E731
        if not await until(is_back, 10 * BACK_SECONDS):
            return clients, foreign + 1, float("inf")
        slowest = max(slowest, (_listening_at(server, front, written) or 0.0) - began)
        foreign += sum(asked.status == 0 and asked.port not in own for asked in clients.asked[first:])
    clients.stop = True
    await running
    return clients, foreign, slowest


def _listening_at(server: Server, front: int, after: int) -> float | None:
    """When a front began to accept, in Unix seconds; lines before `after` do not count."""
    for line in server.lines[after:]:
        if line["event"] == "listening" and line.get("front") == front:
            return datetime.fromisoformat(line["time"]).timestamp()
    return None


def engine_kills(
    kills: int, serves_seconds: float = SERVES_SECONDS, lived_seconds: float = ENGINE_LIVED_SECONDS, **settings: object
) -> list[Row]:
    """P2: `kill -9` of the engine process. Whoever waits gets 503 at once, and another engine process serves."""
    with fake("--forward-ms=20", **LOGGED, **settings) as server, asyncio.Runner() as runner:
        clients, slowest, missing = runner.run(_kill_engines(server, kills, serves_seconds, lived_seconds))
    lost = sum(asked.status == 0 for asked in clients.asked)
    refused = sum(asked.status == 503 for asked in clients.asked)
    return [Row("P2", f"engine processes killed: {refused} × 503", kills, lost + missing, slowest, TOLD_SECONDS, "s")]


async def _kill_engines(
    server: Server, kills: int, serves_seconds: float, lived_seconds: float
) -> tuple[Clients, float, int]:
    clients, slowest, missing = Clients(server.port, patient=True), 0.0, 0
    running = asyncio.create_task(clients.run(CLIENTS))
    for _ in range(kills):
        process = process_of(server, None)  # reads a long log, and no client is heard meanwhile
        await asyncio.sleep(lived_seconds)
        first = len(clients.asked)
        os.kill(process, signal.SIGKILL)
        killed = time.monotonic()
        await asyncio.sleep(0.5)
        waited = [asked for asked in clients.asked[first:] if asked.began < killed and asked.status != 200]
        slowest = max([slowest, *(asked.ended - killed for asked in waited)])
        missing += not waited
        served = len(clients.asked)
        is_back = lambda served=served: any(asked.status == 200 for asked in clients.asked[served:])  # noqa: E731
        missing += not await until(is_back, serves_seconds)
    clients.stop = True
    await running
    return clients, slowest, missing


def stopped_front(seconds: float, by: Sequence[signal.Signals] = (signal.SIGSTOP,)) -> list[Row]:
    """P3: SIGSTOP of a front. The other's clients get every reply, and no later than before; then the first goes on.

    A row for each signal, one after the other: the control's is another.
    """
    with fake("--forward-ms=2", **LOGGED) as server, asyncio.Runner() as runner:
        seen = [runner.run(_stop_front(server, seconds, stopped)) for stopped in by]
    what = "a front stopped: p99 of the other's clients"
    return [Row("P3", what, tried, failed, ratio, 1.5, "× before") for failed, tried, ratio in seen]


async def _stop_front(server: Server, seconds: float, stopped: signal.Signals) -> tuple[int, int, float]:
    clients = Clients(server.port)
    running = asyncio.create_task(clients.run(CLIENTS))
    await asyncio.sleep(seconds)
    process, others = process_of(server, 1), peers_of(process_of(server, 2))
    before, first = [asked for asked in clients.asked if asked.port in others], len(clients.asked)
    os.kill(process, stopped)
    await asyncio.sleep(seconds)
    during = [asked for asked in clients.asked[first:] if asked.port in others]
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGCONT)
    clients.stop = True
    await running
    ready = await asyncio.to_thread(server.answers)
    failed = sum(asked.status != 200 for asked in clients.asked) + (not ready) + (not during)
    return failed, len(during), _p99(during) / max(_p99(before), 1e-9)


def _p99(asked: list[Asked]) -> float:
    seconds = sorted(each.ended - each.began for each in asked)
    return seconds[int(0.99 * len(seconds))] if seconds else 0.0
