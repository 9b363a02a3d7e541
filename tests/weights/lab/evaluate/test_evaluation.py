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
from tests.support.full_disk import full_disk
from tests.weights.lab.training.small_run import WORLD, small_config
from weights.lab.evaluate.baselines import BASELINES, SIMPLE
from weights.lab.evaluate.evaluation import (
    METRICS,
    MODEL,
    OPTIMUM,
    BaselineComparison,
    Evaluation,
    OwnValidation,
    evaluate,
    on_own_validation,
)
from weights.lab.evaluate.metrics import Figure
from weights.lab.evaluate.predict import ABLATIONS, predict
from weights.lab.evaluate.report import figures, headline_table, write_evaluation
from weights.lab.report import write_report
from weights.lab.training.demo import facts_of
from weights.lab.training.examples import Examples
from weights.lab.training.settings import TrainSettings
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


@pytest.mark.slow
def test_the_optimum_is_best_and_random_weights_lose(evaluation: Evaluation) -> None:
    assert evaluation.headline == ("favorite",)
    sources = evaluation.figures["favorite"]
    assert {MODEL, OPTIMUM, *BASELINES} <= set(sources)
    for metric in METRICS:
        assert sources[OPTIMUM][metric].value == max(kinds[metric].value for kinds in sources.values())
    assert evaluation.way(OPTIMUM) == 1
    assert evaluation.way(MODEL) < 0.5
    assert evaluation.verdict().startswith("The model LOSES to boosted trees, counts")
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


@pytest.mark.slow
def test_a_log_in_which_every_user_is_nobody_is_judged(world: World, ranker: Ranker, tmp_path: Path) -> None:
    log = replace(world.log, user_id=np.zeros(len(world.log), np.uint64))
    judged = evaluate(ranker, log, WORLD.test_ts, {"favorite": 1.0}, ablation_requests=30)
    sources = judged.figures["favorite"]
    assert {MODEL, *BASELINES} <= set(sources)
    assert all(0 <= kinds["AUC"].value <= 1 for kinds in sources.values())
    write_evaluation(judged, tmp_path, "Title", "command")
    assert (judged.users, judged.requests_of_nobody) == (0, judged.requests)
    said = f"of 0 users and {judged.requests:,} requests of nobody, each of which counts as a user"
    assert said in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_nobody_and_unknown_authors_are_neither_known_nor_new(world: World, ranker: Ranker) -> None:
    ids = {name: getattr(world.log, name).copy() for name in ("user_id", "author_id")}
    is_nobody, is_unknown = world.log.request_id % 3 > 0, world.log.post_id % 2 > 0
    ids["user_id"][is_nobody] = ids["author_id"][is_unknown] = 0
    test = world.log.impression_ts >= WORLD.test_ts
    groups = evaluate(ranker, replace(world.log, **ids), WORLD.test_ts, {"favorite": 1.0}, ablation_requests=10).groups
    shares = {name: share for name, (share, _) in groups.items()}
    assert shares["nobody"] == pytest.approx(is_nobody[test].mean())
    assert shares["unknown authors"] == pytest.approx(is_unknown[test].mean())
    for kind in ("users", "authors"):
        of_kind = sum(shares.get(f"{word} {kind}", 0) for word in ("known", "new"))
        assert of_kind == pytest.approx(1 - shares["nobody" if kind == "users" else "unknown authors"])


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_the_verdict_names_the_closest_baseline_or_the_loss(evaluation: Evaluation) -> None:
    def told(*gains: Figure) -> str:
        made = [BaselineComparison("favorite", METRICS[i], "popularity", gain) for i, gain in enumerate(gains)]
        return replace(evaluation, comparisons=made).verdict()

    won, doubtful, lost = Figure(0.2, 0.1, 0.3), Figure(0.01, -0.02, 0.04), Figure(-0.03, -0.05, -0.01)
    behind = Figure(-0.008, -0.048, 0.025)
    assert told(won, won).startswith("The model is ahead of every baseline on every metric.")
    assert told(won, doubtful).startswith("The model loses to no baseline: of 2 comparisons it leads 1 and ties 1.")
    assert "AUC within users of favorite: +0.010" in told(won, doubtful)
    assert told(won, behind).startswith("The model loses to no baseline"), "a lead whose interval holds 0 is a tie"
    unsure = Figure(0.125, float("nan"), float("nan"))  # of a test period of one user
    assert "it leads 0 and ties 1" in told(unsure)
    assert told(unsure).endswith("The closest is popularity on AUC of favorite: +0.125 (no interval).")
    unsure_behind = Figure(-0.125, float("nan"), float("nan"))
    assert told(won, unsure_behind).startswith(
        "The model loses to no baseline: of 2 comparisons it leads 1 and ties 1."
    )
    assert told(won, unsure_behind).endswith("on AUC within users of favorite: -0.125 (no interval).")
    assert told(won, behind, lost).startswith(
        "The model LOSES to popularity. On AUC within requests of favorite its lead over popularity is -0.030"
    )
    assert "Of 3 comparisons it loses 1, ties 1 and leads 1." in told(won, behind, lost)
    assert "both outcomes" in replace(evaluation, comparisons=[]).verdict()


@pytest.mark.slow
def test_a_test_period_that_tells_nothing_is_said_first(world: World, ranker: Ranker) -> None:
    """No baseline is advised whose own interval holds 0.5."""
    actions = np.zeros_like(world.log.actions)
    actions[np.random.default_rng(1).permutation(len(actions))[:40], 0] = True
    evaluation = evaluate(
        ranker, replace(world.log, actions=actions), WORLD.test_ts, {"favorite": 1.0}, ablation_requests=10
    )
    count = int(actions[world.log.impression_ts >= WORLD.test_ts].sum())
    assert evaluation.verdict().startswith(
        f"Too few to tell: of 1,872 impressions in the test period, {count} with favorite."
    )
    assert evaluation.too_few
    assert "Do not serve" not in evaluation.verdict()


def test_users_learned_by_heart_are_remarked_on(evaluation: Evaluation, tmp_path: Path) -> None:
    worse = replace(evaluation, ablations=evaluation.ablations | {"none": (0.7, 0.3), "no user": (0.72, 0.3)})
    assert "Without the user's own row the model orders better (AUC 0.720, with it 0.700)" in worse.remarks()[0]
    write_evaluation(worse, tmp_path, "Title", "command")
    assert worse.remarks()[0] in (tmp_path / "report.md").read_text()
    better = replace(evaluation, ablations=evaluation.ablations | {"none": (0.7, 0.3), "no user": (0.68, 0.3)})
    assert not any("own row" in remark for remark in better.remarks())


@pytest.mark.slow
def test_what_the_model_uses_is_told_of_rare_actions_too(world: World, ranker: Ranker) -> None:
    evaluation = evaluate(ranker, world.log, WORLD.test_ts, {"reply": 1.0}, ablation_requests=100)
    assert not np.isnan(evaluation.ablations["none"][0])
    sample = evaluate(ranker, world.log, WORLD.test_ts, {"favorite": 1.0}, ablation_requests=100)
    assert evaluation.ablations["none"][0] != sample.ablations["none"][0], "of the actions of the score, not of all"


def test_a_model_is_compared_on_its_own_validation(world: World, ranker: Ranker) -> None:
    settings = TrainSettings(validation_share=0.3)
    judged = on_own_validation(ranker, world.log, settings, WORLD.test_ts, {"favorite": 1.0})
    assert set(judged.figures["favorite"]) == {MODEL, *SIMPLE}
    told = judged.lines()
    assert told[0].startswith(
        f"On its own validation, {judged.requests:,} requests with {judged.positives['favorite']:,} times favorite"
    )
    assert told[-1].startswith("The model LOSES to counts"), "its weights are random"


@pytest.mark.parametrize(("high", "is_lost"), [(-0.1, True), (0.1, False), (float("nan"), False)])
def test_train_says_loses_only_where_that_is_sure(high: float, is_lost: bool) -> None:
    gain = Figure(-0.2, high - 0.2, high)
    behind = BaselineComparison("favorite", METRICS[1], "counts", gain)
    figures_of = {"favorite": {MODEL: Figure(0.5, 0.4, 0.6), "counts": Figure(0.7, 0.6, 0.8)}}
    judged = OwnValidation(100, {"favorite": 20}, figures_of, [behind])
    assert any(line.startswith("The model LOSES to counts there") for line in judged.lines()) == is_lost
    assert judged.is_behind("counts")


def test_a_report_that_the_disk_cannot_hold_leaves_the_old_one(tmp_path: Path) -> None:
    write_report(tmp_path, "old", {"auc": 0.5})
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    with full_disk(4096), pytest.raises(OSError, match="the file is as before") as refused:
        write_report(tmp_path, "new " * 2000, {"auc": 0.6})
    assert refused.value.filename == str(tmp_path / "report.md")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
