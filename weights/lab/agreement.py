"""Measures how similarly two checkpoints rank one request, for `compare`. Needs the `train` extra."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weights.actions import weight_vector
from weights.format.manifest import Manifest

TOP = (1, 3, 5, 10)

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement on one request. `correlation`: Pearson's r, NaN if either gives every post the same score. `kendall`: see `kendall()`.
    `overlap[k]`: share of the top k that both have in common, for each k of TOP below the number of posts."""

    correlation: float
    kendall: float
    overlap: dict[int, float]


def agreement(left: Floats, right: Floats) -> Agreement:
    """Compare two checkpoints' scores `[n]` for the same n ≥ 2 posts. Posts with equal scores keep their order."""
    best = [np.argsort(-scores, kind="stable")[: TOP[-1]].tolist() for scores in (left, right)]
    shares = {k: len({*best[0][:k]} & {*best[1][:k]}) / k for k in TOP if k < len(left)}
    return Agreement(pearson(left, right), kendall(left, right), shares)


def score_weights(manifest: Manifest) -> NDArray[np.float32]:
    """The weight of each action's probability in a checkpoint's own score, `[A]`."""
    return weight_vector(manifest.score_weights, manifest.action_names).astype(np.float32)


def pearson(left: Floats, right: Floats) -> float:
    """Pearson's correlation; NaN if either side does not vary."""
    one, other = (values - values.mean(dtype=np.float64) for values in (left, right))
    scale = np.sqrt((one @ one) * (other @ other))
    return float(one @ other / scale) if scale > 0 else float("nan")


def kendall(left: Floats, right: Floats) -> float:
    """Kendall's τ-b of both orders; 1 if all values are tied on both sides, 0 if on one side only."""
    varies = [bool(np.ptp(values)) for values in (left, right)]
    if not all(varies):
        return float(varies[0] == varies[1])
    from scipy.stats import kendalltau  # a second to import

    return float(kendalltau(left, right).statistic)
