"""Measures how similarly two checkpoints rank one request, for `weights compare` and a shadow's metrics. Needs only numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    best = [np.argsort(-each, kind="stable")[: TOP[-1]].tolist() for each in (left, right)]
    shares = {k: len({*best[0][:k]} & {*best[1][:k]}) / k for k in TOP if k < len(left)}
    return Agreement(pearson(left, right), kendall(left, right), shares)


def score_weights(manifest: Manifest) -> NDArray[np.float32]:
    """The weight of each action's probability in a checkpoint's own score, `[A]`."""
    return np.array([manifest.score_weights.get(name, 0.0) for name in manifest.action_names], np.float32)


def pearson(left: Floats, right: Floats) -> float:
    """Pearson's correlation; NaN if either side does not vary."""
    one, other = (each - each.mean(dtype=np.float64) for each in (left, right))
    scale = np.sqrt((one @ one) * (other @ other))
    return float(one @ other / scale) if scale > 0 else float("nan")


def kendall(left: Floats, right: Floats) -> float:
    """Kendall's τ-b of both orders, after Knight (1966); 1 if all values are tied on both sides, 0 if on one side only."""
    order = np.lexsort((right, left))
    one, other = (np.unique(each[order], return_inverse=True)[1].astype(np.int64) for each in (left, right))
    pairs = len(one) * (len(one) - 1) // 2
    tied_left, tied_right = _tied(one), _tied(other)
    if pairs in (tied_left, tied_right):
        return float(tied_left == tied_right)
    tied_both = _tied(one * len(one) + other)
    more = pairs - tied_left - tied_right + tied_both - 2 * _inversions(other)
    return float(more / np.sqrt(float(pairs - tied_left) * float(pairs - tied_right)))


def _tied(ranks: NDArray[np.int64]) -> int:
    """Count the pairs with equal ranks."""
    counts = np.unique(ranks, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())


def _inversions(ranks: NDArray[np.int64]) -> int:
    """Count the pairs whose greater rank comes first, by a merge sort that handles all blocks of one length at once."""
    rows = np.full(1 << (len(ranks) - 1).bit_length(), len(ranks))  # the padding is greater than every rank, and last
    rows[: len(ranks)] = ranks
    found, width = 0, 1
    while width < len(rows):
        blocks = rows.reshape(-1, 2 * width)
        order = blocks.argsort(axis=1, kind="stable")
        is_left = order < width
        found += int(
            (width - is_left.cumsum(axis=1))[~is_left].sum()
        )  # for each rank in the right half, the greater ones in the left half
        rows = np.take_along_axis(blocks, order, axis=1).reshape(-1)
        width *= 2
    return found
