"""Fits the calibration of a checkpoint on a log: one offset and one slope for each action, so that probabilities are frequencies.

If only a share of the impressions without any action was kept in the log, each that is left counts for several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.ranker import Ranker
from weights.format.manifest import MAX_OFFSET, ActionCalibration
from weights.lab.evaluate.predict import predict, rows_of
from weights.lab.training.examples import Examples
from weights.tables import TableError

ENOUGH = 100
"""Impressions with the action, and without, from which a slope is fitted. With fewer there is only the offset that the sampling implies."""
SLOPES = (0.1, 10.0)
"""Slopes that a model which has learned something may need."""
SMALLEST = 1e-9  # of a probability or its complement
IDENTITY = ActionCalibration(0.0, 1.0)
"""Leaves probabilities as they are."""


@dataclass(frozen=True, slots=True)
class Fit:
    """One action's calibration, the number of impressions with the action, and predicted ÷ observed with the calibration before and with
    this one, on the rows of the fit with their weights; NaN where the action was never taken."""

    calibration: ActionCalibration
    positives: int
    before: float
    after: float


def calibrate(
    ranker: Ranker,
    examples: Examples,
    requests: NDArray[np.int64],
    kept_share: float = 1.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    present: Mapping[str, ActionCalibration] | None = None,
) -> dict[str, Fit]:
    """Fit each action, by name, on these requests. `kept_share`: the share, above 0 and at most 1, of the impressions without any action
    that are in the log. `present`: the calibration before, by action; one without it has the probabilities of the model itself.

    Raises TableError if there are no requests.
    """
    if not len(requests):
        raise TableError("there are no requests to calibrate on")
    probabilities = predict(ranker, examples, requests, progress=progress).probabilities.astype(np.float64)
    logits = _logits(probabilities)
    shown = examples.log.take(rows_of(examples, requests))
    happened, weights = shown.actions, np.where(shown.actions.any(1), 1.0, 1 / kept_share)
    return {
        name: fit(logits[is_known, i], happened[is_known, i], weights[is_known], (present or {}).get(name, IDENTITY))
        for i, name in enumerate(shown.action_names)
        for is_known in [shown.known_rows(i)]
    }


def fit(
    logits: NDArray[np.float64],
    happened: NDArray[np.bool_],
    weights: NDArray[np.float64],
    present: ActionCalibration = IDENTITY,
) -> Fit:
    """The calibration of one action: logistic regression of `happened` on the logit, all `[n]`, each row with its weight (Platt 1999).
    `present`: the calibration before."""
    from scipy.optimize import brentq
    from sklearn.linear_model import LogisticRegression

    positives, offset, slope = int(happened.sum()), 0.0, 1.0
    if min(positives, len(happened) - positives) < ENOUGH:
        offset = -float(np.log(weights[~happened].mean())) if positives < len(happened) else 0.0
    else:
        model = LogisticRegression(C=np.inf, tol=1e-8, max_iter=1000).fit(logits[:, None], happened, weights)
        offset, slope = float(model.intercept_[0]), float(model.coef_[0, 0])
        if not SLOPES[0] <= slope <= SLOPES[1]:  # the logits tell nothing: only their mean is corrected

            def excess(shift: float) -> float:
                return float((weights * (_sigmoid(logits + shift) - happened)).sum())

            offset, slope = float(brentq(excess, -MAX_OFFSET, MAX_OFFSET)), 1.0
    observed = float(weights[happened].sum()) or np.nan
    before = float((weights * _sigmoid(present.offset + present.slope * logits)).sum()) / observed
    after = float((weights * _sigmoid(offset + slope * logits)).sum()) / observed
    return Fit(ActionCalibration(offset, slope), positives, before, after)


def _sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(1 / (1 + np.exp(-logits)))


def _logits(probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    clipped = probabilities.clip(SMALLEST, 1 - SMALLEST)
    return np.asarray(np.log(clipped / (1 - clipped)))
