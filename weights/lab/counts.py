"""What plain counts say of the rows of a log: rates of posts and authors, what a user did before, and a logistic model on them.

A baseline of `evaluate`, and what `training` smooths the labels of a small log with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weights.lab.evaluate.metrics import auc
from weights.lab.training.examples import Examples
from weights.lab.training.log import Log
from weights.values import DAY_SECONDS

STRENGTH = 20.0  # impressions that the rate which a rate is drawn towards counts as
COUNTS_FROM = 0.25  # the first quarter of the rows has hardly any counts
MOST_ROWS = 200_000  # to fit the models on
LASTING_AUC = 0.55
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """Sums over the earlier rows of a log with the same key that count: of an action, and of rows. Float32 `[n]` each.

    Earlier is what has a smaller time, as for the ranker's histories. Rows of the same second do not count, of the same request or of
    others: what happened to one was not known when another was ranked.
    """

    taken: Floats
    shown: Floats

    @classmethod
    def of(
        cls, key: NDArray[np.unsignedinteger], time: Ints, happened: NDArray[np.bool_], counted: NDArray[np.bool_]
    ) -> Past:
        """`key`, `happened`, `counted` `[n]` in the order of `time`, int64 `[n]`."""
        order = np.argsort(key, kind="stable")
        counts = counted[order]
        begins = np.append(True, key[order][1:] != key[order][:-1])
        fresh = begins | np.append(True, time[order][1:] != time[order][:-1])
        first = np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
        before = np.maximum.accumulate(np.where(fresh, np.arange(len(order)), 0))
        sums = []
        for values in (happened[order] & counts, counts):
            total = np.concatenate(([0], np.cumsum(values)))
            back = np.empty(len(order), np.float32)
            back[order] = total[before] - total[first]
            sums.append(back)
        return cls(*sums)

    def rate(self, prior: Floats | float, strength: float = STRENGTH) -> Floats:
        """The action's rate, drawn towards `prior` as if that had been seen `strength` times."""
        return np.asarray((self.taken + strength * prior) / (self.shown + strength), np.float32)


def popularity(log: Log, frozen: int, action: int) -> Floats:
    """The rate of the action before row `frozen` of each row's post, drawn towards its author's, float32 `[n]`."""
    post, author, prior = rates(log, frozen, log.actions[:, action], log.known_rows(action))
    return post.rate(author.rate(prior))


def count_probabilities(examples: Examples, frozen: int, action: int, seed: int = 1) -> Floats:
    """Probabilities of the action for every row of the log, float32 `[n]`: a logistic model on `count_features`.

    It is fitted on rows before `frozen`, each as often as its weight says. Every row's counts end before its own second. Where the action
    always or never happened before `frozen`, the post's rate takes its place.
    """
    rows = _rows_to_fit_on(examples.log, frozen, action, seed)
    happened = examples.log.actions[rows, action]
    if happened.all() or not happened.any():
        return popularity(examples.log, frozen, action)
    features = count_features(examples, frozen, action)
    weight = None if examples.log.weight is None else examples.log.weight[rows] / examples.log.weight[rows].mean()
    return _logistic(features[rows], happened, weight, features)


def _rows_to_fit_on(log: Log, frozen: int, action: int, seed: int) -> Ints:
    """At most MOST_ROWS of the rows before `frozen` that have counts, whose outcome is known, and that count, in order."""
    first = int(frozen * COUNTS_FROM)
    rows = np.sort(first + np.random.default_rng(seed).permutation(frozen - first)[:MOST_ROWS])
    rows = rows[log.known_rows(action)[rows]]
    return rows if log.weight is None else rows[log.weight[rows] > 0]


def _logistic(
    features: NDArray[np.float64], happened: NDArray[np.bool_], weight: Floats | None, others: NDArray[np.float64]
) -> Floats:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits

    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    with threadpool_limits(1):
        return np.asarray(
            model.fit(features, happened, logisticregression__sample_weight=weight).predict_proba(others)[:, 1],
            np.float32,
        )


def count_features(examples: Examples, frozen: int, action: int) -> NDArray[np.float64]:
    """What a table of counts knows of each row when it is ranked, `[n, F]`, without unknown values.

    Log-odds of the action's rate of the post, the author and the user; the rate of any action of the post; how often the user did
    anything, or this action, with the author and with the post; the age; which surface; and for each level of content codes the
    log-odds of the code's rate, and how often the user did anything, or this action, with it.
    """
    log = examples.log
    happened, is_known, did_any = log.actions[:, action], log.known_rows(action), np.asarray(log.actions.any(1))
    engaged = did_any & (log.user_id != 0) & is_known
    post, author, prior = rates(log, frozen, happened, is_known)
    any_post, any_author, any_prior = rates(log, frozen, did_any, np.ones(len(log), bool))
    user, pair, again = of_users(log, happened, engaged)
    prior_of_events = float(happened[:frozen].sum() / max(engaged[:frozen].sum(), 1))
    days = np.where(log.created_at > 0, np.maximum(log.impression_ts - log.created_at, 0) / DAY_SECONDS, np.nan)
    days = np.nan_to_num(days, nan=float(np.nanmedian(days)) if (log.created_at > 0).any() else 0.0)
    surfaces = np.unique(log.product_surface[:frozen])[1:]
    columns = [
        _log_odds(post.rate(author.rate(prior))), _log_odds(author.rate(prior)), _log_odds(any_post.rate(any_author.rate(any_prior))),
        _log_odds(user.rate(prior_of_events)), np.log1p(user.shown), np.log1p(pair.taken), np.log1p(pair.shown),
        np.log1p(again.taken), np.log1p(again.shown), (pair.shown + 0.5) / (user.shown + 5), (again.shown + 0.5) / (user.shown + 5),
        days, np.log1p(24 * days), *(log.product_surface == surface for surface in surfaces),
    ]  # fmt: skip
    shown = (np.arange(len(log)) < frozen) & is_known
    for code in log.codes.T.astype(np.uint64):
        rate = Past.of(code, log.impression_ts, happened, shown & (code != 0))
        met = Past.of(pair_key(log.user_id, code), log.impression_ts, happened, engaged & (code != 0))
        columns += [_log_odds(rate.rate(prior)), np.log1p(met.taken), np.log1p(met.shown)]
    return np.stack(columns, 1).astype(np.float64)


def rates(log: Log, frozen: int, happened: NDArray[np.bool_], is_known: NDArray[np.bool_]) -> tuple[Past, Past, float]:
    """What happened to each row's post and author up to row `frozen`, and how often it happened to any, of the rows where it is known.
    Nothing is counted of an author of 0, who is unknown."""
    shown = (np.arange(len(log)) < frozen) & is_known
    post = Past.of(log.post_id, log.impression_ts, happened, shown)
    author = Past.of(log.author_id, log.impression_ts, happened, shown & (log.author_id != 0))
    return post, author, float(happened[:frozen].sum() / max(is_known[:frozen].sum(), 1))


def of_users(log: Log, happened: NDArray[np.bool_], engaged: NDArray[np.bool_]) -> tuple[Past, Past, Past]:
    """What each row's user did before, in all, with the row's author, and with its post, over the rows where `engaged`. Nothing is counted
    of an author of 0, who is unknown."""
    at = log.impression_ts
    return (
        Past.of(log.user_id, at, happened, engaged),
        Past.of(pair_key(log.user_id, log.author_id), at, happened, engaged & (log.author_id != 0)),
        Past.of(pair_key(log.user_id, log.post_id), at, happened, engaged),
    )


def rates_pass(log: Log, frozen: int, action: int) -> bool:
    """Whether the rates of posts and authors before row `frozen` surely say next to nothing of later rows.

    Their AUC must be below LASTING_AUC by two standard deviations of the AUC of a random order (Mann and Whitney, 1947,
    https://doi.org/10.1214/aoms/1177730491).
    """
    later = np.flatnonzero(log.known_rows(action)[frozen:]) + frozen
    happened = log.actions[later, action]
    positives, negatives = int(happened.sum()), int((~happened).sum())
    if not positives or not negatives:
        return False
    deviation = float(((positives + negatives + 1) / (12 * positives * negatives)) ** 0.5)
    return auc(happened, popularity(log, frozen, action)[later]) < LASTING_AUC - 2 * deviation


def repeated_share(log: Log, frozen: int) -> float:
    """The share of the rows from `frozen` on whose user has met their post in a row before it."""
    pairs = pair_key(log.user_id, log.post_id)
    return float(np.isin(pairs[frozen:], pairs[:frozen]).mean()) if frozen < len(pairs) else 0.0


def _log_odds(rate: Floats) -> NDArray[np.float64]:
    inside = np.clip(rate.astype(np.float64), 1e-6, 1 - 1e-6)
    return np.asarray(np.log(inside / (1 - inside)))


def smoothed_labels(examples: Examples, rows: int, share: float) -> Floats:
    """Labels of the first `rows` rows to learn from, float32 `[rows, A]`: each action as it happened, less `share`, plus `share` of the
    probability that counts give it. A model that learns from them does not learn single rows by heart.

    This is distillation (Hinton et al., 2015, https://arxiv.org/abs/1503.02531) with the logistic model on counts as the teacher.
    """
    happened = examples.log.actions[:rows].astype(np.float32)
    expected = [count_probabilities(examples, rows, action)[:rows] for action in range(happened.shape[1])]
    return (1 - np.float32(share)) * happened + np.float32(share) * np.stack(expected, 1)


def pair_key(left: NDArray[np.uint64], right: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One key for a pair, by a wrapping multiply-add; equal pairs give equal keys, others collide with a chance of 2^-64."""
    with np.errstate(over="ignore"):
        mixed = (right + np.uint64(0x632BE59BD9B4E019)) * np.uint64(0xD6E8FEB86659FD93)
        return left * np.uint64(0x9E3779B97F4A7C15) ^ mixed
