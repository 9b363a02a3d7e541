"""R4: two servers on one corpus directory are changed, compacted and killed; no acknowledged change may be lost."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from loadtest.matrix import Row
from loadtest.servers.launch import Server, free_port
from loadtest.soak.cluster import Processes
from loadtest.soak.corpora import POSTS, corpora
from loadtest.soak.oracle import admin_client
from loadtest.soak.posts import NEW_POSTS, settings_of

SEEN_SECONDS = 1.0  # limit until the other process serves a change

Fault = Literal["lose"]
"""The fault of a control: a kill loses half of the change log."""


@dataclass
class Pair:
    """Two servers on one corpus. Each post is deleted or added once, so that the expected corpus does not depend on the order."""

    processes: Processes
    admin_ports: Sequence[int]
    draw: random.Random
    compact_share: float = 0.5
    deleted: list[int] = field(default_factory=list)
    added: list[int] = field(default_factory=list)
    tried: int = 0
    compacted: int = 0
    kills: int = 0
    wrong: int = 0
    """Number of replies that are neither 200 nor a temporary refusal."""

    async def round(self, kill: bool) -> None:
        """Send both servers a change and sometimes a compaction, all at once. `kill`: kill one of them meanwhile."""
        calls = [self._change(number) for number in range(2)]
        calls += [self._compact(number) for number in range(2)] if self.draw.random() < self.compact_share else []
        self.draw.shuffle(calls)
        begun = [asyncio.ensure_future(call) for call in calls]
        if kill:
            victim = self.draw.randrange(2)
            await asyncio.sleep(self.draw.random() * 0.05)
            await asyncio.to_thread(self.processes.end, victim, signal.SIGKILL)
            self.kills += 1
            await asyncio.gather(*begun)
            await asyncio.to_thread(self.processes.start, victim)
        await asyncio.gather(*begun)

    async def ask(self, number: int, path: str, body: Any = None) -> httpx.Response | None:
        """Send a request to a server's admin port; None if the server is killed meanwhile."""
        async with admin_client(self.admin_ports[number]) as admin:
            with suppress(httpx.TransportError):
                return await admin.post(path, json=body)
        return None

    async def _change(self, number: int) -> None:
        self.tried += 1
        post = self.tried if self.tried < POSTS and self.draw.random() < 0.4 else NEW_POSTS + self.tried
        change = {"delete": [post]} if post < NEW_POSTS else {"upsert": [{"post_id": post, "author_id": 1 + post % 50}]}
        reply = await self.ask(number, "/admin/posts", change)
        if reply is not None and reply.status_code == 200:
            (self.deleted if post < NEW_POSTS else self.added).append(post)
        self._count(reply)

    async def _compact(self, number: int) -> None:
        reply = await self.ask(number, "/admin/posts/compact")
        self.compacted += reply is not None and reply.status_code == 200
        self._count(reply)

    def _count(self, reply: httpx.Response | None) -> None:
        allowed = {"not_stored", "reload_in_progress", "overloaded", "corpus_not_loaded"}
        self.wrong += reply is not None and reply.status_code != 200 and reply.json()["code"] not in allowed

    async def lost(self) -> int:
        """Number of acknowledged changes that a restarted server does not know, found by deleting those posts again."""
        found = []
        for posts in (self.deleted, self.added):
            reply = await self.ask(0, "/admin/posts", {"delete": [*posts, NEW_POSTS - 1]})
            assert reply is not None
            found.append(int(reply.json()["deleted"]))
        return found[0] + len(self.added) - found[1]

    async def seconds_until_seen(self) -> float:
        """Seconds from one server's acknowledgement of a change until the other serves it, at most 60."""
        for number, other in ((0, 1), (1, 0)):
            added = {"post_id": NEW_POSTS // 2 + self.tried, "author_id": 1}
            reply = await self.ask(number, "/admin/posts", {"upsert": [added]})
            if reply is not None and reply.status_code == 200:
                began, corpus = time.monotonic(), reply.json()["corpus"]
                while time.monotonic() - began < 60:
                    served = await asyncio.to_thread(_served, self.processes.running[other])
                    if served == (corpus["version"], corpus["changes"]):
                        return time.monotonic() - began
                    await asyncio.sleep(0.01)
        return 60.0


def _served(server: Server) -> tuple[str, int]:
    corpus = httpx.post(f"{server.url}/retrieve", json={"user_id": 1, "history": [], "k": 1}).json()["corpus"]
    return corpus["version"], corpus["changes"]


def pairs(
    rounds: int,
    kill_every: int = 50,
    faults: Sequence[Fault] = (),
    *,
    compact_share: float = 0.5,
    seconds: float = 600.0,
) -> list[Row]:
    """R4 in `rounds` rounds, or fewer if time runs out. `compact_share`: share of rounds in which both servers compact."""
    admin_ports = [free_port(), free_port()]
    with corpora("a") as oracles, asyncio.Runner() as runner, ExitStack() as stack:
        settings = settings_of(oracles["a"].root, oracles["a"])
        processes = Processes(2, lambda number: settings | {"admin__port": admin_ports[number]})
        stack.enter_context(processes.begun(2))
        pair = Pair(processes, admin_ports, random.Random(0), compact_share)
        until, done, lags = time.monotonic() + seconds, 0, list[float]()
        while done < rounds and time.monotonic() < until:
            done += 1
            runner.run(pair.round(done % kill_every == 0))
            if done % kill_every == kill_every // 2:
                lags.append(runner.run(pair.seconds_until_seen()))
        for number in range(2):
            processes.end(number, signal.SIGKILL)
        if "lose" in faults:
            oracles["a"].lose_half()
        processes.start(0)
        lost = runner.run(pair.lost())
    known = len(pair.deleted) + len(pair.added)
    beside = f"{done} rounds, {pair.compacted} compactions, {pair.kills + 2} kills"
    return [
        Row("R4", f"two servers on one corpus, {beside}: acknowledged changes", known, pair.wrong, lost, 0, "lost"),
        Row("R4", "a change through one server, until the other serves it", len(lags), 0, max(lags, default=60.0),
            SEEN_SECONDS, "s"),
    ]  # fmt: skip
