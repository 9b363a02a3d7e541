"""A fake engine whose scores identify the request, loaders for it, a clock that moves when told, and requests. Needs no checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from app.queue.loading import LoadedModel, Loader
from app.queue.runners import Steps
from model.cache import ContextCache
from model.config import HashSpec, ModelConfig
from model.engine import CacheStats, EngineInfo, Item, Outcome
from model.inputs import Candidates, Context, Scores
from model.ranker import Ranker
from weights.checkpoint import Checkpoint
from weights.errors import CheckpointError
from weights.format.manifest import ContinuousOutput, Manifest
from weights.text_ids import IdKind

HASHES = HashSpec(scales=(3, 5), biases=(1, 2), modulus=97, vocab_size=11)
CONFIG = ModelConfig(
    width=8, layers=1, query_heads=1, kv_heads=1, head_width=8, history_length=16, candidate_length=16, actions=3,
    user_hashes=HASHES, post_hashes=HASHES, author_hashes=HASHES, continuous_actions=1, has_dwell=True,
)  # fmt: skip
ACTIONS = ("favorite", "reply", "report")


class FakeEngine:
    """An Engine whose logits depend only on version, user, history length and post.

    `before` is called with the items of each forward, in the engine's thread; it may wait or raise. `forwards` lists the users, and
    `chunks` the numbers of candidates, of each forward that got past it.
    """

    def __init__(self, version: int = 1, before: Callable[[Sequence[Item]], None] | None = None) -> None:
        self.config = CONFIG
        self.info = EngineInfo("cpu", "float32", "fake", "shared", {})
        self.version = version
        self.before = before or (lambda items: None)
        self.forwards: list[list[int]] = []
        self.chunks: list[list[int]] = []
        self.closed = threading.Event()
        self._handles: ContextCache[None] = ContextCache(2**20, prefixes=False)

    def warm_up(self) -> None: ...

    def forward(self, items: Sequence[Item]) -> list[Outcome]:
        self.before(items)
        self.forwards.append([item.context.user_id for item in items])
        self.chunks.append([len(item.candidates) for item in items])
        return [
            Outcome(
                expected(item.context, item.candidates, self.version), "state", "miss", self._handles.name(item, CONFIG)
            )
            for item in items
        ]

    def context_of(self, handle: str, caller: str) -> Context | None:
        return self._handles.context_of(handle, caller, CONFIG)

    def cache_stats(self) -> CacheStats:
        return CacheStats(misses=sum(map(len, self.forwards)))

    def close(self) -> None:
        self.closed.set()


class Gate:
    """A `FakeEngine.before` that holds the engine in its forward until `opened` is set; then `then` is called, if it is given."""

    def __init__(self, then: Callable[[Any], None] | None = None) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        self._then = then

    def __call__(self, items: Sequence[Any]) -> None:
        self.entered.set()
        assert self.opened.wait(20)
        if self._then is not None:
            self._then(items)


def expected(context: Context, candidates: Candidates, version: int = 1) -> Scores:
    """The scores that the fake engine of a version gives this request."""
    seeds = candidates.post_ids.astype(np.float64) * 31 + float(context.user_id) * 7 + len(context) + version * 1000
    logits = np.sin(seeds[:, None] + np.arange(3)).astype(np.float32)
    return Scores(logits, (1 / (1 + np.exp(-logits))).astype(np.float32), np.abs(logits[:, :1]))


def fake_model(
    engine: Any,
    version: str = "v1",
    *,
    actions: Sequence[str] = ACTIONS,
    ids: IdKind = "uint64",
    config: ModelConfig = CONFIG,
) -> LoadedModel:
    """The engine with the manifest of a checkpoint named `fake`, as a loader returns it."""
    manifest = Manifest(
        name="fake",
        version=version,
        config=config,
        action_names=tuple(actions),
        continuous=(ContinuousOutput("dwell_time", 30.0, "s"),),
        score_weights={actions[0]: 1.0, actions[2]: -2.0},
        files={},
        tensors={},
        ids=ids,
    )
    return LoadedModel(Checkpoint(Path("fake"), manifest, Ranker(config)), engine)


def fake_loader(engine: Any = None, version: str = "v1", **manifest: Any) -> Loader:
    """A loader that returns this engine at once, whatever the path. Keywords go to `fake_model`."""

    def load(path: Path, steps: Steps) -> LoadedModel:
        steps.warming()
        return fake_model(engine or FakeEngine(), version, **manifest)

    return load


def load_by_name(path: Path, steps: Steps) -> LoadedModel:
    """The fake engine of the version in the directory's name: `v1` has the scores of version 1; `refused` is refused."""
    steps.warming()
    name = path.resolve().name
    if name == "refused":
        raise CheckpointError("params.safetensors: digest differs")
    return fake_model(FakeEngine(int(name[1:])), name)


@dataclass
class FakeClock:
    """Seconds that pass when a test says so."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def fake_request(user: int, candidates: int = 4, history: int = 2) -> tuple[Context, Candidates]:
    """A request whose posts differ from every other user's."""
    context = Context(
        user, np.arange(1, history + 1, dtype=np.uint64), np.ones(history, np.uint64),
        np.zeros((history, 3), np.float32), np.zeros(history, np.int64), np.zeros(history, np.float32),
    )  # fmt: skip
    posts = np.arange(1, candidates + 1, dtype=np.uint64) + np.uint64(user * 10_000)
    return context, Candidates(posts, posts, np.zeros(candidates, np.int64), np.zeros(candidates, np.int64))


def is_right(scores: Scores, user: int, version: int = 1, history: int = 2) -> bool:
    """Whether these are the fake engine's scores of `fake_request(user)`, bit for bit."""
    context, posts = fake_request(user, len(scores), history)
    return bool(np.array_equal(scores.logits, expected(context, posts, version).logits))
