"""Evaluation: figures against hand-made cases and independent definitions; the optimum is the best, ablations take something away."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")
pytest.importorskip("matplotlib")

from model.ranker import Ranker
from tests.weights.training.small_run import WORLD, small_config
from tests.weights.training.unchanged import assert_unchanged
from weights.evaluate import metrics
from weights.evaluate.evaluation import AFFINITY, MODEL, OPTIMUM, POPULARITY, Evaluation, evaluate
from weights.evaluate.predict import ABLATIONS, affinity, popularity, predict
from weights.evaluate.report import figures, write_report
from weights.training import initial
from weights.training.demo import facts_of
from weights.training.examples import Examples
from weights.world.simulate import World


@pytest.fixture(scope="module")
def ranker() -> Ranker:
    """Random weights: enough to tell contexts apart."""
    ranker = Ranker(small_config())
    generator = torch.Generator().manual_seed(3)
    initial.unit(ranker, generator)
    for table in ranker.tables.parameters():
        torch.nn.init.normal_(table, std=0.5, generator=generator)
    return ranker.requires_grad_(False)


def test_log_loss_and_normalised_entropy_of_a_case_done_by_hand() -> None:
    happened, p = np.array([True, False]), np.array([0.8, 0.4], np.float32)
    expected = -(np.log(0.8) + np.log(0.6)) / 2
    assert metrics.log_loss(happened, p) == pytest.approx(expected)
    assert metrics.normalised_entropy(happened, p) == pytest.approx(expected / np.log(2))
    assert np.isfinite(metrics.log_loss(happened, np.array([0.0, 1.0])))
    for always in (np.ones(2, bool), np.zeros(2, bool)):
        assert np.isnan(metrics.normalised_entropy(always, p)), "nothing is left to know"


def test_calibrated_predictions_have_a_small_error_and_shifted_ones_the_shift() -> None:
    rng = np.random.default_rng(1)
    p = rng.random(400_000) * 0.8
    happened = rng.random(len(p)) < p
    assert metrics.calibration_error(happened, p) < 0.005
    assert metrics.calibration_error(happened, p + 0.1) == pytest.approx(0.1, abs=0.005)


def test_auc_is_nan_where_it_has_no_meaning() -> None:
    assert np.isnan(metrics.auc(np.zeros(3, bool), np.arange(3.0)))
    assert metrics.auc(np.array([False, True]), np.array([0.0, 1.0])) == 1


def test_ndcg_is_that_of_an_independent_implementation_whatever_the_order_of_rows() -> None:
    from sklearn.metrics import ndcg_score

    rng = np.random.default_rng(2)
    request = np.repeat(np.arange(50), 8)
    score, gain = rng.random(400), rng.integers(0, 3, 400) / 8
    expected = ndcg_score(gain.reshape(50, 8), score.reshape(50, 8))
    assert metrics.ndcg(request, score, gain) == pytest.approx(expected)
    mixed = rng.permutation(400)
    assert metrics.ndcg(request[mixed], score[mixed], gain[mixed]) == pytest.approx(expected)
    assert metrics.ndcg(request, gain, gain) == 1
    assert metrics.ndcg(request, -gain, gain) < 0.9


def test_rates_are_those_of_the_training_period(world: World) -> None:
    test = world.log.impression_ts >= WORLD.test_ts
    train_log, test_log = world.log.take(~test), world.log.take(test)
    rates = popularity(train_log, test_log, strength=0.0001)
    known = np.flatnonzero(np.isin(test_log.post_id, train_log.post_id))[:20]
    for row in known:
        same = train_log.post_id == test_log.post_id[row]
        assert np.allclose(rates[row], train_log.actions[same].mean(0), atol=1e-3)
    own = affinity(train_log, test_log, None, strength=0.0001)
    for row in range(0, len(test_log), 50):
        same = (train_log.user_id == test_log.user_id[row]) & (train_log.author_id == test_log.author_id[row])
        if same.any():
            assert np.allclose(own[row], train_log.actions[same].mean(0), atol=1e-3)


def test_who_was_never_seen_is_expected_to_do_what_everybody_does(world: World) -> None:
    train_log = world.log.take(world.log.impression_ts < WORLD.test_ts)
    stranger = replace(train_log.take(np.arange(1)), user_id=np.array([1], np.uint64))
    new = replace(stranger, post_id=np.array([2], np.uint64), author_id=np.array([3], np.uint64))
    for prediction in (
        popularity(train_log, new),
        affinity(train_log, new, {4: 0}),
        affinity(train_log, stranger, None),
    ):
        assert np.allclose(prediction, train_log.actions.mean(0))


def test_every_ablation_changes_predictions_and_none_does_not(world: World, ranker: Ranker) -> None:
    examples = Examples(world.log, ranker.config)
    requests = np.arange(len(examples) - 60, len(examples))
    whole = predict(ranker, examples, requests).probabilities
    assert len(whole) == sum(len(examples.rows(index)) for index in requests)
    for name in ABLATIONS:
        changed = predict(ranker, examples, requests, name).probabilities
        assert np.array_equal(changed, whole) == (name == "none"), name


def flat(figures: object, name: str = "") -> dict[str, float]:
    """The numbers of nested tables, each by its way there; those that have no meaning are left out."""
    match figures:
        case dict() | tuple():
            parts = figures.items() if isinstance(figures, dict) else enumerate(figures)
            return {key: number for part, inner in parts for key, number in flat(inner, f"{name}/{part}").items()}
        case int() | float() if not np.isnan(figures):
            return {name: float(figures)}
    return {}


def test_a_report_holds_every_figure(
    world: World, ranker: Ranker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation = evaluate(
        ranker, world.log, WORLD.test_ts, {"favorite": 1.0, "report": -20.0}, facts_of(world), ablation_requests=30
    )
    assert set(evaluation.figures) >= {MODEL, POPULARITY, AFFINITY, OPTIMUM}
    assert evaluation.mean_auc(OPTIMUM) == max(evaluation.mean_auc(source) for source in evaluation.figures)
    assert evaluation.way(OPTIMUM) == 1
    assert evaluation.ndcg[OPTIMUM] > evaluation.ndcg[MODEL]
    told: dict[str, Any] = figures(evaluation)
    kept = {name: told[name] for name in ("requests", "mean_auc", "calibration_error")}
    kept |= {
        "groups": evaluation.groups,
        "dwell error": evaluation.dwell_error_seconds,
        "dwell": told["actions"]["dwell"],
    }
    kept |= {"ndcg": {name: told["ndcg"][name] for name in (OPTIMUM, POPULARITY, AFFINITY)}}
    assert_unchanged("evaluation", flat(kept))
    few = evaluation.frequent[:6]  # a curve each, in two rows: they take long to draw
    monkeypatch.setattr(Evaluation, "frequent", few)
    write_report(evaluation, tmp_path, "Title", "command")
    page = (tmp_path / "report.md").read_text()
    for name in (*world.log.action_names, *evaluation.ablations, "command"):
        assert ("nothing" if name == "none" else name) in page
    for picture in ("auc.png", "reliability.png", "ablations.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
        assert picture in page
    assert json.loads((tmp_path / "figures.json").read_text()) == json.loads(json.dumps(figures(evaluation)))


def test_a_log_without_a_world_is_evaluated_without_an_optimum(world: World, ranker: Ranker) -> None:
    evaluation = evaluate(ranker, world.log, WORLD.test_ts, {"favorite": 1.0}, ablation_requests=10)
    assert OPTIMUM not in evaluation.figures
    assert np.isnan(evaluation.way(MODEL))
    assert figures(evaluation)["way_to_optimum"] == {}
    with pytest.raises(ValueError, match="no requests on one side"):
        evaluate(ranker, world.log, WORLD.end_ts, {})


@pytest.mark.filterwarnings("error")
def test_actions_that_are_rare_or_never_happen_have_a_report(world: World, ranker: Ranker, tmp_path: Path) -> None:
    rare = np.zeros_like(world.log.actions)
    rare[:: len(rare) // 8, 0] = True
    log = replace(world.log, actions=rare)
    evaluation = evaluate(ranker, log, WORLD.test_ts, {log.action_names[0]: 1.0}, ablation_requests=10)
    write_report(evaluation, tmp_path, "Title", "command")
    told: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
    assert told["frequent_actions"] == []
    assert told["mean_auc"][MODEL] is told["actions"][log.action_names[1]]["normalised_entropy"] is None
    assert told["actions"][log.action_names[0]]["auc"] is not None


def test_an_action_that_a_group_never_takes_leaves_the_group_its_mean(world: World, ranker: Ranker) -> None:
    seen = np.isin(world.log.user_id, world.log.user_id[world.log.impression_ts < WORLD.test_ts])
    column = world.log.action_names.index("favorite")
    actions = world.log.actions.copy()
    actions[~seen, column] = False
    evaluation = evaluate(ranker, replace(world.log, actions=actions), WORLD.test_ts, {}, ablation_requests=10)
    assert "favorite" in evaluation.frequent
    assert [name for name, (model, _) in evaluation.groups.items() if np.isnan(model)] == []


def test_the_true_probabilities_are_the_best_a_prediction_can_be(world: World) -> None:
    test = world.log.take(world.log.impression_ts >= WORLD.test_ts)
    truth = world.truth.probabilities
    blurred = np.clip(truth * np.random.default_rng(4).uniform(0.7, 1.3, truth.shape), 0, 1)
    column = test.action_names.index("dwell")
    happened = test.actions[:, column]
    assert metrics.log_loss(happened, truth[:, column]) < metrics.log_loss(happened, blurred[:, column])
    assert metrics.auc(happened, truth[:, column]) > metrics.auc(happened, blurred[:, column])
    assert len(replace(world.truth).probabilities) == len(test)
