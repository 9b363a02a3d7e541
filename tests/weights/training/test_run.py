"""A run leaves torch's settings as they were, and a picture beside its state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("pyarrow")

from safetensors.torch import load_file

from tests.weights.training.small_run import TRAINING, small_config
from weights.training.run import CURVE_NAME, train
from weights.training.state import STATE_NAME
from weights.training.trainer import Status
from weights.world.simulate import World


def test_training_leaves_torch_as_it_was(world: World) -> None:
    threads, mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    train(world.log, small_config(), replace(TRAINING, epochs=0.1, threads=threads + 1))
    assert (torch.get_num_threads(), torch.get_deterministic_debug_mode()) == (threads, mode)


def test_a_run_that_keeps_its_state_keeps_a_picture_of_it(world: World, tmp_path: Path) -> None:
    seen: list[Status] = []
    train(world.log, small_config(), replace(TRAINING, epochs=0.3), state=tmp_path, report=seen.append)
    curve = load_file(tmp_path / STATE_NAME)["curve"].tolist()
    assert [row[1] for row in curve] == [status.loss for status in seen]
    assert curve[-1][2] == seen[-1].validation
    assert curve[0][0] < max(row[0] for row in curve) > curve[-1][0] > 0, "up, then down"
    assert (tmp_path / CURVE_NAME).read_bytes().startswith(b"\x89PNG")


def test_a_state_belongs_to_one_run_at_a_time(world: World, tmp_path: Path) -> None:
    """Two wrote one file at once, and renamed what was half of each."""

    def second(status: Status) -> None:
        with pytest.raises(BlockingIOError, match="is being written by another process: wait for its end"):
            train(world.log, small_config(), replace(TRAINING, epochs=0.1), state=tmp_path)

    train(world.log, small_config(), replace(TRAINING, epochs=0.1), state=tmp_path, report=second)
    train(world.log, small_config(), replace(TRAINING, epochs=0.1), state=tmp_path, resume=True)


def test_a_trunk_in_bfloat16_learns_what_one_in_float32_does(world: World) -> None:
    settings = replace(TRAINING, epochs=0.6, init="unit")
    losses: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    for dtype, seen in losses.items():
        run = replace(settings, dtype=dtype)
        ranker = train(world.log, small_config(), run, report=lambda status, seen=seen: seen.append(status.loss))
        assert {p.dtype for p in ranker.parameters()} == {torch.float32}
    plain, rounded = losses.values()
    assert plain != rounded
    assert plain == pytest.approx(rounded, rel=0.03)
    assert rounded[-1] < 0.9 * rounded[0]
