"""The training loop leads where it always led, and stops when validation no longer improves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")

from tests.weights.training.small_run import small_trainer
from tests.weights.training.unchanged import assert_unchanged, moved
from weights.training.examples import Examples
from weights.training.run import reproducible, split
from weights.training.settings import TrainSettings
from weights.training.trainer import Trainer, epoch_batches


def test_the_run_stops_when_validation_stops_improving(examples: Examples) -> None:
    run = small_trainer(examples, epochs=50, evaluate_every=2, patience=3, learning_rate=0.0)
    run.run(lambda status: None, lambda current: None)
    assert run.step == 2 * (1 + 3)
    assert run.step < run.steps


def test_thirty_steps_of_the_default_settings_lead_where_they_always_led(examples: Examples) -> None:
    with reproducible(1):
        run = Trainer(examples, *split(len(examples), 20), TrainSettings(), dwell_output=0)
        before = {name: value.clone() for name, value in run.ranker.state_dict().items()}
        for _ in range(30):
            run.advance()
        run.evaluate()
    losses = {"loss": run.loss, "validation loss": run.validation_loss}
    counts = {"steps of the run": run.steps}
    assert_unchanged("ranker", losses | counts | moved(before, run.ranker.state_dict()))


def test_an_epoch_has_every_request_once_in_batches_of_like_size() -> None:
    sizes = np.random.default_rng(1).integers(1, 60, 1000)
    batches = epoch_batches(sizes, 8, np.random.default_rng(2))
    assert sorted(np.concatenate(batches).tolist()) == list(range(1000))
    assert max(map(len, batches)) == 8
    assert np.mean([np.ptp(sizes[batch]) for batch in batches]) < 10
    again = epoch_batches(sizes, 8, np.random.default_rng(3))
    assert [batch.tolist() for batch in batches] != [batch.tolist() for batch in again]


def test_averaged_weights_follow_the_learned_ones_slowly(examples: Examples) -> None:
    with reproducible(1):
        plain, averaged = (small_trainer(examples, averaging=share) for share in (0.0, 0.9))
        for run in (plain, averaged):
            for _ in range(6):
                run.advance()
            run.evaluate()
    learned = averaged.ranker.state_dict()
    assert all(torch.equal(value, plain.best[name]) for name, value in learned.items()), "averaging changes no step"
    start = small_trainer(examples).ranker.state_dict()["heads.actions"]
    way = [(value["heads.actions"] - start).norm() for value in (learned, averaged.best)]
    assert 0 < way[1] < way[0]
