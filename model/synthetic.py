"""Random non-zero weights and requests of any architecture, for self-tests, benchmarks and tests. Never served."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from model.config import ModelConfig
from model.inputs import Candidates, Context, Int64s
from model.names import checkpoint_parameters
from model.ranker import Ranker


def random_ranker(config: ModelConfig, seed: int = 0, device: torch.device | str = "cpu") -> Ranker:
    """Weights that keep every activation near 1: linear weights scaled by their fan-in, norm scales in 0.7 … 1.3.

    Row 0 of the tables is not zero, which upstream's split tables allow, but must still read as zero. Drawn on the device.
    """
    generator = torch.Generator(device).manual_seed(seed)
    with torch.device(device), torch.no_grad():
        ranker = Ranker(config).eval()
        for name, parameter in checkpoint_parameters(ranker):
            leaf = name.rsplit(".", 1)[-1]
            if leaf == "norm" or leaf.endswith("_norm"):
                parameter.uniform_(0.7, 1.3, generator=generator)
            elif leaf in ("user", "post", "author", "surface_table", "post_age_table", "dwell_input", "code_table"):
                parameter.normal_(0.0, 1.0, generator=generator)
            else:
                parameter.normal_(0.0, parameter.shape[0] ** -0.5, generator=generator)
        for head in (ranker.heads.actions, ranker.heads.continuous):
            if head is not None:
                head.weight.mul_(1.5)
    return ranker.requires_grad_(False)


def random_ids(generator: np.random.Generator, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Non-zero 64-bit ids, half of them above 2^63."""
    return generator.integers(1, 2**64, count, dtype=np.uint64)


def random_context(config: ModelConfig, history: int, seed: int = 0, *, user_id: int | None = None) -> Context:
    """A user with `history` items; some items have no action at all."""
    generator = np.random.default_rng((seed, 1))
    actions = (generator.random((history, config.actions)) < 0.3).astype(np.float32)
    actions[generator.random(history) < 0.25] = 0.0
    return Context(
        user_id=int(random_ids(generator, 1)[0]) if user_id is None else user_id,
        post_ids=random_ids(generator, history),
        author_ids=random_ids(generator, history),
        actions=actions,
        surfaces=generator.integers(0, config.product_surfaces, history),
        dwell_seconds=generator.uniform(0, 45, history).astype(np.float32),
        codes=random_codes(config, history, generator),
    )


def random_candidates(config: ModelConfig, candidates: int, seed: int = 0) -> Candidates:
    """`candidates` posts to score."""
    generator = np.random.default_rng((seed, 2))
    return Candidates(
        post_ids=random_ids(generator, candidates),
        author_ids=random_ids(generator, candidates),
        surfaces=generator.integers(0, config.product_surfaces, candidates),
        age_buckets=generator.integers(0, config.post_age_buckets, candidates),
        codes=random_codes(config, candidates, generator),
    )


def random_codes(config: ModelConfig, count: int, generator: np.random.Generator) -> Int64s:
    """Content codes int64 `[count, Q]`; some posts have none at all."""
    codes = generator.integers(0, config.code_values + 1, (count, config.code_levels))
    if config.code_levels:
        codes[generator.random(count) < 0.2] = 0
    return codes


def random_request(config: ModelConfig, history: int, candidates: int, seed: int = 0) -> tuple[Context, Candidates]:
    """One request: its context and its candidates. Where the model counts them, some have the author of an event, or are its post."""
    context, drawn = random_context(config, history, seed), random_candidates(config, candidates, seed)
    if config.history_counts and history:
        context.author_ids[:] = context.author_ids[np.arange(history) // 2]
        for ids, events, every in ((drawn.author_ids, context.author_ids, 2), (drawn.post_ids, context.post_ids, 3)):
            ids[::every] = np.resize(events, len(ids[::every]))
    return context, drawn
