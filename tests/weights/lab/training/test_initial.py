"""Upstream's initial values hold the trunk on a saddle; leaving it changes no score."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")

from model.presets import PRESETS, with_preset
from model.ranker import Ranker
from tests.weights.lab.training.small_run import small_config
from weights.lab.training import initial
from weights.lab.training.examples import Examples
from weights.lab.training.losses import action_loss, dwell_loss


@pytest.mark.parametrize("name", PRESETS)
def test_every_trunk_learns_in_all_its_parts(examples: Examples, name: str) -> None:
    """After three steps of the optimiser no parameter is stuck at 0; leaving the saddle changes no score bit."""
    ranker, generator = Ranker(with_preset(small_config(), name)), torch.Generator().manual_seed(2)
    batch, labels = examples.batch(np.arange(100, 116))
    initial.upstream(ranker, generator)
    with torch.no_grad():
        ranker.heads.norm.scale.fill_(0.3)
    before = ranker(batch)[0]
    initial.leave_saddle(ranker, generator)
    assert before.any()
    assert torch.equal(before, ranker(batch)[0])
    optimizer = torch.optim.Adam(ranker.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        logits, continuous = ranker(batch)
        (action_loss(logits, labels) + dwell_loss(continuous[..., 0], labels)).backward()
        optimizer.step()
    alike = "key_bias"  # moves all of a row's logits alike
    assert not [key for key in initial.stuck(ranker) if not key.endswith(alike)]
