"""G1 to G4: several processes behind HAProxy or nginx: who moves when one more comes, what is lost when one dies, stops or is replaced."""

from __future__ import annotations

import asyncio
import itertools
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import httpx
import orjson
from phoenix_ranker_client import AsyncRankerClient, Candidate, RankerError
from phoenix_ranker_client.call import routing_key

from loadtest.generate.http_client import Client
from loadtest.generate.payload import rank_request
from loadtest.matrix import Row
from loadtest.servers.balancer import HAPROXY, NGINX, SERVED_BY, Balancer, Change, balancer
from loadtest.servers.launch import HOST, Server, free_port
from loadtest.servers.target import Target
from loadtest.soak.servers import real

CANDIDATES = 8
CLIENTS = 8
HOP_REQUESTS = 300
LARGE = [Candidate(2**63 + post, 2**63 + post % 100, 1, 1779990000) for post in range(1400)]
"""A request for them is 73 KB, which does not fit into HAProxy's buffer: it cannot send that one again."""
FROZEN_SECONDS = 7.0


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
def two_processes() -> Iterator[Processes]:
    """Two processes run, and a third may come."""
    processes = Processes(3)
    try:
        processes.start(0)
        processes.start(1)
        yield processes
    finally:
        processes.close()


@contextmanager
def behind(processes: Processes, count: int, kind: Balancer, *changes: Change) -> Iterator[Target]:
    """The balancer in front of the first `count`, once it knows which of them run."""
    with balancer(processes.ports[:count], *changes, kind=kind) as target:
        time.sleep(kind.settled_seconds)
        yield target


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
    """Ask once for each user, one after the other: with many in flight, some go elsewhere for the sake of the load."""
    placed, before = Placed(), _hits(processes)
    async with Client(HOST, target.port, max_connections=1, keep_bodies=True) as client:
        for user in users:
            reply = await client.ask(asked(user))
            assert reply.status == 200, (reply.status, reply.failure)
            placed.servers[user] = reply.headers.get(SERVED_BY.encode(), b"").rpartition(b", ")[2]
            placed.scores[user] = orjson.dumps(orjson.loads(reply.body)["candidates"])
    placed.hits = (_hits(processes) - before) / len(users)
    return placed


def _hits(processes: Processes) -> float:
    scraped = (server.target.scrape() for server in processes.running.values())
    return sum(each.total("ranker_context_cache_lookups_total", result="hit") for each in scraped)


def one_more(processes: Processes, users: int, kind: Balancer, *changes: Change) -> list[Row]:
    """G1: two processes become three. Few users move, most find their contexts, and the scores are those of before."""
    with behind(processes, 3, kind, *changes) as target:

        def once() -> Placed:
            return asyncio.run(place(target, processes, range(1, users + 1)))

        once()
        steady = once()
        processes.start(2)
        time.sleep(kind.settled_seconds)
        after, settled = once(), once()
        processes.end(2)
    moved = sum(after.servers[user] != server for user, server in steady.servers.items()) / users
    other = sum(after.scores[user] != scores for user, scores in steady.scores.items())
    return [
        Row("G1", f"{kind.name}: two processes become three: users that move", users, 0, moved, 1.25 / 3, ""),
        Row("G1", f"{kind.name}: cache hits before", users, 0, steady.hits, 0.98, "of the requests", True),
        Row(
            "G1",
            f"{kind.name}: cache hits right after",
            users,
            0,
            after.hits,
            0.95 * 2 / 3 * steady.hits,
            "of the requests",
            True,
        ),
        Row(
            "G1",
            f"{kind.name}: cache hits once every user was back",
            users,
            0,
            settled.hits,
            0.98,
            "of the requests",
            True,
        ),
        Row("G1", f"{kind.name}: users whose scores depend on the process", users, other, other, 0, "users"),
    ]


def hop(processes: Processes, kind: Balancer, requests: int = HOP_REQUESTS) -> Row:
    """What the balancer adds to a request at one connection: asked through it and directly, in turns."""

    async def measure(target: Target) -> float:
        seconds: dict[int, list[float]] = {target.port: [], processes.ports[0]: []}
        async with (
            Client(HOST, target.port, max_connections=1) as through,
            Client(HOST, processes.ports[0], max_connections=1) as direct,
        ):
            for user in range(requests):
                for client in (through, direct):
                    reply = await client.ask(asked(user % 20 + 1))
                    assert reply.status == 200
                    seconds[client.port].append(reply.done_at - reply.sent_at)
        return statistics.median(seconds[target.port]) - statistics.median(seconds[processes.ports[0]])

    with balancer(processes.ports[:1], kind=kind) as target:
        added = asyncio.run(measure(target))
    return Row("G1", f"what {kind.name} adds, p50", requests, 0, 1e3 * added, 0.3, "ms")


@dataclass
class Load:
    """Clients that ask, each for one user after the other, until `stop`; what they did not get, and the seconds of the slowest reply.

    Small requests are sent once. With `large` ones the client library asks, and repeats what may succeed elsewhere.
    """

    target: Target
    large: bool = False
    answered: int = 0
    lost: int = 0
    slowest: float = 0.0
    stop: bool = False

    async def run(self) -> None:
        """Until `stop` is set."""
        users = itertools.count(1)
        # on a connection that it kept, HAProxy says nothing of a process that died: it closes it, and there is no 502
        new_each_time = httpx.AsyncClient(limits=httpx.Limits(max_keepalive_connections=0))
        async with (
            Client(HOST, self.target.port, max_connections=CLIENTS) as client,
            AsyncRankerClient(self.target.origin, http=new_each_time) as library,
        ):

            async def once(user: int) -> bool:
                return (await client.ask(asked(user))).status == 200

            async def large(user: int) -> bool:
                with suppress(RankerError):
                    await library.rank(user, LARGE, timeout_seconds=3)  # for more, a balancer waits
                    return True
                return False

            await asyncio.gather(*(self._client(large if self.large else once, users) for _ in range(CLIENTS)))

    async def _client(self, ask: Callable[[int], Awaitable[bool]], users: Iterator[int]) -> None:
        while not self.stop:
            began = time.monotonic()
            is_answered = await ask(next(users) % 1000 + 1)
            self.slowest = max(self.slowest, time.monotonic() - began)
            self.answered += is_answered
            self.lost += not is_answered


async def _under_load(load: Load, harm: Callable[[], None]) -> Load:
    """Do `harm` in a thread while clients ask, with as many requests in flight as there are clients."""
    running = asyncio.create_task(load.run())
    await asyncio.sleep(1)
    await asyncio.to_thread(harm)
    await asyncio.sleep(1)
    load.stop = True
    await running
    return load


def deaths(processes: Processes, runs: int, kind: Balancer, *changes: Change, large: bool = False) -> Row:
    """G2: `kill -9` of one process under load, and another one started in its place: nothing is lost, since a ranking is asked again."""
    with behind(processes, 2, kind, *changes) as target:

        def harm() -> None:
            for run in range(runs):
                processes.running[run % 2].pause()  # so that the signal meets requests in flight
                time.sleep(0.5)
                processes.end(run % 2, signal.SIGKILL)
                time.sleep(0.5)
                processes.start(run % 2)
                time.sleep(kind.settled_seconds)

        load = asyncio.run(_under_load(Load(target, large), harm))
    size = "73 KB a request, " * large
    what = f"{kind.name}: a process killed under load, {size}{load.answered} answered"
    return Row("G2", what, runs, 0, load.lost / runs, 0, "requests lost a kill")


def frozen(processes: Processes, kind: Balancer, *changes: Change, large: bool = False) -> Row:
    """G4: a process that is stopped under load and goes on later: nothing is lost, and nobody waits for it longer than two seconds."""
    with behind(processes, 2, kind, *changes) as target:

        def harm() -> None:
            processes.running[0].pause()
            time.sleep(FROZEN_SECONDS)
            processes.running[0].resume()

        load = asyncio.run(_under_load(Load(target, large), harm))
    size = "73 KB a request, " * large
    what = f"{kind.name}: a process frozen for {FROZEN_SECONDS:.0f} s under load, {size}{load.answered} answered"
    return Row("G4", what, load.answered, load.lost, load.slowest, 2, "s until the slowest reply")


def rolling(
    processes: Processes, numbers: Sequence[int], kind: Balancer, *changes: Change, by: signal.Signals = signal.SIGTERM
) -> Row:
    """G3: these processes replaced in turn, by SIGTERM and a new one, under load: nothing is lost. `by`: a control's other signal."""
    codes: list[int] = []
    with behind(processes, 2, kind, *changes) as target:

        def harm() -> None:
            for number in numbers:
                codes.append(processes.end(number, by))
                processes.start(number)
                time.sleep(kind.settled_seconds)

        load = asyncio.run(_under_load(Load(target), harm))
    failed = sum(code != 0 for code in codes)
    return Row(
        "G3",
        f"{kind.name}: rolling update under load, {load.answered} answered",
        len(codes),
        failed,
        load.lost,
        0,
        "requests lost",
    )


def all_rows(runs: int) -> list[Row]:
    """The long form, with each balancer that is installed."""
    rows = []
    with two_processes() as processes:
        for kind in (HAPROXY, NGINX):
            if not kind.program:
                print(f"{kind.name} is not installed: its rows are left out", file=sys.stderr)
                continue
            rows += [*one_more(processes, 2000, kind), hop(processes, kind), deaths(processes, runs, kind)]
            rows += [deaths(processes, runs, kind, large=True)]
            rows += [frozen(processes, kind, large=large) for large in (False, True)]
            rows.append(rolling(processes, (0, 1) * runs, kind))
    return rows
