"""A service around the fake engine, a clock that only moves when told, and requests for it. Not for tests of tensors."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from app.engine.loading import Loader
from app.errors import ServiceError
from app.interface import Ticket, ranked
from app.service.service import RankingService
from app.settings import Settings
from app.telemetry.metrics import Metrics
from loadtest.soak.fake_engine import ACTIONS, CONFIG, FakeEngine, expected, loaded, loader  # noqa: F401  for all tests here
from model.inputs import Candidates, Context, Scores


class Gate:
    """Holds the engine in its forward until opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.left = threading.Event()

    def __call__(self, items: object) -> None:
        self.entered.set()
        try:
            assert self.opened.wait(10)
        finally:
            self.left.set()

    async def reached(self) -> None:
        await asyncio.to_thread(self.entered.wait, 10)


@dataclass
class FakeClock:
    """Seconds that pass when a test says so."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def request(user: int, candidates: int = 4, history: int = 2) -> tuple[Context, Candidates]:
    """A request whose posts differ from every other user's."""
    zeros = np.zeros(history, np.int64)
    context = Context(
        user, np.arange(1, history + 1, dtype=np.uint64), np.ones(history, np.uint64),
        np.zeros((history, 3), np.float32), zeros, np.zeros(history, np.float32),
    )  # fmt: skip
    posts = np.arange(1, candidates + 1, dtype=np.uint64) + np.uint64(user * 10_000)
    return context, Candidates(posts, posts, np.zeros(candidates, np.int64), np.zeros(candidates, np.int64))


@asynccontextmanager
async def running(
    engine: Any, clock: Callable[[], float] = time.monotonic, **groups: Any
) -> AsyncIterator[RankingService]:
    """A service that is ready, and is stopped at the end. `groups` are of its settings."""
    async with running_on(loader(engine), clock, **groups) as service:
        yield service


@asynccontextmanager
async def running_on(
    load: Loader, clock: Callable[[], float] = time.monotonic, **groups: Any
) -> AsyncIterator[RankingService]:
    """The same on what this loads."""
    service = await ready(load, Settings(**groups), clock=clock)
    try:
        yield service
    finally:
        await service.stop(1.0)


async def ready(load: Loader, settings: Settings | None = None, **options: Any) -> RankingService:
    """A service of what this loads, ready; the caller stops it. `options` are further ones of `RankingService`."""
    service = RankingService(load, settings or Settings(), Metrics(), **options)
    service.start()
    await service.wait_ready()
    return service


@asynccontextmanager
async def busy(
    fault: Callable[[Any], None] = lambda items: None, candidates: int = 4, key: str | None = None, **options: Any
) -> AsyncIterator[tuple[RankingService, FakeEngine, Gate, asyncio.Future[Scores]]]:
    """A service whose engine is in the forward of user 1's request, and goes on with `fault` when the gate is opened."""
    gate = Gate()

    def before(items: Any) -> None:
        gate(items)
        fault(items)

    engine = FakeEngine(before=before)
    async with running(engine, **options) as service:
        first = asyncio.ensure_future(rank(service, 1, candidates, key=key))
        await gate.reached()
        yield service, engine, gate, first


async def rank(service: RankingService, user: int, candidates: int = 4, **options: Any) -> Scores:
    """One request through admission and the engine."""
    context, posts = request(user, candidates)
    options.setdefault("deadline", None)
    ticket = service.admit(service.model, candidates=candidates, history=len(context), **options)
    return (await ranked(service, ticket, context, posts)).scores


def right(scores: Scores, user: int, version: int = 1) -> bool:
    """Whether these are the scores of that user's request, bit for bit."""
    context, posts = request(user, len(scores))
    return bool(np.array_equal(scores.logits, expected(context, posts, version).logits))


def run(main: Any) -> Any:
    """Run a coroutine on a fresh loop."""
    return asyncio.run(asyncio.wait_for(main, 30))


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Return as soon as the condition holds; fail when it does not within the time."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # what is awaited has no event
            await asyncio.sleep(0.002)


async def ended(begin: Callable[..., Ticket], *arguments: Any) -> Any:
    """What a search gives, for a task. Raises the error that it ended with; cancelling it drops the work."""
    future = asyncio.get_running_loop().create_future()
    ticket = begin(*arguments, future.set_result)
    try:
        result = await future
    finally:
        ticket.release()
    if isinstance(result, ServiceError):
        raise result
    return result
