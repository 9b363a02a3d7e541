"""Compares the model with baselines and the optimum, all on the same rows. `report` writes the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from model.config import MAX_DWELL_SECONDS
from model.ranker import Ranker
from weights.evaluate import metrics
from weights.evaluate.metrics import Reliability
from weights.evaluate.predict import ABLATIONS, Prediction, affinity, popularity, predict
from weights.training.examples import Examples
from weights.training.log import Log
from weights.world.store import Facts

FREQUENT_SHARE = 0.01
MODEL, POPULARITY, AFFINITY, TRUE_AFFINITY, OPTIMUM = (
    "model", "popularity", "affinity", "true affinity", "optimum",
)  # fmt: skip
Floats = NDArray[np.float32]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class ActionFigures:
    """Figures of one source for one action."""

    auc: float
    log_loss: float
    normalised_entropy: float
    calibration_error: float


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """`shares`: how often each action happens in the test period. `figures[source][action]`, `ndcg[source]`.

    `ablations[name]` holds (mean AUC over frequent actions, mean log-loss, NDCG) on a sample of requests; "none" is the unchanged model.
    `groups[name]`: mean AUC of the model and, in a world, of the optimum over the rows of new users, known users, new posts.
    """

    actions: tuple[str, ...]
    shares: dict[str, float]
    figures: dict[str, dict[str, ActionFigures]]
    ndcg: dict[str, float]
    reliability: dict[str, Reliability]
    ablations: dict[str, tuple[float, float, float]]
    groups: dict[str, tuple[float, float]]
    dwell_error_seconds: tuple[float, float] | None  # of the model, and of always predicting the mean
    requests: int
    impressions: int

    @property
    def frequent(self) -> list[str]:
        """Actions with at least 1 % positives in the test period: the ones that the headline figures average over."""
        return [name for name in self.actions if self.shares[name] >= FREQUENT_SHARE]

    def mean_auc(self, source: str) -> float:
        """Mean AUC over the frequent actions."""
        return metrics.mean(self.figures[source][name].auc for name in self.frequent)

    def way(self, source: str) -> float:
        """The share of the way from 0.5 to the optimum's mean AUC that a source reaches; NaN without a world."""
        if OPTIMUM not in self.figures:
            return float("nan")
        return (self.mean_auc(source) - 0.5) / (self.mean_auc(OPTIMUM) - 0.5)

    def calibration_error(self, source: str) -> float:
        """Mean calibration error over the frequent actions."""
        return metrics.mean(self.figures[source][name].calibration_error for name in self.frequent)


def evaluate(
    ranker: Ranker,
    log: Log,
    test_ts: int,
    score_weights: Mapping[str, float],
    facts: Facts | None = None,
    *,
    dwell_output: int | None = 0,
    ablation_requests: int = 3000,
    seed: int = 1,
    progress: Progress = lambda what, done, total: None,
) -> Evaluation:
    """Compare on all requests from `test_ts` on. Baselines know the log before it. `facts` adds the world's optimum;
    `dwell_output` is the continuous output that predicts the dwell, None if there is none.

    Raises ValueError if one side of the split is empty.
    """
    examples = Examples(log, ranker.config)
    requests = np.flatnonzero(examples.times >= test_ts)
    if not len(requests) or len(requests) == len(examples):
        raise ValueError(f"the log has no requests on one side of the split at {test_ts}")
    train, test = log.take(log.impression_ts < test_ts), log.take(log.impression_ts >= test_ts)
    model = predict(ranker, examples, requests, progress=partial(progress, "scoring"))
    sources = {
        MODEL: model.probabilities,
        POPULARITY: popularity(train, test),
        AFFINITY: affinity(train, test, facts.author_topics if facts else None),
    }
    if facts:
        sources[TRUE_AFFINITY] = _ordinal(facts.truth.affinity, test, score_weights)
        sources[OPTIMUM] = facts.truth.probabilities
    weights = np.array([score_weights.get(name, 0.0) for name in log.action_names], np.float32)
    sample = np.sort(np.random.default_rng(seed).permutation(requests)[:ablation_requests])
    return Evaluation(
        actions=log.action_names,
        shares={name: float(test.actions[:, i].mean()) for i, name in enumerate(log.action_names)},
        figures={source: _figures(test, values) for source, values in sources.items()},
        ndcg={source: _ndcg(test, values, weights) for source, values in sources.items()},
        reliability={
            name: metrics.reliability(test.actions[:, i], model.probabilities[:, i])
            for i, name in enumerate(log.action_names)
        },
        ablations=_ablations(ranker, examples, sample, weights, progress),
        groups=_groups(train, test, model.probabilities, facts),
        dwell_error_seconds=_dwell_error(train, test, model, dwell_output),
        requests=len(requests),
        impressions=len(test),
    )


def _figures(test: Log, probabilities: Floats) -> dict[str, ActionFigures]:
    kinds = metrics.auc, metrics.log_loss, metrics.normalised_entropy, metrics.calibration_error
    return {
        name: ActionFigures(*(kind(test.actions[:, index], probabilities[:, index]) for kind in kinds))
        for index, name in enumerate(test.action_names)
    }


def _ordinal(values: Floats, test: Log, score_weights: Mapping[str, float]) -> Floats:
    """A ranking without probabilities as a sigmoid, reversed for actions with negative weight. Only its AUC is meaningful."""
    signs = np.array([-1 if score_weights.get(name, 0) < 0 else 1 for name in test.action_names], np.float32)
    return np.asarray(1 / (1 + np.exp(-values[:, None] * signs)), np.float32)


def _ndcg(test: Log, probabilities: Floats, weights: Floats) -> float:
    return metrics.ndcg(test.request_id, probabilities @ weights, test.actions @ weights)


def _mean_auc(test: Log, probabilities: Floats, rows: NDArray[np.bool_] | None = None) -> float:
    """Mean AUC on `rows` (all if None), over the actions that are frequent in `test` and happened, though not always, on them."""
    rows = np.ones(len(test), bool) if rows is None else rows
    frequent = np.flatnonzero(test.actions.mean(0) >= FREQUENT_SHARE)
    return metrics.mean(metrics.auc(test.actions[rows, i], probabilities[rows, i]) for i in frequent)


def _ablations(
    ranker: Ranker, examples: Examples, sample: NDArray[np.int64], weights: Floats, progress: Progress
) -> dict[str, tuple[float, float, float]]:
    rows = examples.log.take(np.concatenate([examples.rows(index) for index in sample]))
    result: dict[str, tuple[float, float, float]] = {}
    for name in ABLATIONS:
        values = predict(ranker, examples, sample, name, progress=partial(progress, f"ablation: {name}")).probabilities
        losses = [metrics.log_loss(rows.actions[:, i], values[:, i]) for i in range(values.shape[1])]
        result[name] = (_mean_auc(rows, values), float(np.mean(losses)), _ndcg(rows, values, weights))
    return result


def _groups(train: Log, test: Log, model: Floats, facts: Facts | None) -> dict[str, tuple[float, float]]:
    new_users = ~np.isin(test.user_id, train.user_id)
    new_posts = ~np.isin(test.post_id, train.post_id)
    groups = {
        "known users": ~new_users,
        "new users": new_users,
        "posts seen in training": ~new_posts,
        "new posts": new_posts,
    }
    result = {}
    for name, rows in groups.items():
        if rows.any():
            best = _mean_auc(test, facts.truth.probabilities, rows) if facts else float("nan")
            result[f"{name} ({rows.mean():.1%} of impressions)"] = (_mean_auc(test, model, rows), best)
    return result


def _dwell_error(train: Log, test: Log, model: Prediction, output: int | None) -> tuple[float, float] | None:
    """Root mean squared errors in seconds of the model and of the training mean, with dwells cut at 30 s."""
    known = test.dwell_seconds > 0
    if output is None or not model.continuous.shape[1] or not known.any():
        return None
    seconds = np.minimum(test.dwell_seconds[known], MAX_DWELL_SECONDS)
    mean = np.minimum(train.dwell_seconds[train.dwell_seconds > 0], MAX_DWELL_SECONDS).mean()
    errors = (model.continuous[known, output] * MAX_DWELL_SECONDS - seconds, mean - seconds)
    return float(np.sqrt(np.mean(errors[0] ** 2))), float(np.sqrt(np.mean(errors[1] ** 2)))
