"""Evaluation: the optimum is the best, ablations take something away, the verdict tells the truth, and nothing impossible is printed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from model.ranker import Ranker
from model.synthetic import random_ranker
from tests.weights.lab.training.small_run import WORLD, small_config
from weights.lab.evaluate.baselines import BASELINES
from weights.lab.evaluate.evaluation import METRICS, MODEL, OPTIMUM, Comparison, Evaluation, evaluate
from weights.lab.evaluate.metrics import Figure
from weights.lab.evaluate.predict import ABLATIONS, predict
from weights.lab.evaluate.report import figures, headline_table, write_evaluation
from weights.lab.training.demo import facts_of
from weights.lab.training.examples import Examples
from weights.lab.world.simulate import World


@pytest.fixture(scope="module")
def ranker() -> Ranker:
    """Random weights: enough to tell contexts apart."""
    return random_ranker(small_config(), 3)


@pytest.fixture(scope="module")
def evaluation(world: World, ranker: Ranker) -> Evaluation:
    weights = {"favorite": 1.0, "report": -20.0}
    return evaluate(ranker, world.log, WORLD.test_ts, weights, facts_of(world), ablation_requests=30)


def test_every_ablation_changes_predictions_and_none_does_not(world: World, ranker: Ranker) -> None:
    examples = Examples(world.log, ranker.config)
    requests = np.arange(len(examples) - 60, len(examples))
    whole = predict(ranker, examples, requests).probabilities
    assert len(whole) == sum(len(examples.rows(index)) for index in requests)
    for name in ABLATIONS:
        changed = predict(ranker, examples, requests, name).probabilities
        assert np.array_equal(changed, whole) == (name == "none"), name


def test_the_optimum_is_the_best_and_the_model_of_random_weights_is_told_off(evaluation: Evaluation) -> None:
    assert evaluation.headline == ("favorite",)
    sources = evaluation.figures["favorite"]
    assert {MODEL, OPTIMUM, *BASELINES} <= set(sources)
    for metric in METRICS:
        assert sources[OPTIMUM][metric].value == max(kinds[metric].value for kinds in sources.values())
    assert evaluation.way(OPTIMUM) == 1
    assert evaluation.way(MODEL) < 0.5
    assert evaluation.verdict().startswith("The model LOSES to boosted trees")
    assert all(figure.low < figure.value < figure.high for figure in sources[MODEL].values())


def test_a_report_holds_every_figure_and_begins_with_the_verdict(evaluation: Evaluation, tmp_path: Path) -> None:
    write_evaluation(evaluation, tmp_path, "Title", "command")
    page = (tmp_path / "report.md").read_text()
    assert page.splitlines()[0] == f"**{evaluation.verdict()}**"
    for word in (*evaluation.actions, *METRICS, *BASELINES, "shuffled history", "new users", "new posts", "command"):
        assert word in page
    assert "new authors" not in page, "all authors of the test period are known"
    told = json.loads((tmp_path / "figures.json").read_text())
    assert told == json.loads(json.dumps(figures(evaluation)))
    curve = told["reliability"]["favorite"]
    assert len(curve["observed"]) == len(curve["predicted"]) > 5
    assert min(curve["predicted"]) < evaluation.quality["favorite"].mean < max(curve["predicted"])
    assert str(evaluation.figures["favorite"][MODEL]["AUC"]) in headline_table(evaluation)[0]


def test_what_a_log_cannot_have_is_not_printed(world: World, ranker: Ranker, tmp_path: Path) -> None:
    """One post a request, no dwell, no world."""
    log = world.log.take(np.arange(0, len(world.log), WORLD.slots))
    log = replace(log, dwell_seconds=np.zeros(len(log), np.float32))
    evaluation = evaluate(ranker, log, WORLD.test_ts, {"favorite": 1.0}, ablation_requests=10)
    assert set(evaluation.figures["favorite"][MODEL]) == {"AUC", "AUC within users", "NDCG@10 of users"}
    assert list(evaluation.score) == ["NDCG@10 of users"]
    write_evaluation(evaluation, tmp_path, "Title", "command")
    page = (tmp_path / "report.md").read_text()
    for word in ("optimum", "topic", "of requests", "dwell:", "nan"):
        assert word not in page
    assert {"way_to_optimum", "dwell_error_seconds"}.isdisjoint(figures(evaluation))


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_actions_that_are_rare_or_never_happen_have_a_report(world: World, ranker: Ranker, tmp_path: Path) -> None:
    rare = np.zeros_like(world.log.actions)
    rare[:: len(rare) // 8, 0] = True
    log = replace(world.log, actions=rare)
    evaluation = evaluate(ranker, log, WORLD.test_ts, {log.action_names[0]: 1.0}, ablation_requests=10)
    write_evaluation(evaluation, tmp_path, "Title", "command")
    told: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
    assert told["frequent_actions"] == []
    assert list(told["auc"]) == [log.action_names[0]]
    assert "nan" not in (tmp_path / "report.md").read_text()


def test_the_verdict_names_the_closest_baseline_or_says_that_the_model_loses(evaluation: Evaluation) -> None:
    def told(*gains: Figure) -> str:
        made = [Comparison("favorite", METRICS[i], "popularity", gain) for i, gain in enumerate(gains)]
        return replace(evaluation, comparisons=made).verdict()

    won, doubtful, lost = Figure(0.2, 0.1, 0.3), Figure(0.01, -0.02, 0.04), Figure(-0.03, -0.05, -0.01)
    assert told(won, doubtful).startswith("The model is ahead of every baseline")
    assert "AUC within users of favorite: +0.010" in told(won, doubtful)
    assert "1 of 2 leads may be chance" in told(won, doubtful)
    assert "chance" not in told(won, won)
    unsure = Figure(0.125, float("nan"), float("nan"))  # of a test period of one user
    assert told(unsure).endswith("+0.125 (no interval); 1 of 1 leads may be chance.")
    assert told(won, lost).startswith(
        "The model LOSES to popularity. On AUC within users of favorite its lead over popularity is -0.030"
    )
    assert "both outcomes" in replace(evaluation, comparisons=[]).verdict()
