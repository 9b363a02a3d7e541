"""Checks before timing: the device's scores against the dense definition, and bits that do not depend on the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, cast

import torch

from loadtest.compositions import Compositions, small_config
from loadtest.geometries import GEOMETRIES
from loadtest.gpu.card import Card
from loadtest.gpu.faults import planted
from loadtest.gpu.watch import WatchedKernels
from model.config import ModelConfig
from model.dense import DenseEngine
from model.engine import Engine, Item
from model.presets import PRESETS, with_preset
from model.ranker import Ranker
from model.selftest import largest_difference
from model.split.engine import MAKERS, MakeKernels, SplitEngine
from model.split.graphs import PlainRecorder
from model.split.kernels.contract import Kernels
from model.split.kernels.portable import PortableKernels
from model.split.step import TILE_ROWS
from model.split.weights import SplitWeights
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


def check_config(**overrides: Any) -> ModelConfig:
    """A ranker with every feature, small enough for the dense definition."""
    values = {
        "width": 256,
        "head_width": 32,
        "history_length": 96,
        "candidate_length": 64,
        "actions": 19,
        "continuous_actions": 8,
    }
    return small_config(**(values | overrides))


def make_kernels(card: Card) -> MakeKernels:
    """Triton's kernels on a card, torch's on a CPU, with the card's fault."""
    return planted(MAKERS["triton" if card.is_cuda else "torch"], card.fault)


def make_engine(
    ranker: Ranker,
    card: Card,
    dtype: torch.dtype = torch.bfloat16,
    *,
    cache_bytes: int = 0,
    capacity: int | None = None,
) -> SplitEngine:
    """A warm engine, recorded on a card if no fault is planted. Off CUDA it runs in padded sizes and its steps are short."""
    kernels: Literal["auto"] | MakeKernels = make_kernels(card) if card.fault else "auto"
    recorder, capacity = (None, capacity) if card.is_cuda else (PlainRecorder(), 256)
    engine = SplitEngine(
        ranker, card.device, dtype, cache_bytes=cache_bytes, kernels=kernels, capacity=capacity, recorder=recorder
    )
    engine.warm_up()
    return engine


def capacity_of(config: ModelConfig) -> int:
    """Rows of a step that holds a whole context, in whole tiles."""
    return max(512, -(-(1 + config.history_length) // TILE_ROWS) * TILE_ROWS)


def parity_cases(card: Card) -> dict[str, ModelConfig]:
    """Small architectures with every feature, one for each other trunk, and the measured geometries with two layers."""
    if card.tiny:
        return {"tiny": check_config(width=64, layers=2)}
    cases = {name: check_config(**overrides) for name, overrides in VARIANTS.items()}
    cases |= {f"trunk of {name}": with_preset(check_config(), name) for name in PRESETS if name != "grok"}
    return cases | {f"{name}, two layers": replace(config, layers=2) for name, config in GEOMETRIES.items()}


def parity_items(config: ModelConfig) -> list[Item]:
    """Requests of all sizes, one with padding inside its history."""
    items = [_item(config, history, count, seed) for seed, (history, count) in enumerate(SIZES)]
    items[3].context.post_ids[[0, 50]] = 0
    return items


def parity(card: Card, config: ModelConfig, dtype: torch.dtype) -> float:
    """The largest difference of any logit from the fp32 dense definition on the same device.

    Raises AssertionError beyond the project's tolerance.
    """
    ranker = random_ranker(config, device=card.device)
    items = parity_items(config)
    expected = [outcome.scores for outcome in DenseEngine(ranker, torch.float32).forward(items)]
    scores = [
        outcome.scores for outcome in make_engine(ranker, card, dtype, capacity=capacity_of(config)).forward(items)
    ]
    worst, tolerance = largest_difference(scores, expected), PARITY[dtype].logits
    if not worst <= tolerance:
        raise AssertionError(f"logits differ by {worst}, more than {tolerance}")
    return worst


def watch(card: Card, config: ModelConfig, dtype: torch.dtype) -> WatchedKernels:
    """Run a forward and compare every operation with its plain form. Differences are in `differences` of the result."""
    watched: list[WatchedKernels] = []

    def kernels(config: ModelConfig, weights: SplitWeights, dtype: torch.dtype) -> Kernels:
        tested, plain = make_kernels(card)(config, weights, dtype), PortableKernels(config, weights.rope)
        watched.append(WatchedKernels(tested, plain, config.layers))
        return cast("Kernels", watched[0])

    ranker = random_ranker(config, device=card.device)
    SplitEngine(ranker, card.device, dtype, kernels=kernels, capacity=capacity_of(config)).forward(
        parity_items(config)[:5]
    )
    return watched[0]


def equal_bits(engine: Engine, compositions: int, seed: int = 0) -> dict[str, int]:
    """Compare random compositions, with a cache that grows and extends contexts, with each candidate's bits in its own forward.

    `engine` must have a cache. Raises AssertionError at the first difference.
    """
    full = min(engine.config.history_length, 90)
    draws = Compositions(
        engine, seed, users=3, growth=(0, 1, full // 2, full - 1, full), pool=min(12, 2 + compositions)
    )
    compared = 0
    for _ in range(compositions):
        count, different = draws.check(engine)
        if different:
            raise AssertionError(f"{different} of {count} candidates have other bits than alone")
        compared += count
    return {"compositions": compositions, "candidates_compared": compared, "different": 0}


def _item(config: ModelConfig, history: int, candidates: int, seed: int) -> Item:
    return Item(random_context(config, history, seed), random_candidates(config, candidates, seed))
