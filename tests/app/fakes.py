"""A fake engine whose scores tell who asked, a clock that only moves when told, and the model around them. Not for tests of tensors."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from app.engine.loading import LoadedModel, Loader
from app.service.service import RankingService
from app.settings import Settings
from app.telemetry.metrics import Metrics
from model.config import HashSpec, ModelConfig
from model.engine import CacheStats, EngineInfo, Item, Outcome
from model.inputs import Candidates, Context, Scores
from model.ranker import Ranker
from weights.checkpoint import Checkpoint
from weights.format.manifest import ContinuousOutput, Manifest

HASHES = HashSpec(scales=(3, 5), biases=(1, 2), modulus=97, vocab_size=11)
CONFIG = ModelConfig(
    width=8, layers=1, query_heads=1, kv_heads=1, head_width=8, history_length=16, candidate_length=16, actions=3,
    user_hashes=HASHES, post_hashes=HASHES, author_hashes=HASHES, continuous_actions=1, has_dwell=True,
)  # fmt: skip
ACTIONS = ("favorite", "reply", "report")


class FakeEngine:
    """Logits that only this version gives to this user and post; `before` runs in each forward and may wait or raise."""

    def __init__(self, version: int = 1, before: Callable[[Sequence[Item]], None] | None = None) -> None:
        self.config, self.version, self.before = CONFIG, version, before or (lambda items: None)
        self.info = EngineInfo("cpu", "float32", "fake", "shared", {})
        self.forwards: list[list[int]] = []  # users of each forward that finished
        self.chunks: list[list[int]] = []  # candidates of each item
        self.closed = threading.Event()

    def warm_up(self) -> None: ...

    def forward(self, items: Sequence[Item]) -> list[Outcome]:
        self.before(items)
        self.forwards.append([item.context.user_id for item in items])
        self.chunks.append([len(item.candidates) for item in items])
        return [Outcome(expected(item.context, item.candidates, self.version), "state", "miss") for item in items]

    def cache_stats(self) -> CacheStats:
        return CacheStats(misses=sum(map(len, self.forwards)))

    def close(self) -> None:
        self.closed.set()


class Gate:
    """Holds the engine in its forward until opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, items: object) -> None:
        self.entered.set()
        assert self.opened.wait(10)

    async def reached(self) -> None:
        await asyncio.to_thread(self.entered.wait, 10)


def expected(context: Context, candidates: Candidates, version: int = 1) -> Scores:
    """What the fake engine of a version says to this request."""
    seeds = candidates.post_ids.astype(np.float64) * 31 + context.user_id * 7 + len(context) + version * 1000
    logits = np.sin(seeds[:, None] + np.arange(3)).astype(np.float32)
    return Scores(logits, 1 / (1 + np.exp(-logits)), np.abs(logits[:, :1]))


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


def loaded(engine: Any, version: str = "v1", actions: tuple[str, ...] = ACTIONS) -> LoadedModel:
    """The engine with a manifest, as the service wants it."""
    outputs = (ContinuousOutput("dwell_time", 30.0, "s"),)
    manifest = Manifest("fake", version, CONFIG, actions, outputs, {actions[0]: 1.0, actions[2]: -2.0}, {}, {})
    return LoadedModel(Checkpoint(Path("fake"), manifest, Ranker(CONFIG)), engine)


def loader(engine: Any, *manifest: Any) -> Loader:
    """Loads that engine at once; `manifest` is what `loaded` takes besides."""

    def load(warming: Callable[[], None]) -> LoadedModel:
        warming()
        return loaded(engine, *manifest)

    return load


@asynccontextmanager
async def running(
    engine: Any, clock: Callable[[], float] = time.monotonic, **groups: Any
) -> AsyncIterator[RankingService]:
    """A service that is ready, and is stopped at the end. `groups` are of its settings."""
    service = RankingService(loader(engine), Settings(**groups), Metrics(), clock=clock)
    service.start()
    await service.wait_ready()
    try:
        yield service
    finally:
        await service.stop(1.0)


async def rank(service: RankingService, user: int, candidates: int = 4, **options: Any) -> Scores:
    """One request through admission and the engine."""
    context, posts = request(user, candidates)
    options.setdefault("deadline", None)
    ticket = service.admit(service.model, candidates=candidates, history=len(context), **options)
    return (await service.rank(ticket, context, posts)).scores


def right(scores: Scores, user: int, version: int = 1) -> bool:
    """Whether these are the scores of that user's request, bit for bit."""
    context, posts = request(user, len(scores))
    return bool(np.array_equal(scores.logits, expected(context, posts, version).logits))


def run(main: Any) -> Any:
    """Run a coroutine on a fresh loop."""
    return asyncio.run(asyncio.wait_for(main, 30))


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Return as soon as the condition holds; fail when it does not within the time."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # what is awaited has no event
            await asyncio.sleep(0.002)
