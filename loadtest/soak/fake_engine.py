"""A fake engine whose scores identify the request, and a loader for it. Needs no checkpoint on disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from app.engine.loading import LoadedModel, Loader, Steps
from model.cache import ContextCache
from model.config import HashSpec, ModelConfig
from model.engine import CacheStats, EngineInfo, Item, Outcome
from model.inputs import Candidates, Context, Scores
from model.ranker import Ranker
from weights.checkpoint import Checkpoint
from weights.format.manifest import ContinuousOutput, Manifest
from weights.text_ids import IdKind

HASHES = HashSpec(scales=(3, 5), biases=(1, 2), modulus=97, vocab_size=11)
CONFIG = ModelConfig(
    width=8, layers=1, query_heads=1, kv_heads=1, head_width=8, history_length=16, candidate_length=16, actions=3,
    user_hashes=HASHES, post_hashes=HASHES, author_hashes=HASHES, continuous_actions=1, has_dwell=True,
)  # fmt: skip
ACTIONS = ("favorite", "reply", "report")


class FakeEngine:
    """Its logits depend only on version, user, history length and post. `before` runs in each forward and may wait or raise."""

    def __init__(self, version: int = 1, before: Callable[[Sequence[Item]], None] | None = None) -> None:
        self.config, self.version, self.before = CONFIG, version, before or (lambda items: None)
        self.info = EngineInfo("cpu", "float32", "fake", "shared", {})
        self.forwards: list[list[int]] = []  # users of each forward past `before`
        self.chunks: list[list[int]] = []  # candidates of each item
        self.closed = threading.Event()
        self.named: ContextCache[None] = ContextCache(2**20, prefixes=False)

    def warm_up(self) -> None: ...

    def forward(self, items: Sequence[Item]) -> list[Outcome]:
        self.before(items)
        self.forwards.append([item.context.user_id for item in items])
        self.chunks.append([len(item.candidates) for item in items])
        return [
            Outcome(
                expected(item.context, item.candidates, self.version), "state", "miss", self.named.name(item, CONFIG)
            )
            for item in items
        ]

    def context_of(self, handle: str, caller: str) -> Context | None:
        return self.named.context_of(handle, caller, CONFIG)

    def cache_stats(self) -> CacheStats:
        return CacheStats(misses=sum(map(len, self.forwards)))

    def close(self) -> None:
        self.closed.set()


def expected(context: Context, candidates: Candidates, version: int = 1) -> Scores:
    """The scores that the fake engine of a version gives this request."""
    seeds = candidates.post_ids.astype(np.float64) * 31 + context.user_id * 7 + len(context) + version * 1000
    logits = np.sin(seeds[:, None] + np.arange(3)).astype(np.float32)
    return Scores(logits, (1 / (1 + np.exp(-logits))).astype(np.float32), np.abs(logits[:, :1]))


def loaded(engine: Any, version: str = "v1", actions: tuple[str, ...] = ACTIONS, ids: IdKind = "uint64") -> LoadedModel:
    """The engine with a manifest, in the form that the service takes."""
    outputs = (ContinuousOutput("dwell_time", 30.0, "s"),)
    manifest = Manifest("fake", version, CONFIG, actions, outputs, {actions[0]: 1.0, actions[2]: -2.0}, {}, {}, ids=ids)
    return LoadedModel(Checkpoint(Path("fake"), manifest, Ranker(CONFIG)), engine)


def loader(engine: Any, *manifest: Any) -> Loader:
    """A loader that returns this engine at once. `manifest`: further arguments of `loaded`."""

    def load(steps: Steps) -> LoadedModel:
        steps.warming()
        return loaded(engine, *manifest)

    return load
