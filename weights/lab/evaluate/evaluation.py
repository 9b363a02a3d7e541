"""Compares the model with baselines and, in a world, with the optimum, all on the same rows. `report` writes the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from model.config import MAX_DWELL_SECONDS
from model.ranker import Ranker
from model.ranking import Calibration
from weights.actions import weight_vector
from weights.lab.evaluate import metrics
from weights.lab.evaluate.baselines import BASELINES, SIMPLE, baselines
from weights.lab.evaluate.metrics import CHANCE, Figure, Means, PooledAuc, Sampled, auc_within, draws_of, ndcg
from weights.lab.evaluate.predict import ABLATIONS, Prediction, predict, rows_of
from weights.lab.training.examples import Examples
from weights.lab.training.log import IN_MEMORY_ROWS, Log
from weights.lab.training.run import check_split, split
from weights.lab.training.settings import TrainSettings
from weights.lab.world.store import Facts
from weights.progress import Update

FREQUENT_SHARE = 0.01
MOST_HEADLINES = 5
REMARKABLE = 0.001  # a difference of AUC that the report remarks on
SIMPLE_ROWS = 2_000_000
"""Of a log that is not read into memory, the simple baselines of a run are fitted to so many of the newest rows: counts of all would not
fit either."""
MODEL, TRUE_AFFINITY, OPTIMUM = "model", "true affinity", "optimum"
K = 10
METRICS = ("AUC", "AUC within users", "AUC within requests", f"NDCG@{K} of requests", f"NDCG@{K} of users")
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BaselineComparison:
    """The model against a baseline on one metric of one action: the model's lead, with its interval."""

    action: str
    metric: str
    baseline: str
    gain: Figure

    @property
    def is_lead(self) -> bool:
        """Whether the whole interval of the model's lead is above 0."""
        return self.gain.low > 0

    @property
    def is_loss(self) -> bool:
        """Whether the whole interval is below 0."""
        return self.gain.high < 0

    @property
    def is_tie(self) -> bool:
        """Whether the difference may be chance, as any without an interval."""
        return not self.is_lead and not self.is_loss

    @property
    def lead(self) -> str:
        """The lead for people, with its interval; one over fewer than ten users has none."""
        low, high = self.gain.low, self.gain.high
        interval = "no interval" if np.isnan(low) else f"{low:+.3f} … {high:+.3f}"
        return f"{self.gain.value:+.3f} ({interval})"


@dataclass(frozen=True, slots=True, eq=False)
class Quality:
    """How far the model's probabilities of one action can be trusted. `mean`: the mean prediction, to hold against the action's share.

    `observed`, `predicted`: float `[b]`, the share and the mean prediction in bins of about equal count by prediction.
    """

    log_loss: float
    normalised_entropy: float
    mean: float
    calibration_error: float
    observed: metrics.Array
    predicted: metrics.Array

    @classmethod
    def of(cls, happened: NDArray[np.bool_], probability: Floats) -> Quality:
        """The quality of these predictions, `[n]` each; of none, NaN."""
        if not len(happened):
            nothing, none = float("nan"), np.zeros(0)
            return cls(nothing, nothing, nothing, nothing, none, none)
        return cls(
            metrics.log_loss(happened, probability),
            metrics.normalised_entropy(happened, probability),
            float(probability.mean()),
            metrics.calibration_error(happened, probability),
            *metrics.reliability(happened, probability)[:2],
        )


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """`figures[action][source][metric]` for the actions that the score is for; sources are the model, the baselines and what a world knows.

    `shares`, `positives`: how often each action happens in the test period. `quality[action]`: of the model's probabilities.
    `pooled[source][action]`: the AUC over all rows, of every action that the test period has. `score[metric]`: the served score, against
    what the actions that followed are worth. `ablations[name]`: mean AUC and log-loss of the actions that the score is for, on a sample
    of requests. `groups[name]`: the share of impressions and each
    source's AUC. A metric that the log cannot have is absent everywhere.
    """

    actions: tuple[str, ...]
    headline: tuple[str, ...]
    shares: dict[str, float]
    positives: dict[str, int]
    figures: dict[str, dict[str, dict[str, Figure]]]
    comparisons: list[BaselineComparison]
    pooled: dict[str, dict[str, float]]
    quality: dict[str, Quality]
    score: dict[str, Figure]
    ablations: dict[str, tuple[float, float]]
    groups: dict[str, tuple[float, dict[str, float]]]
    dwell_error_seconds: tuple[float, float] | None  # of the model, and of always predicting the mean
    requests: int
    impressions: int
    users: int
    requests_of_nobody: int
    resamples: int
    span: str
    histories: (
        tuple[float, float] | None
    )  # as served, and by the rows of the log: events on average; None without contexts as served

    @property
    def frequent(self) -> list[str]:
        """Actions with at least 1 % positives in the test period, but not always taken."""
        return [name for name in self.actions if FREQUENT_SHARE <= self.shares[name] < 1]

    def mean_auc(self, source: str) -> float:
        """Mean AUC over the frequent actions; NaN for a source that does not predict all of them."""
        return metrics.mean(self.pooled[source][name] for name in self.frequent)

    def way(self, source: str) -> float:
        """The share of the way from 0.5 to the optimum's mean AUC that a source reaches; NaN without a world."""
        if OPTIMUM not in self.pooled or len(self.pooled[source]) < len(self.pooled[OPTIMUM]):
            return float("nan")
        return (self.mean_auc(source) - 0.5) / (self.mean_auc(OPTIMUM) - 0.5)

    def calibration_error(self) -> float:
        """The model's mean calibration error over the frequent actions."""
        return metrics.mean(self.quality[name].calibration_error for name in self.frequent)

    @property
    def losses(self) -> list[BaselineComparison]:
        """Where a baseline is surely better than the model."""
        return [comparison for comparison in self.comparisons if comparison.is_loss]

    def beats_chance(self, source: str) -> bool:
        """Whether a source's AUC, pooled or within users, is surely above 0.5 for an action that the score is for."""
        return any(
            sources[source][metric].low > CHANCE
            for sources in self.figures.values()
            for metric in METRICS[:2]
            if source in sources and metric in sources[source]
        )

    @property
    def too_few(self) -> bool:
        """Whether the test period cannot tell: neither the model nor a baseline is surely better than chance."""
        return not any(self.beats_chance(source) for source in (MODEL, *BASELINES))

    def verdict(self) -> str:
        """Whether the model is worth serving, by the metrics that say how it orders: losses, ties and leads apart."""
        if not self.comparisons:
            return "Nothing can be said about the order: no action of the score has both outcomes in the test period."
        if self.too_few:
            counts = ", ".join(f"{self.positives[name]:,} with {name}" for name in self.headline)
            return (
                f"Too few to tell: of {self.impressions:,} impressions in the test period, {counts}. Neither the model nor a baseline is "
                "surely better than chance. Collect more before you decide."
            )
        leads, ties = (
            sum(getattr(comparison, kind) for comparison in self.comparisons) for kind in ("is_lead", "is_tie")
        )
        closest = min(self.comparisons, key=lambda comparison: comparison.gain.value)
        count = len(self.comparisons)
        if self.losses:
            worst = min(self.losses, key=lambda comparison: comparison.gain.value)
            baselines_ahead = sorted({comparison.baseline for comparison in self.losses})
            return (
                f"The model LOSES to {', '.join(baselines_ahead)}. On {worst.metric} of {worst.action} its lead over {worst.baseline} is "
                f"{worst.lead}. Of {count} comparisons it loses {len(self.losses)}, ties {ties} and leads {leads}. "
                "Do not serve it in place of these."
            )
        if ties:
            return (
                f"The model loses to no baseline: of {count} comparisons it leads {leads} and ties {ties}. The closest is "
                f"{closest.baseline} on {closest.metric} of {closest.action}: {closest.lead}."
            )
        return (
            f"The model is ahead of every baseline on every metric. The closest is {closest.baseline} on {closest.metric} of "
            f"{closest.action}: {closest.lead}."
        )

    def remarks(self) -> list[str]:
        """What else a reader should know, a sentence each; often nothing."""
        remarks = []
        whole, without = (self.ablations[name][0] for name in ("none", "no user"))
        if without > whole + REMARKABLE:
            remarks.append(
                f"Without the user's own row the model orders better (AUC {without:.3f}, with it {whole:.3f}): it learned users by heart. "
                "Train again with --set hidden_user_share=0.9."
            )
        if not self.too_few and not self.beats_chance(MODEL):
            remarks.append("The model is not surely better than chance: the interval of its AUC holds 0.5.")
        if self.histories:
            served, of_rows = self.histories
            remarks.append(
                f"The model reads histories as they were served, {served:.1f} events on average. "
                f"The baselines read those that the log's rows give for the same requests, {of_rows:.1f} events."
            )
        return remarks


@dataclass(frozen=True, slots=True, eq=False)
class Judge:
    """The rows of the test period by user and by request, and how often each user is drawn in the resamples, float `[R, U]`."""

    log: Log
    user: NDArray[np.int64]
    request: NDArray[np.int64]
    user_of_request: NDArray[np.int64]
    draws: metrics.Array

    @classmethod
    def of(cls, log: Log) -> Judge:
        """The judge of these impressions, which are in time order."""
        user = log.people
        _, first, request = np.unique(log.request_id, return_index=True, return_inverse=True)
        return cls(log, user, request, user[first], draws_of(int(user.max()) + 1))

    def measured(
        self, happened: NDArray[np.bool_], score: metrics.Array, is_known: NDArray[np.bool_] | None = None
    ) -> dict[str, Sampled]:
        """Each metric that these rows can have, by its name in METRICS. `is_known`: of which rows it is known what happened; None: all."""
        requests, rows = len(self.user_of_request), slice(None) if is_known is None else is_known
        happened, score, user, request = happened[rows], score[rows], self.user[rows], self.request[rows]
        within = auc_within(user, happened, score), auc_within(request, happened, score)
        lists = ndcg(request, score, happened, K), ndcg(user, score, happened, K)
        users = np.arange(self.draws.shape[1])
        statistics: tuple[Means | PooledAuc, ...] = (
            PooledAuc.of(happened, score, user),
            self.means(*within[0], users),
            self.means(*within[1], self.user_of_request),
            self.means(*lists[0], self.user_of_request),
            self.means(*lists[1], users),
        )
        by_metric = dict(zip(METRICS, statistics, strict=True))
        several = len(self.log) > requests
        return {
            name: Sampled.of(statistic, self.draws)
            for name, statistic in by_metric.items()
            if (statistic.counts.sum() > 0 if isinstance(statistic, Means) else happened.any() and not happened.all())
            and ("requests" not in name or several)
        }

    def means(self, groups: metrics.Ints, values: metrics.Array, user_of: NDArray[np.int64]) -> Means:
        """The mean of the groups' values; `user_of` says whose each group is."""
        users = self.draws.shape[1]
        return Means(
            np.asarray(np.bincount(user_of[groups], values, users), np.float64),
            np.bincount(user_of[groups], minlength=users),
        )


def evaluate(
    ranker: Ranker,
    log: Log,
    test_ts: int,
    score_weights: Mapping[str, float],
    facts: Facts | None = None,
    *,
    dwell_output: int | None = 0,
    corrections: Calibration | None = None,
    ablation_requests: int = 2000,
    seed: int = 1,
    progress: Update = lambda what, done, total: None,
) -> Evaluation:
    """Compare on all requests from `test_ts` on. Baselines know the log before it. `facts` adds the world's optimum;
    `dwell_output` is the continuous output that predicts the dwell, None if there is none; `corrections` is the checkpoint's calibration.

    Raises TableError if one side of the split is empty.
    """
    check_split(log, test_ts)
    examples = Examples(log, ranker.config)
    first = int(np.searchsorted(examples.times, test_ts))
    requests = np.arange(first, len(examples))
    train, test = log.before(test_ts), log.since(test_ts)
    model = predict(ranker, examples, requests, progress=partial(progress, "scoring"), corrections=corrections)
    headline = headline_actions(test, score_weights)
    simple = baselines(examples, first, headline, seed, partial(progress, "baselines"))
    sources = {MODEL: dict(enumerate(model.probabilities.T)), **simple}
    if facts:
        sources[TRUE_AFFINITY] = dict(enumerate(_ordinal(facts.truth.affinity, test, score_weights).T))
        sources[OPTIMUM] = dict(enumerate(facts.truth.probabilities.T))
    judge, names = Judge.of(test), log.action_names
    figures, comparisons = _compared(judge, sources, headline, partial(progress, "intervals"))
    weights = weight_vector(score_weights, names).astype(np.float32)
    sample = np.sort(np.random.default_rng(seed).permutation(requests)[:ablation_requests])
    return Evaluation(
        actions=names,
        headline=tuple(names[action] for action in headline),
        shares=dict(zip(names, test.shares.tolist(), strict=True)),
        positives={name: int(test.actions[:, i].sum()) for i, name in enumerate(names)},
        figures=figures,
        comparisons=comparisons,
        pooled={source: _pooled(test, probabilities) for source, probabilities in sources.items()},
        quality={
            name: Quality.of(test.actions[is_known, i], model.probabilities[is_known, i])
            for i, name in enumerate(names)
            for is_known in [test.known_rows(i)]
        },
        score=_score(judge, model.probabilities @ weights, test.actions @ weights, known_worth(test, weights)),
        ablations=_ablations(ranker, examples, sample, headline, progress, corrections),
        groups=_groups(
            train,
            test,
            {source: probabilities for source, probabilities in sources.items() if source != TRUE_AFFINITY},
            headline,
        ),
        dwell_error_seconds=_dwell_error(train, test, model, dwell_output),
        requests=len(requests),
        impressions=len(test),
        users=len(np.unique(test.user_id[test.user_id > 0])),
        requests_of_nobody=len(np.unique(test.request_id[test.user_id == 0])),
        resamples=len(judge.draws),
        span=test.span,
        histories=_histories(examples, requests),
    )


@dataclass(frozen=True, slots=True, eq=False)
class OwnValidation:
    """The ranker and the simple baselines on the requests that its own training validated on. The ranker's weights were chosen on them,
    so its figures are a little too good.

    `figures[action][source]`: the AUC within users where there is one, else the AUC. `positives`: how often each of the actions was taken.
    """

    requests: int
    positives: dict[str, int]
    figures: dict[str, dict[str, Figure]]
    comparisons: list[BaselineComparison]

    def is_behind(self, baseline: str) -> bool:
        """Whether the ranker is behind a baseline on some metric of some action, surely or not."""
        return any(it.baseline == baseline and it.gain.value < 0 for it in self.comparisons)

    def lines(self) -> list[str]:
        """A line for each action that the score is for, then a warning if a baseline is surely better."""
        lines = []
        for action, sources in self.figures.items():
            beside = ", ".join(f"{source} {figure}" for source, figure in sources.items())
            lines.append(
                f"On its own validation, {self.requests:,} requests with {self.positives[action]:,} times {action}: {beside}"
            )
        losses = [comparison for comparison in self.comparisons if comparison.is_loss]
        if losses:
            worst = min(losses, key=lambda comparison: comparison.gain.value)
            baselines_ahead = ", ".join(sorted({comparison.baseline for comparison in losses}))
            lines.append(
                f"The model LOSES to {baselines_ahead} there: on {worst.metric} of {worst.action} its lead over {worst.baseline} is "
                f"{worst.lead}."
            )
        return lines or [
            "Its own validation has no action of the score with both outcomes, so nothing can be said about the order."
        ]


def on_own_validation(
    ranker: Ranker, log: Log, settings: TrainSettings, until_ts: int | None, score_weights: Mapping[str, float]
) -> OwnValidation:
    """Compare a ranker with the simple baselines on the validation requests of its own run, which `train` was given by these arguments."""
    examples = Examples(log.before(until_ts), ranker.config)
    trained, validation = split(examples.log.counted_requests, settings.validation_requests, settings.validation_share)
    first = len(trained)
    rows = rows_of(examples, validation)
    shown = examples.log.take(rows)
    headline = headline_actions(shown, score_weights)
    model = predict(ranker, examples, validation).probabilities
    begin = int(examples.starts[first])
    if len(examples.log) > IN_MEMORY_ROWS:
        skipped = int(
            np.searchsorted(examples.starts, begin - SIMPLE_ROWS)
        )  # requests that simple baselines do not read
        first -= skipped
        examples = Examples(examples.log.take(slice(int(examples.starts[skipped]), None)), ranker.config)
    simple = baselines(examples, first, headline, names=SIMPLE)
    sources = {MODEL: dict(enumerate(model.T))} | {
        name: {action: values[rows - begin] for action, values in of_action.items()}
        for name, of_action in simple.items()
    }
    figures, comparisons = _compared(Judge.of(shown), sources, headline, lambda done, total: None)
    ordering = METRICS[:2]
    return OwnValidation(
        requests=len(validation),
        positives={log.action_names[action]: int(shown.actions[:, action].sum()) for action in headline},
        figures={
            action: {
                source: next(kinds[metric] for metric in reversed(ordering) if metric in kinds)
                for source, kinds in kinds_of.items()
            }
            for action, kinds_of in figures.items()
        },
        comparisons=[comparison for comparison in comparisons if comparison.metric in ordering],
    )


def headline_actions(test: Log, score_weights: Mapping[str, float]) -> list[int]:
    """The actions, by place, that the score is mostly for: those of positive weight with both outcomes, frequent if there are such."""
    shares = test.shares
    worth = weight_vector(score_weights, test.action_names)
    worth = worth if (worth > 0).any() else np.ones(len(worth))
    eligible = [i for i in np.argsort(-worth * shares, kind="stable").tolist() if worth[i] > 0 and 0 < shares[i] < 1]
    return ([i for i in eligible if shares[i] >= FREQUENT_SHARE] or eligible)[:MOST_HEADLINES]


def _compared(
    judge: Judge,
    sources: Mapping[str, Mapping[int, Floats]],
    headline: list[int],
    progress: Callable[[int, int], None],
) -> tuple[dict[str, dict[str, dict[str, Figure]]], list[BaselineComparison]]:
    figures: dict[str, dict[str, dict[str, Figure]]] = {}
    comparisons = []
    for done, action in enumerate(headline):
        name, happened = judge.log.action_names[action], judge.log.actions[:, action]
        is_known = judge.log.known_rows(action)
        measured = {
            source: judge.measured(happened, probabilities[action], is_known)
            for source, probabilities in sources.items()
        }
        figures[name] = {
            source: {metric: sampled.figure() for metric, sampled in kinds.items()}
            for source, kinds in measured.items()
        }
        comparisons += [
            BaselineComparison(name, metric, baseline, (ours - measured[baseline][metric]).figure())
            for baseline in BASELINES
            if baseline in measured
            for metric, ours in measured[MODEL].items()
        ]
        progress(done + 1, len(headline))
    return figures, comparisons


def _histories(examples: Examples, requests: NDArray[np.int64]) -> tuple[float, float] | None:
    """The mean number of events of the histories that were served, and of those that the log's rows give for the same requests."""
    served = requests[examples.served[requests] >= 0]
    if not len(served):
        return None
    of_rows = examples.last[served] - examples.oldest[served]
    return float(examples.history_lengths[served].mean()), float(of_rows.mean())


def known_worth(log: Log, weights: NDArray[np.floating]) -> NDArray[np.bool_]:
    """The rows of which every action that the score is for is known, bool `[n]`. An action that is known of no row is left out."""
    if log.unknown is None:
        return np.ones(len(log), bool)
    return np.asarray(~log.unknown[:, (weights != 0) & log.known_actions].any(1))


def _score(judge: Judge, score: Floats, worth: Floats, is_known: NDArray[np.bool_]) -> dict[str, Figure]:
    """NDCG of the served score by what the actions are worth; empty if there is never anything to order."""
    score, worth = score[is_known], worth[is_known]
    lists = ndcg(judge.request[is_known], score, worth, K), ndcg(judge.user[is_known], score, worth, K)
    users = judge.user_of_request, np.arange(judge.draws.shape[1])
    means = {METRICS[3 + i]: judge.means(*groups, users[i]) for i, groups in enumerate(lists)}
    return {name: Sampled.of(groups, judge.draws).figure() for name, groups in means.items() if groups.counts.any()}


def _pooled(test: Log, probabilities: Mapping[int, Floats]) -> dict[str, float]:
    return {
        test.action_names[i]: metrics.auc(test.actions[is_known, i], probability[is_known])
        for i, probability in probabilities.items()
        for is_known in [test.known_rows(i)]
        if 0 < test.shares[i] < 1
    }


def _ordinal(values: Floats, test: Log, score_weights: Mapping[str, float]) -> Floats:
    """A ranking without probabilities as a sigmoid, reversed for actions with negative weight. Only its AUC is meaningful."""
    signs = np.array([-1 if score_weights.get(name, 0) < 0 else 1 for name in test.action_names], np.float32)
    return np.asarray(1 / (1 + np.exp(-values[:, None] * signs)), np.float32)


def _ablations(
    ranker: Ranker,
    examples: Examples,
    sample: NDArray[np.int64],
    headline: list[int],
    progress: Update,
    corrections: Calibration | None,
) -> dict[str, tuple[float, float]]:
    rows = examples.log.take(rows_of(examples, sample))
    is_known = [rows.known_rows(i) for i in range(len(rows.action_names))]
    judged = [i for i in headline if len(rows.actions[is_known[i]])]
    means: dict[str, tuple[float, float]] = {}
    for name in ABLATIONS:
        shown = partial(progress, f"ablation: {name}")
        probabilities = predict(ranker, examples, sample, name, progress=shown, corrections=corrections).probabilities
        losses = [metrics.log_loss(rows.actions[is_known[i], i], probabilities[is_known[i], i]) for i in judged]
        aucs = [metrics.auc(rows.actions[is_known[i], i], probabilities[is_known[i], i]) for i in judged]
        means[name] = (metrics.mean(aucs), metrics.mean(losses))
    return means


def _groups(
    train: Log, test: Log, sources: Mapping[str, Mapping[int, Floats]], headline: list[int]
) -> dict[str, tuple[float, dict[str, float]]]:
    """New and known users, posts and authors apart, and those whose id is 0: the groups that the test period has, where some action has
    both outcomes."""
    aucs_of_groups = {}
    for kind, without in (("user", "nobody"), ("post", "no post"), ("author", "unknown authors")):
        ids = getattr(test, f"{kind}_id")
        is_none, is_old = ids == 0, np.isin(ids, getattr(train, f"{kind}_id"))
        for name, rows in (
            (f"known {kind}s", is_old & ~is_none), (f"new {kind}s", ~is_old & ~is_none), (without, is_none),
        ):  # fmt: skip
            judged_rows = {i: rows & test.known_rows(i) for i in headline}
            aucs = {
                source: metrics.mean(
                    metrics.auc(test.actions[judged_rows[i], i], probabilities[i][judged_rows[i]]) for i in headline
                )
                for source, probabilities in sources.items()
                if rows.any()
            }
            if aucs and not np.isnan(aucs[MODEL]):
                aucs_of_groups[name] = float(rows.mean()), aucs
    return aucs_of_groups


def _dwell_error(train: Log, test: Log, model: Prediction, output: int | None) -> tuple[float, float] | None:
    """Root mean squared errors in seconds of the model and of the training mean, with dwells cut at 30 s."""
    has_dwell, before = test.dwell_seconds > 0, train.dwell_seconds[train.dwell_seconds > 0]
    if output is None or not model.continuous.shape[1] or not has_dwell.any() or not len(before):
        return None
    seconds = np.minimum(test.dwell_seconds[has_dwell], MAX_DWELL_SECONDS)
    mean = np.minimum(before, MAX_DWELL_SECONDS).mean()
    errors = (model.continuous[has_dwell, output] * MAX_DWELL_SECONDS - seconds, mean - seconds)
    return float(np.sqrt(np.mean(errors[0] ** 2))), float(np.sqrt(np.mean(errors[1] ** 2)))
