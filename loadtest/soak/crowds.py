"""B15: one or four clients call a path, or one each of several, in a closed loop; measures how a moderate ranking client is slowed down.

Every served path needs an entry in `soak/attackers.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import orjson

from loadtest.generate.http_client import Reply
from loadtest.generate.payload import post, rank_request
from loadtest.matrix import Row
from loadtest.servers.launch import free_port, wait_until
from loadtest.soak.attackers import ATTACKERS, BESIDE_THE_DEMO, EXAMPLE, Act, Ports
from loadtest.soak.clients import Callers, apart
from loadtest.soak.corpora import corpora
from loadtest.soak.oracle import admin_settings
from loadtest.soak.servers import fake, real

COUNTS = (1, 4)
P50_TIMES, P99_TIMES = 2.0, 4.0
PAUSE_SECONDS = (0.001, 0.005)  # of the ranking client, between a reply and the next request
START_SECONDS = 5.0  # to wait for the attackers' first expected reply
REPLY_SECONDS = 60.0
RETRIES = 2  # of a measurement beyond a limit; the median counts
KNOWN = ATTACKERS | BESIDE_THE_DEMO

Seen = dict[str, Counter[int]]  # replies to each attacker, by status


async def _client(act: Act, ports: Ports, seen: Counter[int]) -> None:
    while True:
        with suppress(OSError, asyncio.IncompleteReadError):
            await act(ports, seen)
        await asyncio.sleep(0.01)


def _attack(ports: Ports, orders: Connection) -> None:
    """For each order, the names of attackers, run a client of each until the next message. An order None ends the process."""

    os.nice(5)  # the attack is not meant to take processor time from the others

    async def main() -> None:
        orders.send(None)  # all is imported
        while (order := await asyncio.to_thread(orders.recv)) is not None:
            seen: Seen = {name: Counter() for name in order}
            clients = [asyncio.ensure_future(_client(KNOWN[name].act, ports, seen[name])) for name in order]
            until = asyncio.get_running_loop().time() + START_SECONDS
            while unanswered(seen) and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            orders.send(seen)
            await asyncio.to_thread(orders.recv)
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            orders.send(seen)

    asyncio.run(main())


def unanswered(seen: Seen) -> list[str]:
    """The attackers that have not got their expected reply."""
    return [name for name, replies in seen.items() if not replies[KNOWN[name].expected]]


@dataclass
class Felt:
    """Latency of the ranking client under one attack, as multiples of that alone right before and after, and counts."""

    p50: float
    p99: float
    tried: int
    refused: int
    answered: Seen


@dataclass
class Crowd:
    """A ranking client of a server, and a process that runs attackers on `orders`. `high`: the percentile that is called p99. `alone`: the
    client's latencies since the last attack, which are those before the next one."""

    ranker: Callers
    orders: Connection
    high: float
    alone: Sequence[float] = ()

    def measure(self, names: Sequence[str], seconds: float) -> Felt:
        """Measure alone, beside one client of each of these attackers, and alone again. Repeat if beyond a limit, and take the median."""
        found = [self._once(names, seconds)]
        while len(found) <= RETRIES and (_median(found, "p50") >= P50_TIMES or _median(found, "p99") >= P99_TIMES):
            found.append(self._once(names, seconds * 2))
        return Felt(
            _median(found, "p50"), _median(found, "p99"), sum(each.tried for each in found), sum(each.refused for each in found),
            {name: sum((each.answered[name] for each in found), Counter[int]()) for name in names},
        )  # fmt: skip

    def _once(self, names: Sequence[str], seconds: float) -> Felt:
        before = self.alone or self._rank(seconds / 2)[0]
        self.orders.send(names)
        self.orders.recv()  # the attackers are running
        beside, refused = self._rank(seconds)
        self.orders.send(None)
        answered = self.orders.recv()
        self._rank(0.0)  # what the attackers have left behind is done
        self.alone, more = self._rank(seconds / 2)
        alone = [*before, *self.alone]
        p50, p99 = (float(np.percentile(beside, share) / np.percentile(alone, share)) for share in (50, self.high))
        return Felt(p50, p99, len(beside), refused + more, answered)

    def _rank(self, seconds: float) -> tuple[list[float], int]:
        """Seconds of each request that the ranking client asks from now on for so long, one at least, and how many were refused."""
        first, began = len(self.ranker.replies), time.monotonic()
        time.sleep(seconds)
        ended = time.monotonic()

        def asked() -> list[Reply]:
            return [reply for reply in self.ranker.replies[first:] if reply.asked_at >= began]

        wait_until(lambda: (found := asked()) and found[-1].done_at >= ended, REPLY_SECONDS, 0.002)
        replies = asked()
        return [reply.done_at - reply.asked_at for reply in replies], sum(reply.status != 200 for reply in replies)


def _median(found: Sequence[Felt], figure: str) -> float:
    return float(statistics.median(getattr(each, figure) for each in found))


@contextmanager
def crowded(*faults: str, high: float = 99.0) -> Iterator[Crowd]:
    """A server with every port and path, its ranking client and its attackers."""
    with corpora("own") as served:
        admin = admin_settings(served["own"].root)
        del admin["checkpoint"]
        settings = {**served["own"].settings, **admin, "grpc__port": free_port()}
        with fake("--forward-ms=5", *faults, **settings) as server:
            ports = {name: int(str(settings[f"{name}__port"])) for name in ("admin", "grpc")}
            with _crowd({"main": server.port, **ports}, high, rank_request) as crowd:
                yield crowd


@contextmanager
def explained() -> Iterator[Crowd]:
    """A server with the demo checkpoint, a client that ranks its example, and attackers that ask to explain it."""

    def request(number: int) -> bytes:
        return post("localhost", "/rank", orjson.dumps(EXAMPLE | {"user_id": number}))

    with real() as server, _crowd({"main": server.port}, 90.0, request) as crowd:
        yield crowd


@contextmanager
def _crowd(ports: Ports, high: float, request: Callable[[int], bytes]) -> Iterator[Crowd]:
    numbers, (ours, theirs) = itertools.count(1), multiprocessing.Pipe()
    ranker = Callers(ports["main"], 1, lambda _: request(next(numbers)), pause_seconds=PAUSE_SECONDS)
    with apart(_attack, ports, theirs), ranker:
        ours.recv()
        wait_until(lambda: ranker.replies, REPLY_SECONDS)
        yield Crowd(ranker, ours, high)


def crowds(seconds: float) -> list[Row]:
    """B15: the worst path for each number of clients, at both percentiles."""
    with crowded() as crowd:
        window = max(0.5, seconds / (2.5 * len(COUNTS) * len(ATTACKERS)))
        felt = {(name, count): crowd.measure([name] * count, window) for count in COUNTS for name in ATTACKERS}
    rows = []
    for count in COUNTS:
        found = {name: each for (name, number), each in felt.items() if number == count}
        missed = sum(len(unanswered(each.answered)) for each in found.values())
        for what, limit in (("p50", P50_TIMES), ("p99", P99_TIMES)):
            worst = max(found, key=lambda name: getattr(found[name], what))
            tried, failed = sum(each.tried for each in found.values()), sum(each.refused for each in found.values())
            told = f"{count} beside a ranker, on each of {len(found)} paths; worst: {worst}: {what}"
            rows.append(Row("B15", told, tried, failed + missed, getattr(found[worst], what), limit, "× alone"))
    return rows
