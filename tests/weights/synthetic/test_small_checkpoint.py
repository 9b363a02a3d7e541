"""The small random checkpoint: equal bytes for a seed, and every input moves its scores."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from model.batch import collate
from tests.support.bodies import inputs_of
from weights.actions import STANDARD_ACTIONS
from weights.checkpoint import load_checkpoint
from weights.synthetic.small_checkpoint import write_small_checkpoint


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_small_checkpoint(tmp_path / name, 7)
    write_small_checkpoint(tmp_path / "c", 8)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
        assert file.read_bytes() != (tmp_path / "c" / file.name).read_bytes()
    assert sum(file.stat().st_size for file in (tmp_path / "a").iterdir()) <= 4 * 10**6


def test_every_part_of_the_example_moves_the_scores(tmp_path: Path) -> None:
    write_small_checkpoint(tmp_path / "demo", 0)
    checkpoint = load_checkpoint(tmp_path / "demo")
    config = checkpoint.manifest.config
    assert checkpoint.manifest.action_names == STANDARD_ACTIONS
    example = json.loads((tmp_path / "demo" / "example.json").read_text())

    @torch.inference_mode()
    def logits(events: int, age_seconds: int, dwell: float) -> torch.Tensor:
        history = [event | {"dwell_time": dwell} for event in example["history"][:events]]
        candidates = [post | {"created_at": example["impression_ts"] - age_seconds} for post in example["candidates"]]
        item = inputs_of(example | {"history": history, "candidates": candidates}, checkpoint.manifest)
        return checkpoint.ranker(collate([item], config))[0][0]

    base = logits(5, 60, 5.0)
    assert base.std(0).min() > 0.1, "candidates differ in every action"
    for other in (logits(4, 60, 5.0), logits(5, 90_000, 5.0), logits(5, 60, 20.0)):
        assert (base - other).abs().max() > 0.01
