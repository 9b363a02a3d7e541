"""Before anything is timed: the device's scores against the dense definition, and bits that do not depend on the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from loadtest.gpu.card import Card
from model.config import HashSpec, ModelConfig
from model.dense import DenseEngine
from model.engine import Engine, Item
from model.inputs import Scores
from model.ranker import Ranker
from model.selftest import same_bits
from model.split.engine import SplitEngine
from model.split.graphs import PlainRecorder
from model.synthetic import random_candidates, random_context, random_ranker
from model.tolerances import PARITY

SIZES = ((0, 1), (1, 63), (37, 65), (96, 100), (5, 1), (96, 700))  # history, candidates

VARIANTS: dict[str, dict[str, Any]] = {
    "causal, head width 32": {"head_width": 32},
    "bidirectional, head width 64": {"head_width": 64, "context_attention": "bidirectional", "query_heads": 6},
    "right-anchored, head width 128, no dwell or age": {
        "head_width": 128, "right_anchored": True, "has_dwell": False, "has_post_age": False, "continuous_actions": 0,
    },
    "head width 16, one key head": {"head_width": 16, "kv_heads": 1, "query_heads": 5},
}  # fmt: skip


def small_config(**overrides: Any) -> ModelConfig:
    """A ranker with every feature, small enough for the dense definition."""
    hashes = HashSpec((6364136223846793005, 40503), (1442695040888963407, 17), 2**61 - 1, 509)
    values: dict[str, Any] = {
        "width": 256, "layers": 3, "query_heads": 4, "kv_heads": 2, "head_width": 32, "history_length": 96,
        "candidate_length": 64, "actions": 19, "continuous_actions": 8, "has_dwell": True, "has_post_age": True,
        "user_hashes": hashes, "post_hashes": hashes, "author_hashes": hashes,
    }  # fmt: skip
    return ModelConfig(**{**values, **overrides})


def make_engine(
    ranker: Ranker,
    card: Card,
    dtype: torch.dtype = torch.bfloat16,
    *,
    cache_bytes: int = 0,
    capacity: int | None = None,
) -> SplitEngine:
    """A warm engine that runs in padded sizes on any device; short steps where everything is tiny."""
    recorder, capacity = (None, capacity) if card.is_cuda else (PlainRecorder(), 256)
    engine = SplitEngine(ranker, card.device, dtype, cache_bytes=cache_bytes, capacity=capacity, recorder=recorder)
    engine.warm_up()
    return engine


def parity(card: Card) -> dict[str, float]:
    """The largest difference of any logit from the fp32 dense definition on the same device, by variant and dtype.

    Raises AssertionError beyond the project's tolerance.
    """
    found = {}
    for name, overrides in list(VARIANTS.items())[: 1 if card.tiny else None]:
        config = small_config(**overrides)
        ranker = random_ranker(config).to(card.device)
        items = [_item(config, history, count, seed) for seed, (history, count) in enumerate(SIZES)]
        items[3].context.post_ids[[0, 50]] = 0
        expected = DenseEngine(ranker, torch.float32).forward(items)
        for dtype, tolerance in PARITY.items():
            outcomes = make_engine(ranker, card, dtype, capacity=512).forward(items)
            pairs = zip(outcomes, expected, strict=True)
            worst = max(float(np.abs(a.scores.logits - b.scores.logits).max()) for a, b in pairs)
            if not worst <= tolerance.logits:
                raise AssertionError(f"{name}, {dtype}: logits differ by {worst}, more than {tolerance.logits}")
            found[f"{name}, {str(dtype).removeprefix('torch.')}"] = worst
    return found


def equal_bits(engine: Engine, compositions: int, seed: int = 0) -> dict[str, int]:
    """Random compositions of work, with a cache that grows and extends, against each candidate's bits in a forward of its own.

    `engine` must have a cache. Raises AssertionError at the first difference.
    """
    config, generator = engine.config, np.random.default_rng(seed)
    full = min(config.history_length, 90)
    contexts = [random_context(config, full, user) for user in range(3)]
    contexts += [context.first(length) for context in contexts for length in (0, 1, full // 2, full - 1)]
    candidates = random_candidates(config, 100, seed)
    oracle: list[list[Scores]] = [
        [engine.forward([Item(context, candidates.chunk(i, i + 1))])[0].scores for i in range(0, 100, 9)]
        for context in contexts
    ]
    compared = 0
    for _ in range(compositions):
        chosen = generator.choice(len(contexts), size=int(generator.integers(1, 8)))
        starts = generator.integers(0, 60, len(chosen))
        items = [Item(contexts[n], candidates.chunk(int(s), 100)) for n, s in zip(chosen, starts, strict=True)]
        for n, start, outcome in zip(chosen, starts, engine.forward(items), strict=True):
            for place in range(0, 100, 9):
                if place >= start:
                    row = slice(place - int(start), place - int(start) + 1)
                    if not same_bits(outcome.scores.rows(row), oracle[n][place // 9]):
                        raise AssertionError(f"candidate {place} of context {n}: bits depend on the batch")
                    compared += 1
    return {"compositions": compositions, "candidates_compared": compared, "different": 0}


def _item(config: ModelConfig, history: int, candidates: int, seed: int) -> Item:
    return Item(random_context(config, history, seed), random_candidates(config, candidates, seed))
