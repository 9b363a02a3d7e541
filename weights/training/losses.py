"""The two losses of a ranker, for actions and for dwell. Both are cross-entropies, so both give calibrated outputs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from weights.training.examples import Labels


def discrete_loss(logits: Tensor, labels: Labels) -> Tensor:
    """Mean cross-entropy over shown candidates and actions, negative ones included; a scalar. logits `[B, C, A]`."""
    return functional.binary_cross_entropy_with_logits(logits[labels.shown], labels.actions[labels.shown])


def continuous_loss(continuous: Tensor, labels: Labels, output: int = 0) -> Tensor:
    """Mean cross-entropy of the dwell share where known, output `output` of `[B, C, Z]`; 0 if none is known.

    A soft label makes the expectation the optimum, as for a coin: `E[y·log p + (1 − y)·log(1 − p)]` peaks at `p = E[y]`.
    """
    known = labels.shown & labels.dwelt
    if not continuous.shape[-1] or not bool(known.any()):
        return continuous.new_zeros(())
    return functional.binary_cross_entropy(continuous[..., output][known], labels.dwell[known])


def total_loss(
    logits: Tensor, continuous: Tensor, labels: Labels, continuous_weight: float, dwell_output: int = 0
) -> Tensor:
    """The loss that training minimises; a scalar."""
    loss = labels.shown_weight * discrete_loss(logits, labels)
    if continuous_weight:
        # 1/A puts the dwell on a par with one action
        weight = labels.dwelt_weight * continuous_weight / logits.shape[-1]
        loss = loss + weight * continuous_loss(continuous, labels, dwell_output)
    return torch.as_tensor(loss)
