"""The small random checkpoint: equal bytes for a seed, and every input moves its scores. The demo in the repository is valid."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from model.batch import collate
from model.inputs import Candidates, Context, age_bucket
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


def test_the_one_in_the_repository_is_whole_and_small() -> None:
    directory = Path(__file__).parents[3] / "weights" / "demo"
    manifest = load_checkpoint(directory).manifest
    assert manifest.name == "demo"
    assert manifest.action_names == STANDARD_ACTIONS
    assert sum(file.stat().st_size for file in directory.iterdir()) <= 8 * 10**6
    assert json.loads((directory / "example.json").read_text())["candidates"]


def test_every_part_of_the_example_moves_the_scores(tmp_path: Path) -> None:
    write_small_checkpoint(tmp_path / "demo", 0)
    checkpoint = load_checkpoint(tmp_path / "demo")
    config = checkpoint.manifest.config
    assert checkpoint.manifest.action_names == STANDARD_ACTIONS
    request = json.loads((tmp_path / "demo" / "example.json").read_text())
    history, posts = request["history"], request["candidates"]
    actions = np.zeros((len(history), 19), np.float32)
    for row, event in zip(actions, history, strict=True):
        row[[STANDARD_ACTIONS.index(name) for name in event["actions"]]] = 1

    def ids(rows: list[dict[str, str]], key: str) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return np.array([int(row[key]) for row in rows], np.uint64)

    @torch.inference_mode()
    def logits(events: int, age_seconds: int, dwell: float) -> torch.Tensor:
        context = Context(
            int(request["user_id"]),
            ids(history, "post_id")[:events],
            ids(history, "author_id")[:events],
            actions[:events],
            np.zeros(events, np.int64),
            np.full(events, dwell, np.float32),
        )
        created = np.full(len(posts), request["impression_ts"] - age_seconds, np.int64)
        candidates = Candidates(
            ids(posts, "post_id"),
            ids(posts, "author_id"),
            np.zeros(len(posts), np.int64),
            age_bucket(request["impression_ts"], created, config),
        )
        return checkpoint.ranker(collate([(context, candidates)], config))[0][0]

    base = logits(5, 60, 5.0)
    assert base.std(0).min() > 0.1, "candidates differ in every action"
    for other in (logits(4, 60, 5.0), logits(5, 90_000, 5.0), logits(5, 60, 20.0)):
        assert (base - other).abs().max() > 0.01
