"""What nobody knows is not a no: null actions, row weights, and impressions of nobody, in training and in evaluation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("pyarrow")

from typer.testing import Result

from tests.weights.call import call
from tests.weights.lab.training.small_run import small_config, small_trainer
from weights.actions import default_score_weights
from weights.checkpoint import load_checkpoint
from weights.lab.counts import count_probabilities
from weights.lab.evaluate.calibration import Fit, calibrate, fit
from weights.lab.evaluate.evaluation import Judge, evaluate
from weights.lab.evaluate.metrics import auc
from weights.lab.evaluate.predict import predict, rows_of
from weights.lab.training.examples import Examples, HiddenShares
from weights.lab.training.log import Log, read_log, write_log
from weights.lab.training.losses import action_loss
from weights.lab.training.run import reproducible
from weights.lab.world.simulate import World

HIDDEN = 0.3
ACTION = "click"


def hiding(log: Log, share: float, action: str) -> Log:
    """The log with a share of one action's labels unknown, whatever they were."""
    unknown = np.zeros(log.actions.shape, bool)
    unknown[:, log.action_names.index(action)] = np.random.default_rng(7).random(len(log)) < share
    return replace(log, actions=log.actions & ~unknown, unknown=unknown)


def test_unknown_actions_read_back_as_unknown(world: World, tmp_path: Path) -> None:
    log = hiding(world.log, HIDDEN, ACTION)
    write_log(tmp_path / "log.parquet", log)
    for cache in (None, tmp_path / "cache"):
        again = read_log(tmp_path / "log.parquet", cache=cache)
        assert again.unknown is not None
        assert np.array_equal(again.unknown, log.unknown)
        assert np.array_equal(again.actions, log.actions)
    shown = call("log", tmp_path / "log.parquet").stdout
    place = log.action_names.index(ACTION)
    assert f"{ACTION}: taken {log.actions[:, place].sum():,}, not taken" in shown
    assert f"unknown of {log.unknown[:, place].sum():,}" in shown


def test_what_is_unknown_adds_no_loss_and_no_gradient(world: World) -> None:
    config = small_config()
    hidden, full = Examples(hiding(world.log, HIDDEN, ACTION), config), Examples(world.log, config)
    groups = [np.array([index]) for index in range(300, 330)]
    _, _, labels = hidden.training_batch(groups, np.random.default_rng(1), HiddenShares(), 64)
    _, _, whole = full.training_batch(groups, np.random.default_rng(1), HiddenShares(), 64)
    logits = torch.randn(labels.actions.shape, generator=torch.Generator().manual_seed(1), requires_grad=True)
    action_loss(logits, labels).backward()
    gradient = logits.grad
    assert gradient is not None
    assert labels.is_known is not None
    unknown = ~labels.is_known & labels.shown[..., None]
    assert unknown.any()
    assert (gradient[unknown] == 0).all()
    again = logits.detach().clone().requires_grad_()
    action_loss(again, whole).backward()
    assert again.grad is not None
    torch.testing.assert_close(gradient[labels.is_known], again.grad[labels.is_known])


UNTAUGHT = ("mute_author", "report")
FEW = ["epochs=0.1", "counts_share=0", "validation_requests=10", "weight_decay=0"]


def untaught(log: Log, case: str) -> Log:
    """The log, in which no row that training learns from knows some complaints."""
    is_known = {
        "never known": np.zeros(len(log), bool),
        "known of the newest": np.arange(len(log)) >= len(log) * 0.99,
        "known of rows that count nothing": np.arange(len(log)) % 5 == 0,
    }[case]
    unknown = np.zeros(log.actions.shape, bool)
    for action in UNTAUGHT:
        unknown[:, log.action_names.index(action)] = ~is_known
    weight = np.where(is_known, 0, 1).astype(np.float32) if "nothing" in case else None
    return replace(log, actions=log.actions & ~unknown, unknown=unknown, weight=weight)


def train(log: Log, directory: Path, *options: object) -> Result:
    """Write the log to this directory, and train on all of it."""
    write_log(directory / "log.parquet", log)
    words = ("--log", directory / "log.parquet", "--out", directory / "out", "--until", "all", *options)
    settings = FEW if "--start" in options else [*FEW, "width=16"]
    return call("train", *words, *(word for setting in settings for word in ("--set", setting)))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["never known", "known of the newest", "known of rows that count nothing"])
@pytest.mark.parametrize("given", [(), ("--score-weights", "default"), ("--search", 2)], ids=["", "set", "search"])
def test_no_score_weighs_a_head_that_nothing_taught(
    world: World, tmp_path: Path, case: str, given: tuple[object, ...]
) -> None:
    """Their heads kept random initial values, and 20 times that noise led the order."""
    log = untaught(world.log, case)
    made = train(log, tmp_path, *given)
    assert made.exit_code == 0, made.output
    trained = load_checkpoint(tmp_path / "out")
    weights = trained.manifest.score_weights
    taught = [name for name in default_score_weights(log.action_names) if name not in UNTAUGHT]
    assert weights == default_score_weights(taught)
    assert "without mute_author, report, which no impression to learn from knows" in made.stdout
    examples = Examples(log, trained.manifest.config)
    spread = predict(trained.ranker, examples, np.arange(300, 400)).probabilities.std(0)
    heads = dict(zip(log.action_names, spread, strict=True))
    assert [heads[name] for name in UNTAUGHT] == [0, 0], "a request may weigh them: they order nothing"
    assert min(heads[name] for name in taught) > 0


def test_what_nobody_knows_is_not_called_never_taken(world: World, tmp_path: Path) -> None:
    write_log(tmp_path / "log.parquet", untaught(world.log, "never known"))
    said = call("log", tmp_path / "log.parquet").stdout
    before, after = said.split("never known: ")
    assert after.startswith("mute_author and report (")
    assert "report" not in before.splitlines()[-1]
    assert "score: X's weights without mute_author, report" in said
    zapped = replace(hiding(world.log, 1.0, ACTION), action_names=tuple(f"z_{name}" for name in world.log.action_names))
    write_log(tmp_path / "log.parquet", zapped)
    assert f"z_{ACTION} unknown, " in call("log", tmp_path / "log.parquet").stdout


def test_a_weight_for_an_untaught_action_is_refused(world: World, tmp_path: Path) -> None:
    refused = train(untaught(world.log, "never known"), tmp_path, "--score-weights", "favorite=1,report=-20")
    assert (refused.exit_code, len(refused.stderr.splitlines())) == (1, 1), refused.output
    assert "--score-weights weighs report, which no impression to learn from knows" in refused.stderr
    assert not (tmp_path / "out").exists()
    made = train(untaught(world.log, "never known"), tmp_path, "--score-weights", "favorite=1,report=0")
    assert made.exit_code == 0, made.output


@pytest.mark.slow
def test_training_goes_on_with_heads_taught_before(world: World, tmp_path: Path) -> None:
    """A head that the first log taught is kept; one that it did not is learned as soon as a log knows the action."""
    (tmp_path / "on").mkdir()
    for first, then in (
        (world.log, untaught(world.log, "never known")),
        (untaught(world.log, "never known"), world.log),
    ):
        made = train(first, tmp_path, "--replace")
        assert made.exit_code == 0, made.output
        start = load_checkpoint(tmp_path / "out")
        went_on = train(then, tmp_path / "on", "--start", tmp_path / "out", "--replace")
        assert went_on.exit_code == 0, went_on.output
        after = load_checkpoint(tmp_path / "on/out")
        assert after.manifest.score_weights == start.manifest.score_weights
        report = world.log.action_names.index("report")
        before, now = (one.ranker.heads.actions.weight[:, report] for one in (start, after))
        assert now.any()
        assert bool((before == now).all()) == (first is world.log)


@pytest.mark.slow
def test_weights_of_an_untaught_start_are_left_out(world: World, tmp_path: Path) -> None:
    log = untaught(world.log, "never known")
    assert train(log, tmp_path).exit_code == 0
    assert call("relabel", tmp_path / "out", "--score-weights", "reply=2,report=-20").exit_code == 0
    (tmp_path / "on").mkdir()
    made = train(log, tmp_path / "on", "--start", tmp_path / "out")
    assert made.exit_code == 0, made.output
    assert load_checkpoint(tmp_path / "on/out").manifest.score_weights == {"reply": 2.0}
    assert "→ score: 2 reply (those of --start without report, which no impression to learn from knows)" in made.stdout


def test_a_row_counts_as_often_as_its_weight_says(world: World) -> None:
    config = small_config()
    log = replace(world.log, weight=np.full(len(world.log), 3, np.float32))
    weighted, plain = Examples(log, config), Examples(world.log, config)
    _, three = weighted.batch([300, 301])
    _, one = plain.batch([300, 301])
    logits = torch.randn(one.actions.shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(action_loss(logits, three), 3 * action_loss(logits, one))


@pytest.mark.slow
def test_impressions_of_nobody_are_in_no_history(world: World, tmp_path: Path) -> None:
    users = world.log.user_id.copy()
    users[world.log.request_id % 2 == 0] = 0
    write_log(tmp_path / "log.parquet", replace(world.log, user_id=users))
    log = read_log(tmp_path / "log.parquet")
    examples = Examples(log, small_config())
    nobody = np.flatnonzero(examples.users == 0)
    assert len(nobody) > 100
    assert (examples.history_lengths[nobody] == 0).all()
    assert examples.history_lengths.sum() > 100
    assert (examples.events.user_id != 0).all()
    assert f"{(log.user_id == 0).sum():,} impressions of nobody" in call("log", tmp_path / "log.parquet").stdout
    evaluation = evaluate(small_trainer(examples).ranker, log, int(examples.times[-300]), {"favorite": 1.0})
    tested = examples.times >= examples.times[-300]
    assert evaluation.users == len(np.unique(examples.users[tested & (examples.users > 0)]))
    assert evaluation.requests_of_nobody == (tested & (examples.users == 0)).sum()


def test_nobody_is_never_a_user_of_the_same_number(world: World) -> None:
    """A user's id may be the id of somebody's request."""
    log = world.log
    is_nobody = log.request_id % 2 == 0
    numbers = np.unique(log.request_id[is_nobody])
    collide, apart = (
        replace(log, user_id=np.where(is_nobody, 0, names[log.user_id % 40]).astype(np.uint64))
        for names in (numbers[-40:], np.arange(40, dtype=np.uint64) + 2**60)
    )
    score = np.random.default_rng(1).random(len(log)) + is_nobody
    happened = log.actions[:, log.action_names.index(ACTION)]
    figures = [
        {name: sampled.value for name, sampled in Judge.of(one).measured(happened, score).items()}
        for one in (collide, apart)
    ]
    assert figures[0] == pytest.approx(figures[1])
    assert len(np.unique(collide.people)) == len(np.unique(log.user_id[~is_nobody] % 40)) + len(numbers)


@pytest.mark.slow
def test_no_metric_counts_what_is_unknown(world: World) -> None:
    log = hiding(world.log, HIDDEN, ACTION)
    examples = Examples(log, small_config())
    ranker, at = small_trainer(examples).ranker, int(examples.times[-300])
    evaluation = evaluate(ranker, log, at, {ACTION: 1.0}, ablation_requests=20)
    place, test = log.action_names.index(ACTION), log.since(at)
    known = test.known_rows(place)
    requests = np.flatnonzero(examples.times >= at)
    probability = predict(ranker, examples, requests).probabilities[known, place]
    assert np.array_equal(examples.log.take(rows_of(examples, requests)).request_id, test.request_id)
    assert evaluation.shares[ACTION] == pytest.approx(test.actions[known, place].mean())
    assert evaluation.quality[ACTION].mean == pytest.approx(probability.mean())


@pytest.mark.slow
def test_calibration_leaves_out_what_is_unknown(world: World) -> None:
    """Fitted on what is known of some rows, or on those rows alone, it is the same; fitted on false noes, it is lower."""
    hidden = hiding(world.log, HIDDEN, ACTION)
    place = hidden.action_names.index(ACTION)
    ranker = small_trainer(Examples(world.log, small_config())).ranker
    requests = np.arange(300, 500)

    def fitted(log: Log) -> Fit:
        return calibrate(ranker, Examples(log, small_config()), requests)[ACTION]

    assert hidden.unknown is not None
    examples = Examples(hidden, small_config())
    known = hidden.take(rows_of(examples, requests)).known_rows(place)
    probabilities = predict(ranker, examples, requests).probabilities[known, place].astype(np.float64)
    happened = hidden.take(rows_of(examples, requests)).actions[known, place]
    alone = fit(np.log(probabilities / (1 - probabilities)), happened, np.ones(len(happened)))
    assert fitted(hidden).calibration.offset == pytest.approx(alone.calibration.offset, abs=1e-3)
    assert fitted(hidden).positives == happened.sum()
    assert fitted(replace(hidden, unknown=None)).calibration.offset < alone.calibration.offset - 0.2


def test_counts_leave_out_what_is_unknown(world: World) -> None:
    hidden = hiding(world.log, HIDDEN, ACTION)
    place = hidden.action_names.index(ACTION)

    def mean(log: Log) -> float:
        return float(count_probabilities(Examples(log, small_config()), len(log) // 2, place).mean())

    assert mean(hidden) == pytest.approx(mean(world.log), rel=0.05)
    assert mean(replace(hidden, unknown=None)) == pytest.approx((1 - HIDDEN) * mean(world.log), rel=0.1)


@pytest.mark.slow
def test_hidden_labels_cost_nothing_and_false_noes_do(world: World) -> None:
    """AUC on the newest fifth; calibration is the mean prediction over the mean truth. Noise: what another seed changes, and 0.05."""
    place = world.log.action_names.index(ACTION)
    unknown = hiding(world.log, HIDDEN, ACTION)
    plain = Examples(world.log, small_config())
    newest = np.arange(int(len(plain) * 0.8), len(plain))
    happened = world.log.actions[rows_of(plain, newest), place]

    def judged(log: Log, seed: int) -> NDArray[np.float64]:
        trainer = small_trainer(Examples(log, small_config()), epochs=1.5, evaluate_every=1000, seed=seed)
        with reproducible(1):
            ranker = trainer.run(lambda status: None, lambda run: None)
            probability = predict(ranker, plain, newest).probabilities[:, place]
        return np.array([auc(happened, probability), probability.mean() / happened.mean()])

    full, other = judged(world.log, 1), judged(world.log, 2)
    assert full[0] > 0.6, "it has learned"
    noise = abs(full - other) + 0.05
    assert (abs(judged(unknown, 1) - full) < noise).all()
    as_no = judged(replace(unknown, unknown=None), 1)
    assert HIDDEN - 0.1 < 1 - as_no[1] / full[1] < HIDDEN + 0.1
