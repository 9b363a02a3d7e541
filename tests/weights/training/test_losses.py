"""Padding and unknown dwells add nothing to the losses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

pytest.importorskip("pyarrow")

from weights.training.examples import Examples
from weights.training.losses import action_loss, dwell_loss


def test_padding_adds_nothing_to_the_losses(examples: Examples) -> None:
    labels = examples.labels([examples.rows(0)[:5]])
    padded = examples.labels([examples.rows(0)[:5], examples.rows(1)])
    padded = replace(padded, shown=padded.shown & torch.tensor([[True], [False]]))
    logits, dwell = torch.randn(2, 12, 19), torch.rand(2, 12)
    assert torch.equal(action_loss(logits[:1, :5], labels), action_loss(logits, padded))
    assert torch.equal(dwell_loss(dwell[:1, :5], labels), dwell_loss(dwell, padded))
    assert action_loss(logits[:1, :5], labels) != action_loss(logits[1:, :5], labels)


def test_the_losses_are_sums_over_candidates_of_the_mean_over_actions(examples: Examples) -> None:
    labels = examples.labels([examples.rows(0)[:5]])
    logits, dwell = torch.randn(1, 5, 19), torch.rand(1, 5)
    each = functional.binary_cross_entropy_with_logits(logits, labels.actions, reduction="none")
    torch.testing.assert_close(action_loss(logits, labels), each.mean(-1).sum())
    torch.testing.assert_close(dwell_loss(dwell, labels), functional.binary_cross_entropy(dwell, labels.dwell) * 5)


def test_an_unknown_dwell_is_not_learned(examples: Examples) -> None:
    labels = examples.labels([examples.rows(0)[:5]])
    assert dwell_loss(torch.rand(1, 5), replace(labels, dwelt=torch.zeros_like(labels.dwelt))) == 0
