"""G1 to G3: several processes behind HAProxy: which users move when one more comes, and what is lost when one dies or is replaced."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import orjson
from phoenix_ranker_client.call import routing_key

from loadtest.generate.http_client import Client
from loadtest.generate.payload import rank_request
from loadtest.matrix import Row
from loadtest.servers.balancer import SERVED_BY, balancer
from loadtest.servers.launch import HOST, Server, free_port
from loadtest.servers.target import Target
from loadtest.soak.servers import real

Changes = Sequence[tuple[str, str]]

AT_RANDOM: Changes = ((r"balance hdr\(x-routing-key\)", "    balance random"),)
WITHOUT_RETRIES: Changes = (
    ("retries 1", "    retries 0"),
    ("option redispatch 1", ""),
    ("retry-on .*", "    retry-on none"),
)
CANDIDATES = 8
CLIENTS = 8
SETTLED_SECONDS = 2.5  # the health checks and the slow start of the tests


class Processes:
    """Processes of the demo on ports that they keep, whether they run or not."""

    def __init__(self, count: int) -> None:
        self.ports = [free_port() for _ in range(count)]
        self.running: dict[int, Server] = {}
        self._stacks: dict[int, ExitStack] = {}

    def start(self, number: int) -> None:
        """Start one, and wait until it is ready."""
        stack = ExitStack()
        server = stack.enter_context(real(port=self.ports[number], threads=1, drain__delay_seconds=0.5))
        self.running[number], self._stacks[number] = server, stack

    def end(self, number: int, by: signal.Signals = signal.SIGTERM) -> int:
        """Its exit code."""
        server = self.running.pop(number)
        server.process.send_signal(by)
        code = server.process.wait(60)
        self._stacks.pop(number).close()
        return code

    def close(self) -> None:
        """End all."""
        for number in list(self.running):
            self.end(number)


@contextmanager
def cluster(running: int, ports: int = 0, changes: Changes = ()) -> Iterator[tuple[Processes, Target]]:
    """So many processes behind the balancer, which knows `ports` of them."""
    processes = Processes(ports or running)
    try:
        for number in range(running):
            processes.start(number)
        with balancer(processes.ports, *changes) as target:
            time.sleep(SETTLED_SECONDS)
            yield processes, target
    finally:
        processes.close()


@dataclass
class Placed:
    """Where each user's request went, with what scores, and the share that found its context in a cache."""

    servers: dict[int, bytes] = field(default_factory=dict)
    scores: dict[int, bytes] = field(default_factory=dict)
    hits: float = 0.0


def asked(user: int) -> bytes:
    """A user's request, always the same, with the key that the client library sends."""
    return rank_request(user, CANDIDATES, {"X-Routing-Key": routing_key(user)})


async def place(target: Target, processes: Processes, users: Sequence[int]) -> Placed:
    """Ask once for each user, who is refused never."""
    placed, waiting, before = Placed(), list(users), _hits(processes)

    async def ask(client: Client) -> None:
        while waiting:
            user = waiting.pop()
            reply = await client.ask(asked(user))
            assert reply.status == 200, (reply.status, reply.failure)
            placed.servers[user] = reply.headers.get(SERVED_BY.encode(), b"")
            placed.scores[user] = orjson.dumps(orjson.loads(reply.body)["candidates"])

    async with Client(HOST, target.port, max_connections=CLIENTS, keep_bodies=True) as client:
        await asyncio.gather(*(ask(client) for _ in range(CLIENTS)))
    placed.hits = (_hits(processes) - before) / len(users)
    return placed


def _hits(processes: Processes) -> float:
    scraped = (server.target.scrape() for server in processes.running.values())
    return sum(each.total("ranker_context_cache_lookups_total", result="hit") for each in scraped)


def one_more(users: int, before: int = 2, changes: Changes = ()) -> list[Row]:
    """G1: N processes become N + 1. Few users move, most find their contexts, and the scores are those of before."""
    with cluster(before, before + 1, changes) as (processes, target):

        def once() -> Placed:
            return asyncio.run(place(target, processes, range(1, users + 1)))

        once()
        steady = once()
        processes.start(before)
        time.sleep(SETTLED_SECONDS)
        after, settled = once(), once()
    moved = sum(after.servers[user] != server for user, server in steady.servers.items()) / users
    other = sum(after.scores[user] != scores for user, scores in steady.scores.items())
    share = before / (before + 1)
    return [
        Row("G1", f"{before} → {before + 1} processes: users that move", users, 0, moved, 1.25 * (1 - share), ""),
        Row("G1", "cache hits before", users, 0, steady.hits, 0.98, "of the requests", True),
        Row("G1", "cache hits right after", users, 0, after.hits, 0.95 * share * steady.hits, "of the requests", True),
        Row("G1", "cache hits once every user was back", users, 0, settled.hits, 0.98, "of the requests", True),
        Row("G1", "users whose scores depend on the process", users, other, other, 0, "users"),
    ]


@dataclass
class Load:
    """Clients that ask, each for one user after the other, until `stop`; what they did not get."""

    target: Target
    answered: int = 0
    lost: int = 0
    stop: bool = False

    async def run(self) -> None:
        """Until `stop` is set."""
        users = itertools.count(1)
        async with Client(HOST, self.target.port, max_connections=CLIENTS) as client:
            await asyncio.gather(*(self._client(client, users) for _ in range(CLIENTS)))

    async def _client(self, client: Client, users: Iterator[int]) -> None:
        while not self.stop:
            reply = await client.ask(asked(next(users) % 1000 + 1))
            self.answered += reply.status == 200
            self.lost += reply.status != 200


async def _under_load(target: Target, harm: Callable[[], None]) -> Load:
    """Do `harm` in a thread while clients ask."""
    load = Load(target)
    running = asyncio.create_task(load.run())
    await asyncio.sleep(1)
    await asyncio.to_thread(harm)
    await asyncio.sleep(1)
    load.stop = True
    await running
    return load


def deaths(runs: int, changes: Changes = ()) -> Row:
    """G2: `kill -9` of one process under load, and another one started in its place: nothing is lost, since a ranking is asked again."""
    with cluster(2, changes=changes) as (processes, target):

        def harm() -> None:
            for run in range(runs):
                processes.end(run % 2, signal.SIGKILL)
                time.sleep(0.5)
                processes.start(run % 2)
                time.sleep(SETTLED_SECONDS)

        load = asyncio.run(_under_load(target, harm))
    what = f"a process killed under load, {load.answered} answered"
    return Row("G2", what, runs, 0, load.lost / runs, 0, "requests lost a kill")


def rolling(runs: int, by: signal.Signals = signal.SIGTERM, changes: Changes = ()) -> Row:
    """G3: every process replaced in turn, by SIGTERM and a new one, under load: nothing is lost."""
    with cluster(2, changes=changes) as (processes, target):
        codes = []

        def harm() -> None:
            for number in range(2 * runs):
                codes.append(processes.end(number % 2, by))
                processes.start(number % 2)
                time.sleep(SETTLED_SECONDS)

        load = asyncio.run(_under_load(target, harm))
    failed = sum(code != 0 for code in codes)
    return Row(
        "G3", f"rolling update under load, {load.answered} answered", 2 * runs, failed, load.lost, 0, "requests lost"
    )
