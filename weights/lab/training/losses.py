"""The two losses of a ranker, for actions and for dwell. Both are cross-entropies, so both give calibrated outputs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from weights.lab.training.examples import Labels


def action_loss(logits: Tensor, labels: Labels) -> Tensor:
    """The cross-entropy of each shown candidate, summed over candidates and averaged over actions; a scalar. logits `[B, C, A]`.

    An action that is unknown of a candidate adds nothing. A candidate counts as often as its weight says.
    """
    shown, counts = labels.shown, labels.counts
    total = functional.binary_cross_entropy_with_logits(
        logits[shown], labels.actions[shown], None if counts is None else counts[shown], reduction="sum"
    )
    return total / logits.shape[-1]


def dwell_loss(dwell: Tensor, labels: Labels) -> Tensor:
    """The cross-entropy of the dwell share, summed over the candidates whose dwell is known; 0 if none is. dwell `[B, C]`, in 0 … 1.

    A soft label makes the expectation the optimum, as for a coin: `E[y·log p + (1 − y)·log(1 − p)]` peaks at `p = E[y]`.
    """
    has_dwell = labels.shown & labels.dwelt
    if not bool(has_dwell.any()):
        return dwell.new_zeros(())
    if bool(dwell[has_dwell].isnan().any()):  # torch would raise, and on a card end the process
        return dwell[has_dwell].sum()
    weight = None if labels.weight is None else labels.weight[has_dwell]
    return torch.as_tensor(
        functional.binary_cross_entropy(dwell[has_dwell], labels.dwell[has_dwell], weight, reduction="sum")
    )
