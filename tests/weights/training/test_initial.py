"""Upstream's initial values hold the trunk on a saddle; leaving it changes no score."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")

from model.batch import Batch
from model.layers import rope_tables, rotate
from model.names import checkpoint_parameters
from model.presets import PRESETS, with_preset
from model.ranker import Ranker
from tests.weights.training.small_run import small_config, small_trainer
from weights.training import initial
from weights.training.examples import Examples, Labels
from weights.training.losses import action_loss, dwell_loss


def sixteen(examples: Examples) -> tuple[Batch, Labels]:
    """A batch of sixteen requests as they are."""
    return examples.batch(np.arange(100, 116))


def backward(outputs: tuple[torch.Tensor, torch.Tensor], labels: Labels) -> None:
    """Leave the gradients of both losses."""
    (action_loss(outputs[0], labels) + dwell_loss(outputs[1][..., 0], labels)).backward()


def test_upstreams_initial_values_score_everything_alike_and_hold_the_trunk_on_a_saddle(examples: Examples) -> None:
    run = small_trainer(examples)
    run.advance()  # leaves the saddle after its step, so the control below starts again from the initial values
    ranker = Ranker(small_config())
    initial.upstream(ranker, torch.Generator().manual_seed(1))
    optimizer = torch.optim.Adam(ranker.parameters(), lr=0.01)
    trunk = {name for name, _ in checkpoint_parameters(ranker.trunk)}
    for step in range(5):
        batch, labels = sixteen(examples)
        logits, continuous = ranker(batch)
        if step == 0:
            assert not logits.any()
        optimizer.zero_grad()
        backward((logits, continuous), labels)
        optimizer.step()
        assert set(initial.stuck(ranker.trunk)) == trunk, "without help no step moves the trunk"
    assert ranker.heads.norm.scale.any()
    assert not set(initial.stuck(run.ranker.trunk)) & {name for name in trunk if "post_norm" not in name}


@pytest.mark.parametrize("name", PRESETS)
def test_every_trunk_learns_in_all_its_parts(examples: Examples, name: str) -> None:
    """After three steps of the optimiser no parameter is stuck at 0; leaving the saddle changes no score bit."""
    ranker, generator = Ranker(with_preset(small_config(), name)), torch.Generator().manual_seed(2)
    batch, labels = sixteen(examples)
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
        backward(ranker(batch), labels)
        optimizer.step()
    alike = "key_bias"  # moves all of a row's logits alike
    assert not [key for key in initial.stuck(ranker) if not key.endswith(alike)]


def test_a_candidate_starts_by_looking_at_events_of_its_own_author() -> None:
    config = replace(small_config(), width=64, head_width=32, history_length=63)
    ranker = Ranker(config)
    generator = torch.Generator().manual_seed(5)
    initial.upstream(ranker, generator)
    initial.leave_saddle(ranker, generator)
    rows, none = torch.arange(1, 41).reshape(1, 20, 2), torch.zeros(1, 20, dtype=torch.int64)
    nothing = none[..., None].expand(-1, -1, 2)
    actions, seconds = torch.eye(20, 19)[None], torch.zeros(1, 20)
    history, batch_candidates = (nothing, rows, actions, none, seconds), (nothing, rows, none, none)
    batch = Batch(
        torch.ones(1, 2, dtype=torch.int64), *history, *batch_candidates, torch.zeros(1, 41, dtype=torch.int64)
    )
    candidates = ranker.tokens.block_candidate_reduce(ranker.tables, batch)[0]
    events = ranker.tokens.block_history_reduce(ranker.tables, batch)[0]
    layer = ranker.trunk.decoder_layers()[0]

    def heads(tokens: torch.Tensor, weight: torch.Tensor, position: int) -> torch.Tensor:
        first = (layer.attention_norm(tokens) @ weight)[:, : config.head_width]
        tables = rope_tables(torch.full((20,), position), config.head_width, config.rope_base)
        return rotate(first[:, None], *tables)[:, 0]

    for event in (1, config.history_length):  # the oldest event as well as the newest
        queries = heads(candidates, layer.attention.query.weight, config.history_length + 1)
        logits = queries @ heads(events, layer.attention.key.weight, event).T * config.attention_multiplier
        own = logits.diagonal().mean()
        other = (logits.sum() - logits.diagonal().sum()) / (20 * 19)
        assert own > other + 2
