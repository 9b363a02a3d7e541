"""The training loop leads where it always led, and stops when validation no longer improves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("pyarrow")

from tests.weights.lab.training.small_run import TRAINING, small_trainer
from tests.weights.lab.training.unchanged import assert_unchanged, moved
from weights.lab.training.examples import Examples
from weights.lab.training.run import reproducible, split
from weights.lab.training.settings import TrainSettings
from weights.lab.training.trainer import Status, Trainer


def test_the_run_stops_when_validation_stops_improving(examples: Examples) -> None:
    run = small_trainer(examples, epochs=50, evaluate_every=2, patience=3, learning_rate=1e-30)
    run.run(lambda status: None, lambda current: None)
    assert run.step == 2 * (1 + 3)
    assert run.step < run.steps


@pytest.mark.slow
def test_a_short_run_warms_up_and_evaluates_by_its_length(examples: Examples) -> None:
    run = small_trainer(examples, epochs=2, warmup_steps=1000, warmup_share=0.1, evaluate_every=1000, evaluations=10)
    rates = [run.learning_rate(step) for step in range(run.steps)]
    assert rates.index(max(rates)) <= 0.1 * run.steps + 1
    seen: list[int] = []
    run.run(lambda status: seen.append(status.step) if status.evaluated else None, lambda current: None)
    assert 10 <= len(seen) <= 12


def test_a_run_tells_every_evaluation_and_why_it_ended(examples: Examples) -> None:
    last: list[Status] = []
    run = small_trainer(examples, epochs=50, evaluate_every=2, patience=3, learning_rate=1e-30)
    run.run(last.append, lambda current: None)
    assert [look.step for look in last[-1].curve] == [2, 4, 6, 8]
    assert last[-1].best_step == 2
    assert last[-1].ended == "no better validation loss since step 2"
    whole = small_trainer(examples, epochs=0.2)
    whole.run(last.append, lambda current: None)
    assert last[-1].ended == "all steps were done"


def test_thirty_default_steps_lead_where_they_always_led(examples: Examples) -> None:
    with reproducible(1):
        run = Trainer(examples, *split(examples.log.counted_requests, 20), TrainSettings(), dwell_output=0)
        before = {name: value.clone() for name, value in run.ranker.state_dict().items()}
        for _ in range(30):
            run.advance()
        run.evaluate()
    losses = {"loss": run.loss, "validation loss": run.validation_loss}
    counts = {"steps of the run": run.steps}
    assert_unchanged("ranker", losses | counts | moved(before, run.ranker.state_dict()))


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


@pytest.mark.slow
def test_a_short_run_with_a_slow_average_keeps_what_it_learned(examples: Examples) -> None:
    def best_loss(averaging: float) -> float:
        with reproducible(1):
            settings = replace(TRAINING, epochs=4, averaging=averaging)
            run = Trainer(examples, *split(examples.log.counted_requests, 20), settings, dwell_output=0)
            run.run(lambda status: None, lambda current: None)
        return run.best_loss

    assert best_loss(0.998) < 1.03 * best_loss(0.0)
