"""G1 to G4: processes behind HAProxy or nginx. Which users move if one is added; what is lost if one dies, stops or is replaced."""

from __future__ import annotations

import asyncio
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

import httpx
import orjson
from phoenix_ranker_client import AsyncRankerClient, Candidate, RankerError
from phoenix_ranker_client.calls import routing_key

from loadtest.generate.http_client import Reply
from loadtest.generate.payload import rank_request
from loadtest.matrix import Row
from loadtest.servers.balancer import HAPROXY, NGINX, SERVED_BY, Balancer, Change, balancer
from loadtest.servers.launch import HOST, Server, free_port
from loadtest.servers.target import Target
from loadtest.soak.clients import Callers, ask_all, percentile
from loadtest.soak.servers import real

CANDIDATES = 8
CLIENTS = 8
HOP_TURNS = 15  # of twenty requests each
LARGE = [Candidate(2**63 + post, 2**63 + post % 100, 1, 1779990000) for post in range(1400)]
"""A request with these is 73 KB, too large for HAProxy's buffer, so HAProxy cannot resend it."""
LARGE_CLIENTS = 4  # one process can serve four alone; of eight it would refuse some, which retry a second later
FROZEN_SECONDS = 7.0


class Processes:
    """Servers of the demo on fixed ports, running or not. `settings`: further settings of a server, by its number."""

    def __init__(self, count: int, settings: Callable[[int], dict[str, Any]] = lambda number: {}) -> None:
        self.ports = [free_port() for _ in range(count)]
        self.settings = settings
        self.running: dict[int, Server] = {}
        self._stacks: dict[int, ExitStack] = {}

    def start(self, number: int) -> None:
        """Start a server and wait until it is ready."""
        stack = ExitStack()
        wanted = {"port": self.ports[number], "threads": 1, "drain__delay_seconds": 0.5, **self.settings(number)}
        server = stack.enter_context(real(**wanted))
        self.running[number], self._stacks[number] = server, stack

    def end(self, number: int, by: signal.Signals = signal.SIGTERM) -> int:
        """End a server with this signal; return its exit code."""
        server = self.running.pop(number)
        server.process.send_signal(by)
        code = server.process.wait(60)
        self._stacks.pop(number).close()
        return code

    @contextmanager
    def begun(self, count: int) -> Iterator[Self]:
        """Start the first `count` servers; at the end of the block end all that run."""
        try:
            for number in range(count):
                self.start(number)
            yield self
        finally:
            for number in list(self.running):
                self.end(number)


def two_processes() -> AbstractContextManager[Processes]:
    """Two running processes; a third can be started."""
    return Processes(3).begun(2)


@contextmanager
def behind(processes: Processes, count: int, kind: Balancer, *changes: Change) -> Iterator[Target]:
    """The balancer in front of the first `count` processes, after it has noticed which of them run."""
    with balancer(processes.ports[:count], *changes, kind=kind) as target:
        time.sleep(kind.settled_seconds)
        yield target


@dataclass(frozen=True)
class Placed:
    """By user, the server that answered and the scores; and the share of requests that hit the context cache."""

    servers: dict[int, bytes]
    scores: dict[int, bytes]
    hits: float


def asked(user: int) -> bytes:
    """A user's fixed request, with the routing key that the client library sends."""
    return rank_request(user, CANDIDATES, {"X-Routing-Key": routing_key(user)})


def place(target: Target, processes: Processes, users: Sequence[int]) -> Placed:
    """Send one request per user, one after the other. With many in flight, the balancer would move some to spread the load."""
    before = _hits(processes)
    replies = ask_all(target.port, [asked(user) for user in users], keep_bodies=True, timeout_seconds=120)
    assert {reply.status for reply in replies} == {200}, [reply.failure for reply in replies if reply.status != 200]
    return Placed(
        {user: reply.headers.get(SERVED_BY.encode(), b"").rpartition(b", ")[2] for user, reply in zip(users, replies, strict=True)},
        {user: orjson.dumps(orjson.loads(reply.body)["candidates"]) for user, reply in zip(users, replies, strict=True)},
        (_hits(processes) - before) / len(users),
    )  # fmt: skip


def _hits(processes: Processes) -> float:
    name = "ranker_context_cache_lookups_total"
    return sum(server.target.total(name, result="hit") for server in processes.running.values())


def one_more(processes: Processes, users: int, kind: Balancer, *changes: Change) -> list[Row]:
    """G1: two processes become three. Few users move, most contexts are still cached, and scores do not change."""
    with behind(processes, 3, kind, *changes) as target:

        def once() -> Placed:
            return place(target, processes, range(1, users + 1))

        once()
        steady = once()
        processes.start(2)
        time.sleep(kind.settled_seconds)
        after, settled = once(), once()
        processes.end(2)
    moved = sum(after.servers[user] != server for user, server in steady.servers.items()) / users
    other = sum(after.scores[user] != scores for user, scores in steady.scores.items())

    def hits(when: str, placed: Placed, least: float) -> Row:
        return Row("G1", f"{kind.name}: cache hits {when}", users, 0, placed.hits, least, "of the requests", True)

    return [
        Row("G1", f"{kind.name}: two processes become three: users that move", users, 0, moved, 1.25 / 3, ""),
        hits("before", steady, 0.98),
        hits("right after", after, 0.95 * (1 - moved) * steady.hits),
        hits("once every user was back", settled, 0.98),
        Row("G1", f"{kind.name}: users whose scores depend on the process", users, other, other, 0, "users"),
    ]


def hop(processes: Processes, kind: Balancer) -> Row:
    """Latency that the balancer adds at one connection: requests through it and directly, in turns."""
    seconds: list[list[float]] = [[], []]
    with balancer(processes.ports[:1], kind=kind) as target:
        for _ in range(HOP_TURNS):
            for found, port in zip(seconds, (target.port, processes.ports[0]), strict=True):
                replies = ask_all(port, [asked(user) for user in range(1, 21)])
                assert {reply.status for reply in replies} == {200}
                found += [reply.done_at - reply.sent_at for reply in replies]
    added = statistics.median(seconds[0]) - statistics.median(seconds[1])
    return Row("G1", f"what {kind.name} adds, p50", len(seconds[0]), 0, 1e3 * added, 0.3, "ms")


class Library(Callers):
    """Clients that send large requests through the client library, which retries what another server may answer."""

    async def _run(self) -> None:
        # if a process dies, HAProxy closes a kept-alive connection without a 502
        new_each_time = httpx.AsyncClient(limits=httpx.Limits(max_keepalive_connections=0))
        async with AsyncRankerClient(f"http://{HOST}:{self.port}", http=new_each_time) as library:
            await asyncio.gather(*(self._rank(library, random.Random(seed)) for seed in range(self.clients)))

    async def _rank(self, library: AsyncRankerClient, draw: random.Random) -> None:
        while not self.stop:
            reply = Reply(asked_at=time.monotonic())
            with suppress(RankerError):
                await library.rank(draw.randrange(1, 1001), LARGE, timeout_seconds=3)  # with more, a balancer waits
                reply.status = 200
            reply.done_at = time.monotonic()
            self.replies.append(reply)


def under_load(
    processes: Processes, kind: Balancer, changes: Sequence[Change], harm: Callable[[], None], large: bool = False
) -> tuple[int, int, float]:
    """Run `harm` under load. Return the numbers of answered and lost requests, and the slowest one's seconds."""
    clients, count = (Library, LARGE_CLIENTS) if large else (Callers, CLIENTS)
    with (
        behind(processes, 2, kind, *changes) as target,
        clients(target.port, count, lambda draw: asked(draw.randrange(1, 1001))) as callers,
    ):
        time.sleep(1)
        harm()
        time.sleep(1)
    answered = sum(reply.status == 200 for reply in callers.replies)
    return answered, len(callers.replies) - answered, percentile(callers.replies, 100)


def deaths(processes: Processes, runs: int, kind: Balancer, *changes: Change, large: bool = False) -> Row:
    """G2: `kill -9` of a process under load, then a restart. Nothing is lost, since rankings are sent again."""

    def harm() -> None:
        for run in range(runs):
            processes.running[run % 2].pause()  # so that requests are in flight at the kill
            time.sleep(0.5)
            processes.end(run % 2, signal.SIGKILL)
            time.sleep(0.5)
            processes.start(run % 2)
            time.sleep(kind.settled_seconds)

    answered, lost, _ = under_load(processes, kind, changes, harm, large)
    what = f"{kind.name}: a process killed under load, {'73 KB a request, ' * large}{answered} answered"
    return Row("G2", what, runs, 0, lost / runs, 0, "requests lost a kill")


def frozen(processes: Processes, kind: Balancer, *changes: Change, large: bool = False) -> Row:
    """G4: a process is stopped under load and resumed. No request is lost, and none takes more than two seconds."""

    def harm() -> None:
        processes.running[0].pause()
        time.sleep(FROZEN_SECONDS)
        processes.running[0].resume()

    answered, lost, slowest = under_load(processes, kind, changes, harm, large)
    size = "73 KB a request, " * large
    what = f"{kind.name}: a process frozen for {FROZEN_SECONDS:.0f} s under load, {size}{answered} answered"
    return Row("G4", what, answered, lost, slowest, 2, "s until the slowest reply")


def rolling(
    processes: Processes, numbers: Sequence[int], kind: Balancer, *changes: Change, by: signal.Signals = signal.SIGTERM
) -> Row:
    """G3: these processes are restarted in turn under load, with SIGTERM. Nothing is lost. `by`: the signal, another in a control."""
    codes: list[int] = []

    def harm() -> None:
        for number in numbers:
            codes.append(processes.end(number, by))
            processes.start(number)
            time.sleep(kind.settled_seconds)

    answered, lost, _ = under_load(processes, kind, changes, harm)
    what, failed = f"{kind.name}: rolling update under load, {answered} answered", sum(code != 0 for code in codes)
    return Row("G3", what, len(codes), failed, lost, 0, "requests lost")


def all_rows(runs: int) -> list[Row]:
    """All rows, for each installed balancer."""
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
