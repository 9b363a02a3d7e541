"""Makes the small checkpoint of the repository from a seed: random weights that are not zero. It has learned nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from model.config import HashSpec, ModelConfig
from model.ranker import Ranker
from weights.actions import STANDARD_ACTIONS, default_score_weights
from weights.checkpoint import save_checkpoint
from weights.manifest import ContinuousOutput, Manifest

MODULUS = 2**61 - 1


def demo_config(rng: np.random.Generator) -> ModelConfig:
    """The released mini geometry with every input of the May variant and small tables."""
    return ModelConfig(
        width=128,
        layers=4,
        query_heads=4,
        kv_heads=4,
        head_width=32,
        history_length=127,
        candidate_length=64,
        actions=len(STANDARD_ACTIONS),
        user_hashes=random_hashes(rng, 1000),
        post_hashes=random_hashes(rng, 1001),
        author_hashes=random_hashes(rng, 503),
        continuous_actions=1,
        has_dwell=True,
        has_post_age=True,
    )


def random_hashes(rng: np.random.Generator, vocab_size: int, count: int = 2) -> HashSpec:
    """Hash functions as the release has them: a large scale and bias each, modulo a Mersenne prime."""
    scales, biases = (tuple(int(value) for value in rng.integers(10**9, 10**12, count)) for _ in range(2))
    return HashSpec(scales, biases, MODULUS, vocab_size)


def random_ranker(config: ModelConfig, rng: np.random.Generator) -> Ranker:
    """Norm scales near 1, matrices that keep the size of what they multiply: every input moves every score."""
    ranker = Ranker(config).requires_grad_(False)
    for name, tensor in ranker.state_dict().items():
        values = torch.from_numpy(rng.standard_normal(tuple(tensor.shape), dtype=np.float32))
        if tensor.ndim == 1:
            tensor.copy_(1 + 0.1 * values)
        elif name.startswith("tables.") or name.endswith("_table"):
            tensor.copy_(0.5 * values)
        else:
            tensor.copy_(values / tensor.shape[0] ** 0.5)
    return ranker


def example_request(rng: np.random.Generator, impression_ts: int = 1_780_000_000) -> dict[str, object]:
    """A request for `POST /rank`: one user who liked one author's posts and dwelt on another's, and eight candidates."""
    authors = [int(author) for author in rng.integers(10**17, 10**18, 5)]
    habits = [["favorite", "dwell"], ["dwell", "click"], ["favorite", "reply"], ["not_interested"], ["repost"]]

    def post(author: int) -> dict[str, object]:
        return {"post_id": str(rng.integers(10**18, 2 * 10**18)), "author_id": str(author)}

    history = [
        post(author) | {"actions": actions, "product_surface": 0, "dwell_time": round(float(rng.uniform(1, 25)), 1)}
        for author, actions in zip(authors, habits, strict=True)
    ]
    candidates = [
        post(authors[slot % len(authors)])
        | {"product_surface": 0, "created_at": impression_ts - int(rng.integers(60, 2 * 86400))}
        for slot in range(8)
    ]
    user = str(rng.integers(10**18, 2 * 10**18))
    return {"user_id": user, "history": history, "candidates": candidates, "impression_ts": impression_ts}


def write_demo(path: Path, seed: int, *, replace: bool = False) -> Manifest:
    """The same bytes for the same seed. Raises CheckpointError when `path` is in use."""
    rng = np.random.default_rng(seed)
    config = demo_config(rng)
    ranker = random_ranker(config, rng)
    return save_checkpoint(
        path,
        ranker,
        name="demo",
        action_names=STANDARD_ACTIONS,
        continuous=[ContinuousOutput("dwell_time", 30.0, "s")],
        score_weights=default_score_weights(STANDARD_ACTIONS),
        table_dtype="bfloat16",
        extras={"example.json": (json.dumps(example_request(rng), indent=1) + "\n").encode()},
        replace=replace,
    )
