"""Turns probabilities into one score per candidate, and scores into an order, with the same bits online and offline. Needs only numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def combine(probabilities: NDArray[np.float32], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Σ weight × probability, float64 `[C]`, from `[C, A]` and `[A]`.

    Adds action by action, each step elementwise: with a matrix product a candidate's last bits would depend on how many
    others there are. So they would with a sum over a single column, so there is always a second one.
    """
    terms = np.zeros((1 + len(weights), 1 + len(probabilities)))  # a sum that begins with 0 is never −0
    np.multiply(probabilities.T, weights[:, None], out=terms[1:, 1:])
    combined: NDArray[np.float64] = np.add.reduce(terms, 0)[1:]
    return combined


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """How a checkpoint's probabilities are corrected: `sigmoid(offset + slope · logit)` (Platt 1999). `offsets`, `slopes`: float64 `[A]`;
    slopes are positive, so that no action's order changes."""

    offsets: NDArray[np.float64]
    slopes: NDArray[np.float64]

    def probabilities(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Probabilities float32 `[C, A]` of logits `[C, A]`, in float64 until the end, so that rounding changes no order either. A
        candidate's bits do not depend on the others."""
        with np.errstate(over="ignore"):
            odds = np.exp(-(self.offsets + self.slopes * logits.astype(np.float64)))
            corrected: NDArray[np.float32] = (1 / (1 + odds)).astype(np.float32)
        return corrected


def magnitudes(weights: NDArray[np.float64]) -> tuple[float, float]:
    """The sums of |weight| over the negative weights and over all weights, added in order."""
    values = weights.tolist()
    negative = sum(abs(value) for value in values if value < 0)
    return float(negative), float(sum(abs(value) for value in values))


def offset(scores: NDArray[np.float64], negative: float, every: float) -> NDArray[np.float64]:
    """The published offset, which lifts scores above 0 and keeps their order: s + 0.001 where s ≥ 0, else (s + N) / T · 0.001 with the
    `magnitudes` N and T."""
    with np.errstate(invalid="ignore"):  # without weights all scores and T are 0
        return np.where(scores >= 0, scores + 0.001, (scores + negative) / every * 0.001)


def order_of(scores: NDArray[np.float64]) -> NDArray[np.intp]:
    """Indices best first; equal scores keep their order."""
    return (-scores).argsort(kind="stable")
