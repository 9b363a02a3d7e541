"""Quality metrics of predicted probabilities, by their textbook definitions in numpy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
Flags = NDArray[np.bool_]

CLIP = 1e-7  # a probability of 0 or 1 would make the log-loss infinite


@dataclass(frozen=True, slots=True)
class Reliability:
    """Bins of equal count by predicted probability: their mean prediction, observed share and count, `[bins]`."""

    predicted: Array
    observed: Array
    count: NDArray[np.int64]


def auc(happened: Flags, score: Array) -> float:
    """The chance that a positive outranks a negative, ties counting half; NaN without positives or without negatives."""
    if happened.all() or not happened.any():
        return float("nan")
    from sklearn.metrics import roc_auc_score  # a second to import

    return float(roc_auc_score(happened, score))


def mean(figures: Iterable[float]) -> float:
    """The mean of the figures that are not NaN; NaN if there are none."""
    defined = [figure for figure in figures if not np.isnan(figure)]
    return float(np.mean(defined)) if defined else float("nan")


def log_loss(happened: Flags, probability: Array) -> float:
    """Mean cross-entropy in nats."""
    p = np.clip(probability.astype(np.float64), CLIP, 1 - CLIP)
    return float(-np.where(happened, np.log(p), np.log1p(-p)).mean())


def normalised_entropy(happened: Flags, probability: Array) -> float:
    """Log-loss divided by that of always predicting the observed share; below 1 is better than knowing only the share. NaN without
    positives or without negatives."""
    if happened.all() or not happened.any():
        return float("nan")
    return log_loss(happened, probability) / log_loss(happened, np.full(len(happened), happened.mean()))


def reliability(happened: Flags, probability: Array, bins: int = 15) -> Reliability:
    """Sort by prediction, cut into bins of equal count, compare means."""
    chunks = [chunk for chunk in np.array_split(np.argsort(probability, kind="stable"), bins) if len(chunk)]
    return Reliability(
        np.array([probability[chunk].mean(dtype=np.float64) for chunk in chunks]),
        np.array([happened[chunk].mean() for chunk in chunks]),
        np.array([len(chunk) for chunk in chunks]),
    )


def calibration_error(happened: Flags, probability: Array, bins: int = 15) -> float:
    """Expected calibration error: the mean distance of prediction and observation over the bins of `reliability`."""
    curve = reliability(happened, probability, bins)
    return float(np.average(np.abs(curve.predicted - curve.observed), weights=curve.count))


def ndcg(request: NDArray[np.integer], score: Array, gain: Array) -> float:
    """Mean over requests of DCG / ideal DCG with discount `1/log2(1 + rank)`; gains below 0 count as 0.

    Equal scores keep the order of the rows. Requests without any gain are left out; NaN if none is left.
    """
    order = np.argsort(request, kind="stable")
    which = np.unique(request[order], return_inverse=True)[1]
    score, gain = score[order], np.maximum(gain[order].astype(np.float64), 0)
    starts = np.searchsorted(which, np.arange(which[-1] + 1))
    discount = 1 / np.log2(2 + np.arange(len(which)) - starts[which])  # the k-th row of its request has rank k

    def total(key: Array) -> Array:
        return np.asarray(np.bincount(which, gain[np.lexsort((-key, which))] * discount), np.float64)

    reached, ideal = total(score), total(gain)
    some = ideal > 0
    return float((reached[some] / ideal[some]).mean()) if some.any() else float("nan")
