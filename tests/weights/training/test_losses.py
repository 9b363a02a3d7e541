"""Padding and unknown dwells add nothing to the losses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("pyarrow")

from weights.training.examples import Examples
from weights.training.losses import continuous_loss, discrete_loss, total_loss


def test_padding_adds_nothing_to_the_losses(examples: Examples) -> None:
    labels = examples.labels([examples.rows(0)[:5]])
    padded = examples.labels([examples.rows(0)[:5], examples.rows(1)])
    logits = torch.randn(2, 12, 19)
    continuous = torch.rand(2, 12, 1)
    alone = total_loss(logits[:1, :5], continuous[:1, :5], labels, 1.0)
    padded = replace(padded, shown=padded.shown & torch.tensor([[True], [False]]))
    assert torch.equal(alone, total_loss(logits, continuous, padded, 1.0))
    assert discrete_loss(logits[:1, :5], labels) != discrete_loss(logits[1:, :5], labels)
    unknown = replace(labels, dwelt=torch.zeros_like(labels.dwelt))
    assert continuous_loss(continuous[:1, :5], unknown) == 0


def test_the_dwell_is_on_a_par_with_one_action(examples: Examples) -> None:
    labels = replace(examples.labels([examples.rows(0)[:5]]), shown_weight=0.75, dwelt_weight=0.5)
    logits, continuous = torch.randn(1, 5, 19), torch.rand(1, 5, 1)
    actions, dwell = discrete_loss(logits, labels), continuous_loss(continuous, labels)
    assert dwell > 0
    for weight in (0.0, 2.0):
        wanted = 0.75 * actions + 0.5 * weight * dwell / 19
        torch.testing.assert_close(total_loss(logits, continuous, labels, weight), wanted)
    assert torch.equal(total_loss(logits, continuous[..., :0], labels, 2.0), 0.75 * actions)
