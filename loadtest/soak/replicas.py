"""R6 and R7: three replicas follow one Redis stream under load. Kills replicas and Redis at random, then compares all replicas."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import orjson
import typer
from phoenix_ranker_client.calls import routing_key

from loadtest.generate.payload import post
from loadtest.machine import DEMO_POSTS, DEMO_TOWERS, ROOT
from loadtest.matrix import Row, table
from loadtest.servers.balancer import balancer
from loadtest.servers.launch import wait_until
from loadtest.servers.stream import RedisServer
from loadtest.soak.clients import ask_all, percentile
from loadtest.soak.cluster import Processes
from loadtest.soak.servers import real

STREAM = "posts"
REPLICAS = 3
PER_SECOND = 2000.0
DELETED_SHARE = 0.05
IDS = range(10**6, 10**6 + 20_000)  # posts that change, none of them in the initial corpus
USERS, TOP = 500, 200
SEARCHES = 200  # per reading, one after the other


def search(user: int, top: int = 50, at_least: str = "") -> bytes:
    """A user's request to `/retrieve`, as bytes ready to send."""
    headers = {"X-Routing-Key": routing_key(user)} | ({"X-Corpus-At-Least": at_least} if at_least else {})
    return post("localhost", "/retrieve", orjson.dumps({"user_id": user, "k": top}), headers)


@dataclass
class Writer:
    """Writes upserts and deletes from a thread at a steady rate. Failed writes are dropped, as replicas are compared with the stream."""

    redis: RedisServer
    per_second: float = PER_SECOND
    written: int = 0
    _stopped: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Writer:
        self._thread = threading.Thread(target=self._write)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _write(self) -> None:
        import redis

        client, draw = self.redis.client(), random.Random(self.written)
        began = time.monotonic()
        while not self._stopped.wait(0.01):
            due = int((time.monotonic() - began) * self.per_second) - self.written
            with suppress(redis.RedisError):
                pipe = client.pipeline(transaction=False)
                for _ in range(due):
                    pipe.xadd(STREAM, {"change": json.dumps(change(draw))})
                pipe.execute()
            self.written += due


def change(draw: random.Random) -> dict[str, Any]:
    """One random upsert or delete, as `POST /admin/posts` takes it."""
    one = draw.choice(IDS)
    if draw.random() < DELETED_SHARE:
        return {"delete": [one]}
    return {"upsert": [{"post_id": one, "author_id": draw.randrange(1, 500)}]}


class Fleet(Processes):
    """Three replicas of the demo, each with its own persistent copy of the corpus, that follow a Redis stream."""

    def __init__(self, root: Path, redis: RedisServer) -> None:
        self.redis = redis
        base = built(root / "base", posts())
        for number in range(REPLICAS):
            shutil.copytree(base, root / f"corpus-{number}")
        followed = {"retrieval__checkpoint": DEMO_TOWERS, "retrieval__feed": redis.url(STREAM)}
        super().__init__(REPLICAS, lambda number: followed | {"retrieval__corpus": root / f"corpus-{number}"})

    def states(self) -> list[dict[str, Any]]:
        """The corpus part of each replica's `/info`."""
        return [httpx.get(f"{one.url}/info", timeout=10).json()["retrieval"]["corpus"] for one in self.running.values()]

    def wait_for(self, position: str, seconds: float) -> bool:
        """Wait until all replicas have applied the stream up to `position`; return whether they did in time."""

        def are_there() -> bool:
            with suppress(httpx.HTTPError, KeyError, TypeError):
                return all(state["position"] == position for state in self.states())
            return False

        return wait_until(are_there, seconds, 0.1)


@contextmanager
def fleet() -> Iterator[tuple[Fleet, Path]]:
    """Yield a running fleet and its directory."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        with RedisServer(root / "redis") as redis, Fleet(root, redis).begun(REPLICAS) as made:
            yield made, root


def lags(made: Fleet, seconds: float) -> list[float]:
    """Seconds from a write until each replica answers a request that requires it. One write after the other."""
    client, found, until = made.redis.client(), list[float](), time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.monotonic()
        position = client.xadd(STREAM, {"change": json.dumps(change(random.Random(len(found))))}).decode()
        for port in made.ports:
            while ask_all(port, [search(1, 1, position)])[0].status != 200:
                time.sleep(0.01)
            found.append(time.monotonic() - began)
    return found


def under_load(seconds: float, per_second: float = PER_SECOND) -> list[Row]:
    """R6: lag, and the slowdown of searches through HAProxy while posts change. Readings alternate with and without changes."""
    with fleet() as (made, _), balancer(made.ports) as target:
        time.sleep(2.5)
        payloads = [search(user) for user in range(1, SEARCHES + 1)]
        readings: list[list[float]] = [[], []]
        refused, tried, written, seen = 0, 0, 0.0, list[float]()
        began = time.monotonic()
        while time.monotonic() - began < seconds or len(readings[1]) < 2:
            for kind, rate in enumerate((1.0, per_second)):
                with Writer(made.redis, rate) as writer:
                    started = time.monotonic()
                    replies = ask_all(target.port, payloads)
                    if kind:
                        seen += lags(made, min(5.0, seconds / 4))
                        written = max(written, writer.written / (time.monotonic() - started))
                readings[kind].append(percentile(replies))
                refused += sum(reply.status != 200 for reply in replies)
                tried += len(replies)
        ratio = float(np.median([with_ / without for without, with_ in zip(*readings, strict=True)]))
    lag = float(np.percentile(seen, 99))
    fed = f"{per_second:g} changes/s into three replicas: written"
    return [
        Row("R6", fed, 1, 0, written, 0.97 * per_second, "/s", True),
        Row("R6", "until every replica serves a change: p99", len(seen), 0, lag, 1.0, "s"),
        Row("R6", "a search through HAProxy beside them: p99", tried, refused, ratio, 1.5, "× without"),
    ]


def kills(count: int, seconds: float, per_second: float = PER_SECOND, *, spoil: bool = False) -> list[Row]:
    """R7: kill replicas `count` times and Redis once while posts change, then compare sequences, digests and best posts.

    `spoil`: the control, which deletes an entry from the stream after all replicas have applied it.
    """
    draw = random.Random(0)
    with fleet() as (made, root):
        began = time.monotonic()
        with Writer(made.redis, per_second):
            done = 0
            while done < count and time.monotonic() - began < seconds:
                number = draw.randrange(REPLICAS)
                time.sleep(draw.uniform(0, 1.5))
                made.end(number, signal.SIGKILL)
                if done == count // 2:
                    made.redis.kill()
                    time.sleep(draw.uniform(0, 1.0))
                    made.redis.start()
                made.start(number)
                done += 1
        client = made.redis.client()
        if spoil:
            one = json.dumps({"upsert": [{"post_id": IDS.stop, "author_id": 1}]})
            position = client.xadd(STREAM, {"change": one})
            client.xadd(STREAM, {"change": one.replace(str(IDS.stop), str(IDS.stop + 1))})
            made.wait_for(client.xinfo_stream(STREAM)["last-generated-id"].decode(), 60)
            client.xdel(STREAM, position)
        info = client.xinfo_stream(STREAM)
        whole = made.wait_for(info["last-generated-id"].decode(), 120)
        states, entries = made.states(), info["length"]
        lost = sum(abs(state["sequence"] - entries) for state in states) if whole else entries
        digests = {state["changes_digest"] for state in states}
        differing = _differing(made, built(root / "at-once", left(client)))
    killed = f"{done} kills of replicas and one of Redis: {entries} changes, lost or made twice"
    return [
        Row("R7", killed, done, 0, lost, 0, ""),
        Row("R7", "different digests of three replicas", len(states), len(digests) - 1, len(digests), 1, ""),
        Row("R7", f"users whose best {TOP} differ, beside a corpus built at once", USERS, differing, differing, 0, ""),
    ]


def posts() -> dict[int, int]:
    """The author of each post of the demo."""
    from safetensors.numpy import load_file

    rows = load_file(DEMO_POSTS / "posts.safetensors")
    return dict(zip(rows["post_ids"].tolist(), rows["author_ids"].tolist(), strict=True))


def left(client: Any) -> dict[int, int]:
    """The author of each post after applying the whole stream, in corpus order."""
    found = posts()
    for _, fields in client.xrange(STREAM):
        wanted = orjson.loads(fields[b"change"])
        rows = {row["post_id"]: row["author_id"] for row in wanted.get("upsert", ())}
        for gone in (*wanted.get("delete", ()), *rows):
            found.pop(gone, None)
        found |= rows
    return found


def built(directory: Path, authors: dict[int, int]) -> Path:
    """Build a corpus with `weights corpus build`, since vectors made elsewhere may differ in their last bits."""
    source = directory.with_suffix(".npz")
    np.savez(source, post_ids=np.array(list(authors), np.int64), author_ids=np.array(list(authors.values()), np.int64))
    build = [sys.executable, "-m", "weights", "corpus", "build"]
    subprocess.run(
        [*build, source, "--encoder", DEMO_TOWERS, "--out", directory], check=True, cwd=ROOT, capture_output=True
    )
    return directory


def _differing(made: Fleet, corpus: Path) -> int:
    """Number of users who get other posts or bits from a replica than from this corpus."""
    payloads = [search(user, TOP) for user in range(1, USERS + 1)]

    def best(port: int) -> list[bytes]:
        replies = ask_all(port, payloads, keep_bodies=True, timeout_seconds=60)
        return [_posts(reply.body) if reply.status == 200 else b"" for reply in replies]

    with real(threads=1, retrieval__checkpoint=DEMO_TOWERS, retrieval__corpus=corpus) as server:
        right = best(server.port)
    found = [best(port) for port in made.ports]
    return sum(not one or any(other != one for other in others) for one, *others in zip(right, *found, strict=True))


def _posts(body: bytes) -> bytes:
    return orjson.dumps([(row["post_id"], row["author_id"], row["score"]) for row in orjson.loads(body)["posts"]])


def all_rows(seconds: float, count: int) -> list[Row]:
    """R6 and R7, if redis-server is installed."""
    if not RedisServer.is_installed():
        return [Row("R6", "redis-server is not installed", 0, 0, 0, 0, "")]
    return under_load(seconds / 3) + kills(count, seconds)


def measure(
    seconds: Annotated[
        float, typer.Option(help="Seconds of changes under load; the kills may take as long again.")
    ] = 120.0,
    kills_of_replicas: Annotated[
        int, typer.Option("--kills", help="Kills of replicas at random moments; Redis is killed once.")
    ] = 100,
    per_second: Annotated[float, typer.Option(help="Changes written per second.")] = 2000.0,
) -> None:
    """Three replicas of one Redis stream behind HAProxy: lag, searches during changes, kills, equal posts. Exit code 1 if a row is red."""
    rows = under_load(seconds, per_second) + kills(kills_of_replicas, float("inf"), per_second)
    print(table(rows))
    raise typer.Exit(not all(row.ok for row in rows))
