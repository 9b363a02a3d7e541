"""Quality of predicted probabilities and of orders: pooled, within groups, resampled by user. `auc` and `log_loss` are scikit-learn's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
Flags = NDArray[np.bool_]
Ints = NDArray[np.integer]

CLIP = 1e-7  # a probability of 0 or 1 would make the log-loss infinite
BINS = 15
RESAMPLES = 200
INTERVAL = (2.5, 97.5)  # percent
LEAST_USERS = 10  # what rests on fewer has no interval
CHANCE = 0.5  # the AUC of a random order


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure and its 95 % interval, by resampling users; the ends are NaN where the users are too few."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self:.3f}"

    def __format__(self, form: str) -> str:
        """The figure and its interval, each number in this form; three decimals if it is empty."""
        value, low, high = (format(number, form or ".3f") for number in (self.value, self.low, self.high))
        return value if np.isnan(self.low) else f"{value} ({low} … {high})"


@dataclass(frozen=True, slots=True, eq=False)
class Means:
    """A mean over groups (users, requests), each of which belongs to a user: sums and counts of each user, `[U]`."""

    sums: Array
    counts: Ints

    @property
    def users(self) -> int:
        """How many users it is over."""
        return int(np.count_nonzero(self.counts))

    def under(self, weights: Array) -> Array:
        """The mean if each user counts `weights [..., U]` times; NaN if there is no group."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray((weights @ self.sums) / (weights @ self.counts))


@dataclass(frozen=True, slots=True, eq=False)
class PooledAuc:
    """The AUC over all rows, prepared for any weights of users. `user` int `[n]` numbers the users."""

    happened: Flags
    user: Ints
    ends: Ints
    """Where each run of equal scores ends, in the order of scores."""

    @classmethod
    def of(cls, happened: Flags, score: Array, user: Ints) -> PooledAuc:
        """Sort the rows by score."""
        order = np.argsort(score, kind="stable")
        ends = (
            np.append(np.flatnonzero(np.diff(score[order])), len(order) - 1) if len(order) else np.array([], np.int64)
        )
        return cls(happened[order], user[order], ends)

    @property
    def users(self) -> int:
        """How many users have positives, or negatives if fewer have those."""
        return min(len(np.unique(self.user[self.happened])), len(np.unique(self.user[~self.happened])))

    def under(self, weights: Array) -> Array:
        """The AUC if each user counts `weights [..., U]` times; NaN without positives or without negatives."""
        return np.asarray([self._one(row) for row in np.atleast_2d(weights)]).reshape(weights.shape[:-1])

    def _one(self, weights: Array) -> float:
        row = weights[self.user]
        positive = np.diff(np.cumsum(row * self.happened)[self.ends], prepend=0.0)
        negative = np.diff(np.cumsum(row * ~self.happened)[self.ends], prepend=0.0)
        pairs = positive.sum() * negative.sum()
        below = np.cumsum(negative) - negative / 2  # ties count half
        return float((positive * below).sum() / pairs) if pairs else float("nan")


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """A statistic over all users, and over each of the resamples `[R]`."""

    value: float
    samples: Array

    @classmethod
    def of(cls, statistic: Means | PooledAuc, draws: Array) -> Sampled:
        """`draws [R, U]`: how often each user is drawn. Of a statistic that rests on fewer than ten users, the resamples are NaN: those
        without any of the few do not tell how far it is off."""
        value = float(statistic.under(np.ones(draws.shape[1])))
        return cls(value, statistic.under(draws) if statistic.users >= LEAST_USERS else np.full(len(draws), np.nan))

    def __sub__(self, other: Sampled) -> Sampled:
        """The difference of two statistics over the same users."""
        return Sampled(self.value - other.value, self.samples - other.samples)

    def figure(self) -> Figure:
        """The value with its interval; without one where most resamples have no value."""
        numbers = self.samples[~np.isnan(self.samples)]
        if len(numbers) <= len(self.samples) / 2:
            return Figure(self.value, float("nan"), float("nan"))
        low, high = np.percentile(numbers, INTERVAL)
        return Figure(self.value, float(low), float(high))


def draws_of(users: int, seed: int = 1) -> Array:
    """How often each user is drawn in each of RESAMPLES samples with replacement, float `[R, U]`; none of fewer than ten users."""
    count = RESAMPLES if users >= LEAST_USERS else 0
    return np.random.default_rng(seed).multinomial(users, np.full(users, 1 / users), count).astype(np.float64)


def auc(happened: Flags, score: Array) -> float:
    """The chance that a positive outranks a negative, ties counting half; NaN without positives or without negatives."""
    if happened.all() or not happened.any():
        return float("nan")
    from sklearn.metrics import roc_auc_score  # a second to import

    return float(roc_auc_score(happened, score))


def auc_within(group: Ints, happened: Flags, score: Array) -> tuple[Ints, Array]:
    """The groups with positives and negatives, and the AUC of each. `group` int `[n]`."""
    order = np.lexsort((score, group))
    group, happened, score = group[order], happened[order], score[order]
    starts_tie = np.append(True, (group[1:] != group[:-1]) | (score[1:] != score[:-1]))
    first = np.flatnonzero(starts_tie)
    middle = (first + np.append(first[1:], len(group)) - 1) / 2
    rank = middle[np.cumsum(starts_tie) - 1]  # ties share their mean place
    groups, begin, place = np.unique(group, return_index=True, return_inverse=True)
    positives = np.bincount(place, happened).astype(np.float64)
    negatives = np.bincount(place) - positives
    sums = np.bincount(place, (rank - begin[place]) * happened)
    both = (positives > 0) & (negatives > 0)
    pairs = (positives * negatives)[both]
    return groups[both], np.asarray((sums - positives * (positives - 1) / 2)[both] / pairs)


def ndcg(group: Ints, score: Array, gain: Array | Flags, k: int | None = None) -> tuple[Ints, Array]:
    """The groups with something to order, and the NDCG of each at `k` (None: of the whole list), with discount `1/log2(1 + rank)`.

    There is something to order if gains differ. Gains below 0 count as 0. Posts with equal scores share their places' mean
    discount, so the order of the rows does not matter.
    """
    order = np.argsort(group, kind="stable")
    group, score, worth = group[order], score[order], np.maximum(gain[order].astype(np.float64), 0)
    groups, begin, place = np.unique(group, return_index=True, return_inverse=True)
    rank = np.arange(len(group)) - begin[place]
    discount = np.where(rank < (k or len(group)), 1 / np.log2(2 + rank), 0.0)

    def total(key: Array) -> Array:
        order = np.lexsort((-key, place))
        starts_tie = (np.diff(place, prepend=-1) != 0) | (np.diff(key[order], prepend=np.nan) != 0)
        tie = np.cumsum(starts_tie) - 1
        shared = np.bincount(tie, discount) / np.bincount(tie)
        return np.asarray(np.bincount(place, worth[order] * shared[tie]), np.float64)

    sizes = np.append(begin[1:], len(group)) - begin
    some = np.maximum.reduceat(worth, begin) > np.minimum.reduceat(worth, begin) if len(group) else np.zeros(0, bool)
    return groups[some & (sizes > 1)], np.asarray(total(score)[some] / total(worth)[some])


def mean(figures: Iterable[float]) -> float:
    """The mean of the figures that are not NaN; NaN if there are none."""
    defined = [figure for figure in figures if not np.isnan(figure)]
    return float(np.mean(defined)) if defined else float("nan")


def log_loss(happened: Flags, probability: Array) -> float:
    """Mean cross-entropy in nats."""
    from sklearn.metrics import log_loss as loss

    return float(loss(happened, np.clip(probability.astype(np.float64), CLIP, 1 - CLIP), labels=[False, True]))


def normalised_entropy(happened: Flags, probability: Array) -> float:
    """Log-loss divided by that of always predicting the observed share; below 1 is better than knowing only the share. NaN without
    positives or without negatives."""
    if happened.all() or not happened.any():
        return float("nan")
    return log_loss(happened, probability) / log_loss(happened, np.full(len(happened), happened.mean()))


def reliability(happened: Flags, probability: Array) -> tuple[Array, Array, Ints]:
    """Observed share, mean prediction and number of rows of bins by predicted probability. Their numbers of rows are about equal, but equal
    predictions are in one bin."""
    clipped = np.clip(probability, 0, 1)
    place = np.searchsorted(np.percentile(clipped, np.linspace(0, 1, BINS + 1) * 100)[1:-1], clipped)
    rows = np.bincount(place)
    some = rows > 0
    observed, predicted = (np.bincount(place, of_rows)[some] / rows[some] for of_rows in (happened, clipped))
    return observed, predicted, rows[some]


def calibration_error(happened: Flags, probability: Array) -> float:
    """Expected calibration error: the distance of prediction and observation in the bins of `reliability`, averaged over rows."""
    observed, predicted, rows = reliability(happened, probability)
    return float(np.average(np.abs(observed - predicted), weights=rows))
