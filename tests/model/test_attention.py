"""Attention of candidates: rows of weights that explain the very update that the plain path makes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model.batch import collate
from model.dense import candidate_attention
from model.layers import rms_norm
from model.trunk import Seen
from tests import trunk_goldens
from tests.model.builders import random_config, random_ranker, random_request

FIELDS = [{}, {"context_attention": "bidirectional"}, {"right_anchored": True}, {"query_heads": 2}]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_rows_sum_to_one_and_padding_gets_nothing(fields: dict[str, object]) -> None:
    config = random_config(**fields)
    ranker = random_ranker(config, seed=3)
    context, candidates = random_request(config, 19, 7, seed=5)
    context.post_ids[4] = 0
    weights = candidate_attention(ranker, context, candidates)
    assert weights.shape == (config.layers, config.query_heads, 7, 21)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    assert not weights[..., 5].any(), "an event of padding"
    assert (np.delete(weights, 5, -1) > 0).all()
    assert weights.std() > 1e-3, "weights that are not all alike"


def test_a_ranker_in_training_has_the_same_weights() -> None:
    config = random_config()
    ranker, request = random_ranker(config, seed=3), random_request(config, 19, 7, seed=5)
    weights = candidate_attention(ranker, *request)
    assert (candidate_attention(ranker.requires_grad_(True), *request) == weights).all()


def test_they_are_the_weights_that_the_layer_mixes_values_with() -> None:
    """The first layer's update, made again from these rows and the values, is the one that the plain path adds."""
    config = random_config()
    ranker = random_ranker(config, seed=3)
    request = random_request(config, 19, 7, seed=6)
    batch, seen = collate([request], config), list[Seen]()
    with torch.inference_mode():
        ranker(batch, watch=seen.append)
        weights = torch.from_numpy(candidate_attention(ranker, *request))[0]
        layer = ranker.trunk.decoder_layers()[0]
        normed = rms_norm(seen[0].stream, layer.attention_norm, config.norm_epsilon)[0]
        value = (normed @ layer.value).unflatten(-1, (config.kv_heads, -1)).repeat_interleave(2, 1)
        for row in range(7):
            keys = [*range(20), 20 + row]
            mixed = torch.einsum("ns,snk->nk", weights[:, row], value[keys]).flatten() @ layer.output
            update = rms_norm(mixed, layer.attention_post_norm, config.norm_epsilon)
            torch.testing.assert_close(update, seen[0].attention_update[0, 20 + row], atol=1e-5, rtol=0)


def test_the_position_of_a_slot_moves_the_weights_in_sequential_mode_alone() -> None:
    config = random_config()
    ranker = random_ranker(config, seed=3)
    context, candidates = random_request(config, 9, 5, seed=7)
    alone = candidates.chunk(3, 4)
    shared = candidate_attention(ranker, context, candidates)
    np.testing.assert_allclose(shared[:, :, 3:4], candidate_attention(ranker, context, alone), atol=1e-6)
    sequential = candidate_attention(ranker, context, candidates, "sequential")
    assert np.abs(sequential[:, :, 3] - shared[:, :, 3]).max() > 1e-4


@pytest.mark.parametrize("name", ["gemma2", "llama"])
def test_the_mask_is_where_another_implementation_attends(name: str) -> None:
    """Capped logits leave no weight at exactly 0 that may be looked at. The plain causal mask, the control, is another one."""
    model, context = trunk_goldens.ranker(name)
    seen = trunk_goldens.arrays(name, "expected")["ranking/attention_fp32"] > 0
    length = seen.shape[-1]
    mask = model.mask(context, torch.ones(1, length, dtype=torch.bool))[0].numpy()
    assert np.array_equal(seen, np.broadcast_to(mask, seen.shape))
    assert not np.array_equal(seen[0, 0], np.tri(length, dtype=bool))
