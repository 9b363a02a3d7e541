"""The training loop learns, and stops when validation no longer improves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("pyarrow")

from model.ranker import Ranker
from tests.weights.training.small_run import TRAINING, small_config, small_trainer
from tests.weights.training.unchanged import assert_unchanged, moved
from weights.training import initial
from weights.training.examples import Examples
from weights.training.run import reproducible, split, train
from weights.training.settings import TrainSettings
from weights.training.trainer import Status, Trainer
from weights.world.simulate import World


def test_training_from_upstreams_initial_values_learns(world: World) -> None:
    seen: list[Status] = []
    train(world.log, small_config(), replace(TRAINING, epochs=1.5), report=seen.append)
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


def test_thirty_steps_of_the_default_settings_lead_where_they_always_led(examples: Examples) -> None:
    with reproducible(1):
        run = Trainer(examples, *split(len(examples), 20), TrainSettings())
        before = {name: value.clone() for name, value in run.ranker.state_dict().items()}
        for _ in range(30):
            run.advance()
        run.evaluate()
    losses = {"loss": run.loss, "validation loss": run.validation_loss}
    counts = {"steps of the run": run.steps, "impressions": run.impressions}
    assert_unchanged("ranker", losses | counts | moved(before, run.ranker.state_dict()))
