"""R1 to R3: changes, compacts and swaps a corpus and kills its server during searches; checks every answer against a replay."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import orjson

from loadtest.generate.http_client import Client, Reply
from loadtest.machine import DEMO
from loadtest.matrix import Row
from loadtest.servers.launch import HOST, Server
from loadtest.soak.clients import ask_all
from loadtest.soak.corpora import USERS, Edit, Oracle, corpora, search_request
from loadtest.soak.oracle import admin_client, admin_settings
from loadtest.soak.servers import real

SEARCHERS = 8
PATHS = ("/retrieve", "/recommend")
NEW_POSTS = 10**9
CLAIMED = 40  # posts that the control wrongly counts as deleted

Fault = Literal["forget", "claim", "half", "lose"]
"""The fault of a control. forget: the replay misses one change in three. claim: live posts count as deleted. half: a swap names
only the corpus. lose: a crash loses half of the log."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Maximum upserts or deletes of a change, and changes between two compactions and between two swaps."""

    posts: int = 20
    compact_every: int = 40
    swap_every: int = 100


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply to a search: corpus, number of changes, user, posts and scores."""

    corpus: str
    edits: int
    user: int
    posts: list[int]
    scores: bytes


@dataclass
class Searched:
    """Searches and changes one server at the same time, and records answers and faults."""

    oracles: Mapping[str, Oracle]
    admin_port: object
    pace: Pace = Pace()
    faults: Sequence[Fault] = ()
    serving: str = "a"
    swapping: bool = False
    swaps: int = 0
    compactions: int = 0
    refused: int = 0
    operations: int = 0
    dropped: int = 0
    crossed: int = 0
    stale: int = 0
    returned: int = 0
    answers: list[Answer] = field(default_factory=list)
    acknowledged: dict[str, int] = field(default_factory=lambda: {"a": 0, "b": 0})
    gone: dict[tuple[str, int], int] = field(default_factory=dict)
    """(corpus, post) → number of changes when its deletion was acknowledged."""
    stop: bool = False

    async def search(self, server: Server) -> None:
        """Send random searches until `stop` is set."""
        async with Client(HOST, server.port, max_connections=SEARCHERS, keep_bodies=True, timeout_seconds=20) as client:
            await asyncio.gather(*(self._search(client, random.Random(seed)) for seed in range(SEARCHERS)))

    async def _search(self, client: Client, draw: random.Random) -> None:
        while not self.stop:
            user, path = draw.randrange(USERS), draw.choice(PATHS)
            known, serving = dict(self.acknowledged), None if self.swapping else self.serving
            swaps = self.swaps
            reply = await client.ask(search_request(user, path))
            if reply.status != 200:
                self.dropped += 1
                continue
            answer = self._read(user, path, reply)
            is_settled = not self.swapping and swaps == self.swaps
            self.stale += answer.edits < known[answer.corpus] or (is_settled and serving not in (None, answer.corpus))
            gone = (self.gone.get((answer.corpus, post), 10**9) for post in answer.posts)
            self.returned += any(edits <= known[answer.corpus] for edits in gone)

    def _read(self, user: int, path: str, reply: Reply) -> Answer:
        content = orjson.loads(reply.body)
        corpus, _, before = content["corpus"]["version"].partition("+")
        if path == "/retrieve":
            towers, posts, score = content["model"], content["posts"], "score"
        else:
            towers, score = content["models"]["retrieval"], "retrieval_score"
            posts = sorted(content["candidates"], key=lambda row: int(row["retrieval_rank"]))
        self.crossed += towers["version"] != corpus
        edits = int(before or 0) + content["corpus"]["changes"]
        told, label = reply.headers[b"x-corpus-version"].decode(), f"{corpus}+{edits}" if edits else corpus
        self.crossed += (told.rpartition(".")[0] if edits else told) != label
        self.crossed += content["corpus"]["sequence"] != edits
        scores = np.array([row[score] for row in posts], np.float32).tobytes()
        answer = Answer(corpus, edits, user, [int(row["post_id"]) for row in posts], scores)
        self.answers.append(answer)
        return answer

    async def change(self, operations: int, draw: random.Random) -> None:
        """Upsert and delete `operations` posts, a few at a time, with compactions in parallel and swaps now and then."""
        async with admin_client(self.admin_port) as admin:
            compactions: list[asyncio.Task[None]] = []
            try:
                sent = 0
                while self.operations < operations:
                    await self._edit(admin, draw)
                    sent += 1
                    if sent % self.pace.compact_every == 0 and all(task.done() for task in compactions):
                        compactions.append(asyncio.get_running_loop().create_task(self._compact(admin)))
                    if sent % self.pace.swap_every == 0 and len(self.oracles) > 1:
                        await self._swap(admin)
            finally:
                await asyncio.gather(*compactions, return_exceptions=True)

    async def _edit(self, admin: httpx.AsyncClient, draw: random.Random) -> None:
        oracle = self.oracles[self.serving]
        live = list(oracle.live)
        taken = {}
        for _ in range(draw.randrange(self.pace.posts)):
            post = draw.choice(live) if draw.random() < 0.3 else draw.randrange(NEW_POSTS, 2 * NEW_POSTS)
            taken[post] = draw.randrange(1, 600)
        delete = [post for post in draw.sample(live, draw.randrange(1, 1 + self.pace.posts)) if post not in taken]
        edit = Edit(delete, list(taken.items()))
        for post in taken:
            self.gone.pop((oracle.name, post), None)
        oracle.add(edit)
        reply = await admin.post("/admin/posts", json=edit.body())
        reply.raise_for_status()
        self.operations += len(edit.delete) + len(edit.upsert)
        self.acknowledged[oracle.name] = len(oracle.edits)
        self.gone |= {(oracle.name, post): len(oracle.edits) for post in edit.delete}
        if "forget" in self.faults and len(oracle.edits) % 3 == 0:
            oracle.edits[-1] = Edit([], [])
        if "claim" in self.faults:
            self.gone |= {(oracle.name, post): len(oracle.edits) for post in live[:CLAIMED]}

    async def _compact(self, admin: httpx.AsyncClient) -> None:
        status = (await admin.post("/admin/posts/compact")).status_code
        if status == 200:
            self.compactions += 1
        elif status != 409:  # a swap came first
            self.refused += 1

    async def _swap(self, admin: httpx.AsyncClient) -> None:
        self.swapping, other = True, "b" if self.serving == "a" else "a"
        names = {"retrieval": self.oracles[other].towers.name, "corpus": self.oracles[other].corpus.name}
        if "half" in self.faults:
            del names["retrieval"]
        reply = await admin.post("/admin/reload", json=names)
        is_done = reply.status_code == 200
        self.refused += not is_done
        self.serving, self.swapping = other if is_done else self.serving, False
        self.swaps += 1

    def differing(self) -> int:
        """Number of answers that differ from the replay in posts, order or a bit of a score."""
        return sum(
            (answer.posts, answer.scores) != self.oracles[answer.corpus].expected(answer.user, answer.edits)
            for answer in sorted(self.answers, key=lambda answer: answer.edits)
        )


def settings_of(root: Path, oracle: Oracle) -> dict[str, Any]:
    """Settings of a server that serves this corpus, and whose admin port may load others below `root`."""
    return {
        **admin_settings(root),
        "checkpoint": DEMO,
        "admin__root": root,
        **oracle.settings,
        "threads": 1,
        "queue__max_wait_seconds": 5,
    }


def changes(operations: int, pace: Pace = Pace(), faults: Sequence[Fault] = (), **further: Any) -> list[Row]:
    """R1, R2 and R3 while `operations` posts are upserted or deleted. `further`: more settings of the server."""
    with corpora("a", "b") as oracles:
        settings = settings_of(oracles["a"].root, oracles["a"]) | further
        with real(**settings) as server, asyncio.Runner() as runner:
            searched = Searched(oracles, settings["admin__port"], pace, faults)
            runner.run(_both(searched, server, operations, random.Random(0)))
        different = searched.differing()
    count, moves = len(searched.answers), searched.swaps + searched.compactions
    beside = f"{searched.compactions} compactions, {searched.swaps} swaps"
    lost = searched.crossed + searched.dropped
    return [
        Row("R1", f"{searched.operations} upserts and deletes, {beside}: answers against a replay",
            count, different, searched.stale, 0, "older than an acknowledged change"),
        Row("R2", "deleted posts returned after the acknowledgement", count, searched.returned, 0, 0, ""),
        Row("R3", "swaps and compactions under load", moves, searched.refused, lost, 0, "crossed or dropped replies"),
    ]  # fmt: skip


async def _both(searched: Searched, server: Server, operations: int, draw: random.Random) -> None:
    searching = asyncio.create_task(searched.search(server))
    try:
        await searched.change(operations, draw)
    finally:
        searched.stop = True
        await searching


def kills(count: int, faults: Sequence[Fault] = ()) -> Row:
    """R1 with `kill -9` during changes and compactions: a restart has every acknowledged change, and no change in part."""
    draw, different, lost, answered = random.Random(1), 0, 0, 0
    with corpora("a") as oracles:
        oracle = oracles["a"]
        for _ in range(count):
            settings = settings_of(oracle.root, oracle)
            searched = Searched(oracles, settings["admin__port"], Pace(5, 8), faults)
            searched.acknowledged["a"] = len(oracle.edits)
            with real(**settings) as server, asyncio.Runner() as runner:
                runner.run(_killed(searched, server, draw))
            if "lose" in faults:
                oracle.lose_half()
            after = Searched(oracles, None)
            with real(**settings) as server:
                each_user(after, server)
            kept = after.answers[0].edits
            lost += kept < searched.acknowledged["a"]
            oracle.forget_after(kept)  # the change in flight may or may not be stored
            different += after.differing() + after.dropped
            answered += len(after.answers)
    return Row("R1", f"kill -9 while posts change, {count} times: answers after a start", answered, different, lost, 0,
               "starts without an acknowledged change")  # fmt: skip


async def _killed(searched: Searched, server: Server, draw: random.Random) -> None:
    """Kill the server while changes are made, once one of them was acknowledged."""
    before = searched.acknowledged["a"]
    changing = asyncio.create_task(searched.change(10**9, draw))
    await asyncio.sleep(0.2 + draw.random())
    while searched.acknowledged["a"] == before and not changing.done():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    server.process.send_signal(signal.SIGKILL)
    await asyncio.gather(changing, return_exceptions=True)


def each_user(searched: Searched, server: Server) -> None:
    """Send one search per user and record the answers."""
    asked = [search_request(user, PATHS[0]) for user in range(USERS)]
    for user, reply in enumerate(ask_all(server.port, asked, keep_bodies=True, timeout_seconds=20)):
        if reply.status == 200:
            searched._read(user, PATHS[0], reply)
        searched.dropped += reply.status != 200
