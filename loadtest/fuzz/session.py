"""Runs the fuzzer against a service, in this process or another, and watches the service's memory."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import uvloop

from app import loop_lag
from app.assembly import build_service, create_reloader
from app.http.admin import create_admin_app
from app.http.application import create_app
from app.ports import create_grpc_server
from app.settings import Admin, Cache, Grpc, Logs, Queue, Retrieval, Settings
from app.telemetry import logs
from app.telemetry.metrics import Metrics
from loadtest.fuzz.checkpoints import damaged
from loadtest.fuzz.frames import linked
from loadtest.fuzz.run import Tally, fuzz, learn, series_by_route, sources
from loadtest.fuzz.slowest import SIZES, search, shown
from loadtest.fuzz.sources import corpus
from loadtest.fuzz.targets import InProcess, Sockets, Target
from loadtest.machine import DEMO, DEMO_POSTS, DEMO_TOWERS
from loadtest.matrix import Row
from loadtest.servers.launch import HOST, free_port, ranking_server
from model.native import build
from weights.checkpoint import load_manifest

PROGRESS_SECONDS = 10.0
TOKEN = "fuzz"  # noqa: S105
DIGEST = hashlib.sha256(TOKEN.encode()).hexdigest()
GROWTH_LIMIT, SLACK_BYTES = 16.0, 16 * 2**20  # an object leaked by each request would exceed this
CACHE_BYTES = 8 * 2**20  # small, since reloads empty the context cache and memory is compared


@dataclass(frozen=True)
class Fuzzed:
    """The fuzzed service: target of the calls, process id, metrics, OpenAPI document."""

    target: Target
    process: int
    metrics: Callable[[], bytes]
    document: dict[str, object]


def measure(
    requests: int = 1_000_000,
    seconds: float = 3600.0,
    checkpoint: Path = DEMO,
    seed: int = 0,
    sockets: bool = False,
    only_paths: bool = False,
    checkpoints: bool = False,
    slowest: bool = False,
) -> None:
    """Send odd requests, or load damaged checkpoints; prints one JSON line per row. Exit code 1 if a promise was broken.

    Stops after `requests` or `seconds`. `sockets`: use a separate server, also for calls that end a connection. `only_paths`: only
    unserved paths. `checkpoints`: damaged checkpoints instead of requests. `slowest`: search for the slowest bodies to read.
    """
    if slowest:
        for size in SIZES:
            for cost, recipe in search(size, seconds / len(SIZES), seed)[:10]:
                print(json.dumps(shown(cost, recipe, size), ensure_ascii=False), flush=True)
        return
    rows = [damaged(seconds)] if checkpoints else session(checkpoint, requests, seconds, seed, sockets, only_paths)
    for row in rows:
        print(row.to_json(), flush=True)
    sys.exit(not all(row.ok for row in rows))


def session(checkpoint: Path, requests: int, seconds: float, seed: int, sockets: bool, only_paths: bool) -> list[Row]:
    """Rows of the matrix after `requests` or `seconds`. Prints the first calls that broke a promise to standard error."""
    # makes native code end the process if it gets invalid input
    build.FLAGS = (*build.FLAGS, "-DRANKER_CHECKS")

    async def run(posts: Path) -> list[Row]:
        async with (server if sockets else in_process)(checkpoint, posts) as fuzzed:
            watch = Watch(fuzzed.process)
            calls = sources(fuzzed.document, seed, load_manifest(checkpoint), TOKEN)
            if sockets:
                del calls["frames"]  # a single-process server has no link between front and engine
            tally = await fuzz(
                fuzzed.target,
                {"paths": calls["paths"]} if only_paths else calls,
                lambda: series_by_route(fuzzed.metrics()),
                requests=requests,
                seconds=seconds,
                known=await learn(fuzzed.target, corpus(seed)),
                on_progress=watch.progress,
            )
            watch.look(tally)
            return [*tally.rows(), watch.row()]

    with open(os.devnull, "w") as nowhere, tempfile.TemporaryDirectory() as work:
        logs.configure(Logs(), nowhere)
        posts = shutil.copytree(DEMO_POSTS, Path(work) / DEMO_POSTS.name)  # changes are written next to the corpus
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            rows = runner.run(run(posts))
    return [row for row in rows if not only_paths or row.row == "B9"]


@asynccontextmanager
async def in_process(checkpoint: Path, posts: Path) -> AsyncIterator[Fuzzed]:
    """Run the applications in this process."""
    settings = Settings(
        checkpoint=checkpoint,
        cache=Cache(bytes=CACHE_BYTES),
        retrieval=Retrieval(checkpoint=DEMO_TOWERS, corpus=posts),
        logs=Logs(success_sample=0),
        queue=Queue(max_wait_seconds=0, stall_seconds=60, stall_exit_seconds=120),
        grpc=Grpc(port=0),
        admin=Admin(port=0, token_sha256=DIGEST),  # type: ignore[arg-type]
    )
    loop_lag.STANDING_SECONDS = math.inf  # time spent making calls would count as held by answering them
    service = build_service(settings, Metrics())
    app = create_app(settings, service)
    reloads = create_reloader(service, settings)
    admin = create_admin_app(settings.admin, reloads, service)
    service.start()
    await service.wait_ready()
    listener = create_grpc_server(app, settings)
    await listener.start()
    channel = grpc.aio.insecure_channel(f"{HOST}:{listener.port}")
    async with channel, linked(service, reloads, settings) as link:
        target = InProcess(channel, app, admin, link)
        yield Fuzzed(target, os.getpid(), service.metrics.render, app.pages.openapi())
    await listener.stop(1.0)
    await service.stop(1.0)


@asynccontextmanager
async def server(checkpoint: Path, posts: Path) -> AsyncIterator[Fuzzed]:
    """Run the server in another process."""
    admin_port, grpc_port = free_port(), free_port()
    with ranking_server(
        checkpoint=checkpoint,
        cache__bytes=CACHE_BYTES,
        retrieval__checkpoint=DEMO_TOWERS,
        retrieval__corpus=posts,
        admin__port=admin_port,
        admin__token_sha256=DIGEST,
        grpc__port=grpc_port,
        logs__level="error",
        queue__max_wait_seconds=0,
        queue__stall_seconds=60,
        queue__stall_exit_seconds=120,
    ) as started:
        channel = grpc.aio.insecure_channel(f"{HOST}:{grpc_port}")
        target = Sockets(channel, started.port, admin_port)
        async with httpx.AsyncClient(base_url=started.url) as client:
            document = (await client.get("/openapi.json")).json()
        yield Fuzzed(target, started.process.pid, lambda: httpx.get(f"{started.url}/metrics").content, document)
        await target.close()


class Watch:
    """Reports progress on standard error and records the memory of the process."""

    def __init__(self, process: int) -> None:
        self.process = process
        self.began = self.shown = time.monotonic()
        self.told = 0
        self.memory: list[tuple[int, int]] = []  # requests sent, resident bytes

    def look(self, tally: Tally) -> None:
        """Record the memory now. In this process, collect garbage first."""
        if self.process == os.getpid():
            gc.collect()
        pages = int(Path(f"/proc/{self.process}/statm").read_text().split()[1])
        self.memory.append((tally.sent.total(), pages * os.sysconf("SC_PAGE_SIZE")))

    def progress(self, tally: Tally) -> None:
        """Print new failures at once, and a summary now and then."""
        for reason, call in tally.failures[self.told :]:
            print(f"{reason}: {call!r}"[:4000], file=sys.stderr)
        self.told = len(tally.failures)
        now = time.monotonic()
        if now - self.shown > PROGRESS_SECONDS:
            self.shown = now
            self.look(tally)
            sent, resident = self.memory[-1]
            statuses = dict(sorted(tally.statuses.items()))
            said = f"{sent} sent, {sent / (now - self.began):.0f} /s, {resident >> 20} MiB, {statuses}"
            print(f"{said}, failed {dict(tally.failed)}", file=sys.stderr)

    def row(self) -> Row:
        """Memory growth per request in the second half of the run, when pools and caches are full."""
        sent, last = self.memory[-1]
        half = next((found for found in self.memory if found[0] >= sent / 2), self.memory[-1])
        grown = max(0, last - half[1] - SLACK_BYTES) / max(1, sent - half[0])
        what = f"resident memory in the second half: {half[1] >> 20} to {last >> 20} MiB"
        return Row("L4", what, sent, 0, grown, GROWTH_LIMIT, "bytes a request")
