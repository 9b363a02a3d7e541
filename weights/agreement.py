"""How alike two checkpoints rank one request: the figures of `weights compare` and of a shadow's metrics. Needs numpy alone."""

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
    """Of one request. `correlation`: Pearson's r, NaN where one of both gives every post the same score. `kendall`: see there.
    `overlap[k]`: share of the best k that both have, for each k of TOP that is less than the number of posts."""

    correlation: float
    kendall: float
    overlap: dict[int, float]


def agreement(left: Floats, right: Floats) -> Agreement:
    """Of the scores `[n]` that both give to the same n ≥ 2 posts. Equal scores keep the order of the posts."""
    best = [np.argsort(-each, kind="stable")[: TOP[-1]].tolist() for each in (left, right)]
    shares = {k: len({*best[0][:k]} & {*best[1][:k]}) / k for k in TOP if k < len(left)}
    return Agreement(pearson(left, right), kendall(left, right), shares)


def score_weights(manifest: Manifest) -> NDArray[np.float32]:
    """What a checkpoint's own score takes of each probability, `[A]`."""
    return np.array([manifest.score_weights.get(name, 0.0) for name in manifest.action_names], np.float32)


def pearson(left: Floats, right: Floats) -> float:
    """The correlation; NaN where one of both does not vary."""
    one, other = (each - each.mean(dtype=np.float64) for each in (left, right))
    scale = np.sqrt((one @ one) * (other @ other))
    return float(one @ other / scale) if scale > 0 else float("nan")


def kendall(left: Floats, right: Floats) -> float:
    """τ-b of both orders, after Knight (1966); 1 where both leave everything equal, 0 where one alone does."""
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
    """Pairs of equal ranks."""
    counts = np.unique(ranks, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())


def _inversions(ranks: NDArray[np.int64]) -> int:
    """Pairs of which the greater comes first, by a merge sort of all blocks of a length at once."""
    rows = np.full(1 << (len(ranks) - 1).bit_length(), len(ranks))  # what fills up is greater than all, and last
    rows[: len(ranks)] = ranks
    found, width = 0, 1
    while width < len(rows):
        blocks = rows.reshape(-1, 2 * width)
        order = blocks.argsort(axis=1, kind="stable")
        is_left = order < width
        found += int(
            (width - is_left.cumsum(axis=1))[~is_left].sum()
        )  # for each of the right, the greater ones of the left
        rows = np.take_along_axis(blocks, order, axis=1).reshape(-1)
        width *= 2
    return found
