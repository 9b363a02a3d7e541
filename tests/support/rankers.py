"""A ranker around the fake engine, and requests to it. No HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.corpus.loading import CorpusLoader, corpus_loader
from app.interface import PlaceRequest, Ranked
from app.queue.loading import Loader
from app.service.local import LocalService
from app.settings import Settings
from app.telemetry.metrics import Metrics
from model.engine import Item
from tests.support.fakes import FakeEngine, Gate, fake_loader, fake_request


def create(
    engine: Any = None,
    clock: Callable[[], float] = time.monotonic,
    *,
    load: Loader | None = None,
    load_corpus: CorpusLoader | None = None,
    **groups: Any,
) -> LocalService:
    """A ranker that has not begun to load this engine, by default a `FakeEngine`. `groups` are of its settings; with `retrieval` it loads
    that corpus."""
    settings = Settings(**groups)
    load, load_corpus = load or fake_loader(engine or FakeEngine()), load_corpus or corpus_loader(settings)
    return LocalService(settings, Metrics(), load=load, load_corpus=load_corpus, clock=clock)


@asynccontextmanager
async def running(
    engine: Any = None,
    clock: Callable[[], float] = time.monotonic,
    *,
    load: Loader | None = None,
    resume: Path | None = None,
    **groups: Any,
) -> AsyncIterator[LocalService]:
    """The same when it is ready; it is stopped at the end. `resume`: it begins with what another one has left in this file."""
    ranker = create(engine, clock, load=load, **groups)
    if resume is not None:
        ranker.reloads.resume(resume)
    ranker.start()
    try:
        await ranker.wait_ready()
        yield ranker
    finally:
        await ranker.stop(1.0)


@dataclass
class Busy:
    """A ranker whose engine is in the forward of user 1's request until the gate is opened."""

    ranker: LocalService
    engine: FakeEngine
    gate: Gate
    first: asyncio.Task[Ranked]


@asynccontextmanager
async def busy(
    then: Callable[[Sequence[Item]], None] | None = None, candidates: int = 4, key: str | None = None, **options: Any
) -> AsyncIterator[Busy]:
    """Yield a `Busy`. `then` is called with the items of each forward once the gate is opened."""
    gate = Gate(then)
    engine = FakeEngine(before=gate)
    try:
        async with running(engine, **options) as ranker:
            first = asyncio.create_task(rank(ranker, 1, candidates, key=key))
            await asyncio.to_thread(gate.entered.wait, 10)
            yield Busy(ranker, engine, gate, first)
            gate.opened.set()
    finally:
        gate.opened.set()


async def rank(
    ranker: LocalService,
    user: int,
    candidates: int = 4,
    history: int = 2,
    *,
    deadline: float | None = None,
    key: str | None = None,
) -> Ranked:
    """`fake_request(user)` through admission and the engine, by default with the deadline of the settings."""
    context, posts = fake_request(user, candidates, history)
    if deadline is None:
        deadline = ranker.clock() + ranker.settings.deadline.default_seconds
    with ranker.admit(ranker.model(), PlaceRequest(candidates, history, deadline, key)) as job:
        return await ranker.rank(job, context, posts)


def figure(ranker: LocalService, series: str) -> float:
    """One sample of the metrics, such as `ranker_queue_requests` or `ranker_rejected_total{reason="deadline"}`; 0 where it is missing."""
    lines = [line for line in ranker.metrics.render().decode().splitlines() if line.startswith(series + " ")]
    return float(lines[0].rsplit(" ", 1)[1]) if lines else 0.0


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Return as soon as the condition holds; raise TimeoutError when it does not within the time."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # what is awaited has no event
            await asyncio.sleep(0.002)
