"""Writes a small checkpoint of random, untrained weights with an example request. `weights.lab.training.demo` makes the demo."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from weights.actions import DWELL_TIME, STANDARD_ACTIONS, default_score_weights
from weights.format.manifest import EXAMPLE_NAME, Manifest
from weights.format.writer import Labels, write_checkpoint
from weights.synthetic.random_weights import mini_config, random_pieces
from weights.text_ids import IdKind

IMPRESSION_TS = 1_780_000_000


def example_request(seed: int, ids: IdKind = "uint64") -> dict[str, object]:
    """A request for `POST /rank`: a user with five events of five authors, and eight candidates of the same authors. Text ids
    are the same numbers as 24 hexadecimal digits."""
    rng = np.random.default_rng(seed)
    authors = [int(author) for author in rng.integers(10**17, 10**18, 5)]
    habits = [["favorite", "dwell"], ["dwell", "click"], ["favorite", "reply"], ["not_interested"], ["repost"]]

    def name(number: int | np.integer) -> str:
        return f"{number:024x}" if ids == "text" else str(number)

    def post(author: int) -> dict[str, object]:
        return {"post_id": name(rng.integers(10**18, 2 * 10**18)), "author_id": name(author)}

    history = [
        post(author) | {"actions": actions, "product_surface": 0, "dwell_time": round(float(rng.uniform(1, 25)), 1)}
        for author, actions in zip(authors, habits, strict=True)
    ]
    candidates = [
        post(authors[slot % len(authors)])
        | {"product_surface": 0, "created_at": IMPRESSION_TS - int(rng.integers(60, 2 * 86400))}
        for slot in range(8)
    ]
    user = name(rng.integers(10**18, 2 * 10**18))
    return {"user_id": user, "history": history, "candidates": candidates, "impression_ts": IMPRESSION_TS}


def write_small_checkpoint(path: Path, seed: int, *, ids: IdKind = "uint64", replace: bool = False) -> Manifest:
    """Write the checkpoint; equal seeds give equal bytes. Raises CheckpointError if `path` is in use."""
    config = mini_config(seed, (1000, 1001, 503), continuous_actions=1)
    labels = Labels("random", STANDARD_ACTIONS, (DWELL_TIME,), default_score_weights(STANDARD_ACTIONS), ids=ids)
    return write_checkpoint(
        path,
        config,
        random_pieces(config, seed),
        labels,
        table_dtype="bfloat16",
        extras={EXAMPLE_NAME: (json.dumps(example_request(seed, ids=ids), indent=1) + "\n").encode()},
        replace=replace,
    )
