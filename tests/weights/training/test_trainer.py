"""The training loop learns, and stops when validation no longer improves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("pyarrow")

from model.ranker import Ranker
from tests.weights.training.small_run import TRAINING, small_config, small_trainer
from weights.training import initial
from weights.training.examples import Examples
from weights.training.run import train
from weights.training.trainer import Status
from weights.training.world.simulate import World


def test_training_from_upstreams_initial_values_learns(world: World) -> None:
    seen: list[Status] = []
    train(world.log, small_config(), replace(TRAINING, epochs=4), report=seen.append)
    first = next(status for status in seen if status.evaluated)
    assert seen[-1].best < first.validation * 0.97
    assert seen[-1].step == seen[-1].steps


@pytest.mark.parametrize(("init", "draw"), [("upstream", initial.upstream), ("unit", initial.unit)])
def test_a_run_starts_from_the_initial_values_that_its_settings_name(
    examples: Examples, init: str, draw: Callable[[Ranker, torch.Generator], None]
) -> None:
    expected = Ranker(small_config())
    draw(expected, torch.Generator().manual_seed(TRAINING.seed))
    found = small_trainer(examples, init=init).ranker
    for got, parameter in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(got, parameter)


def test_the_run_stops_when_validation_stops_improving(examples: Examples) -> None:
    run = small_trainer(examples, epochs=50, evaluate_every=2, patience=3, learning_rate=0.0)
    run.run(lambda status: None, lambda current: None)
    assert run.step == 2 * (1 + 3)
    assert run.step < run.steps
