"""The figures of an explanation: each is what its picture says of it, on weights that are not zero."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from model.batch import collate
from model.dense import candidate_attention
from model.ranker import Ranker
from tests.model.builders import random_config, random_ranker, random_request
from weights.explain.figures import Figures, blocks, figures_of
from weights.explain.request import Request


def explained(candidates: int = 7, history: int = 11, **fields: Any) -> tuple[Figures, Ranker, Request]:
    config = random_config(**fields)
    ranker = random_ranker(config, seed=2)
    context, posts = random_request(config, history, candidates, seed=3)
    context.post_ids[2] = 0
    weights = np.linspace(-1, 2, config.actions)
    request = Request(context, posts, weights, [str(place) for place in range(1 + history + candidates)])
    return figures_of(ranker, request, 4), ranker, request


@pytest.fixture(scope="module")
def usual() -> tuple[Figures, Ranker, Request]:
    return explained()


@pytest.mark.parametrize("fields", [{}, {"context_attention": "bidirectional"}, {"right_anchored": True}], ids=str)
def test_the_mask_is_where_attention_is(fields: dict[str, Any]) -> None:
    """Drawn from the function that the plain path uses, and equal to the pairs whose weight is not 0."""
    figures, _, _ = explained(**fields)
    assert figures.attention.shape == (2, 4, 19, 19)
    rows = np.arange(19) != -1
    for weights in figures.attention.reshape(-1, 19, 19):
        assert np.array_equal((weights > 0)[rows], figures.mask[rows])
    assert not figures.mask[:, 3].any(), "padding"
    assert np.array_equal(figures.mask[12:, 12:], np.eye(7, dtype=bool))
    assert not np.array_equal(figures.causal, figures.mask)


def test_one_candidate_moves_no_other_and_the_causal_mask_would_let_it(usual: tuple[Figures, Ranker, Request]) -> None:
    figures, *_ = usual
    others = ~np.eye(7, dtype=bool)
    assert not figures.isolation[others].any()
    assert (figures.isolation[~others] > 1e-2).all()
    assert (figures.leaking[np.tril_indices(7, -1)] > 1e-6).all()
    assert not figures.leaking[np.triu_indices(7, 1)].any()
    assert figures.reversed_list["shared"].max() < 1e-5 < 1e-3 < figures.reversed_list["sequential"].max()


def test_positions_are_those_of_the_plain_path(usual: tuple[Figures, Ranker, Request]) -> None:
    figures, ranker, request = usual
    first = ranker.config.candidate_position
    assert figures.positions["shared"].tolist() == [*range(12), *[first] * 7]
    assert figures.positions["sequential"].tolist() == [*range(12), *range(first, first + 7)]
    assert figures.positions["right-anchored"].tolist() == [0, *range(first - 11, first), *[first] * 7]
    kept = collate([(request.context, request.candidates)], ranker.config).positions[0].numpy()
    assert np.array_equal(figures.positions["shared"], kept)


def test_attention_is_that_of_the_service_and_its_rows_sum_to_one(usual: tuple[Figures, Ranker, Request]) -> None:
    figures, ranker, request = usual
    assert figures.row_error < 1e-6
    np.testing.assert_allclose(figures.rows.sum(-1), 1, atol=1e-6)
    served = candidate_attention(ranker, request.context, request.candidates)
    np.testing.assert_allclose(figures.rows, served[:, :, 4], atol=1e-6)
    shares = np.stack((served[..., 0], served[..., 1:-1].sum(-1), served[..., -1]), -1).mean((1, 2))
    np.testing.assert_allclose(figures.shares, shares, atol=1e-6)


def test_the_cap_bends_what_lies_beyond_half_of_it() -> None:
    """A low cap is at work, a high one is not, and none at all leaves logits as they are."""
    low, high, none = (explained(attention_cap=cap)[0] for cap in (1.0, 1e4, None))
    assert low.beyond_half.min() > 0.1
    assert not np.array_equal(low.raw, low.capped)
    assert high.beyond_half.max() == none.beyond_half.max() == 0
    assert np.array_equal(none.raw, none.capped)
    assert low.raw.sum() == low.mask.sum() * 4 * 2, "every pair that sees each other, once a head and layer"


def test_an_untrained_trunk_adds_nothing() -> None:
    figures, ranker, request = explained()
    assert (figures.updates > 0.1).all()
    with torch.no_grad():
        for layer in ranker.trunk.decoder_layers():
            layer.attention_post_norm.zero_()
            layer.ffn_post_norm.zero_()
    still = figures_of(ranker, request, 0)
    assert not still.updates.any()
    assert len(set(still.stream.tolist())) == 1


def test_changes_are_those_of_the_request_without_it(usual: tuple[Figures, Ranker, Request]) -> None:
    figures, ranker, request = usual
    context = request.context
    keep = np.delete(np.arange(11), 6)
    columns = ("post_ids", "author_ids", "actions", "surfaces", "dwell_seconds")
    rest = replace(context, **{name: getattr(context, name)[keep] for name in columns})
    with torch.inference_mode():
        both = [
            torch.sigmoid(ranker(collate([(each, request.candidates)], ranker.config))[0][0]).double().numpy()
            for each in (context, rest, replace(context, user_id=0))
        ]
    np.testing.assert_allclose(figures.changes[6], both[0] - both[1], atol=1e-6)
    np.testing.assert_allclose(figures.score_changes[6], (both[0] - both[1]) @ request.weights, atol=1e-6)
    np.testing.assert_allclose(figures.score_changes[-1], (both[0] - both[2]) @ request.weights, atol=1e-6)
    assert np.abs(figures.score_changes).min(0).max() > 0


def test_rope_at_the_true_distance_is_the_logit_of_the_layer(usual: tuple[Figures, Ranker, Request]) -> None:
    """Against the weights: at the distance that the two tokens have, the curve is their logit."""
    figures, ranker, request = usual
    assert figures.rope_logits is not None
    assert figures.wavelengths is not None
    distance = ranker.config.candidate_position - 11
    near, far = figures.rope_logits[:, distance], figures.rope_logits[:, 0]
    row = explained(attention_cap=None)[0].rows[0]
    odds = np.log(row[:, 11] / row[:, -1])  # the newest event against the candidate itself
    np.testing.assert_allclose(near - _own_logit(ranker, request), odds, atol=1e-3)
    assert np.abs(near - far).max() > 1e-2
    assert figures.wavelengths[0] == pytest.approx(2 * np.pi)
    assert explained(positions="sinusoidal")[0].rope_logits is None


@torch.inference_mode()
def _own_logit(ranker: Ranker, request: Request) -> np.ndarray[Any, Any]:
    """Of candidate 4 and itself in the first layer, by head."""
    found: list[Any] = []

    def watch(seen: Any) -> None:
        key = seen.key[0, 12 + 4].repeat_interleave(2, 0)
        found.append((seen.query[0, 12 + 4] * key).sum(-1).numpy() * ranker.config.attention_multiplier)

    ranker(collate([(request.context, request.candidates)], ranker.config), watch=watch)
    first: np.ndarray[Any, Any] = found[0]
    return first


def test_blocks_are_means() -> None:
    matrix = np.arange(49.0).reshape(7, 7)
    assert blocks(matrix, 7) is matrix
    small = blocks(matrix[None], 3)
    assert small.shape == (1, 3, 3)
    assert small[0, 0, 1] == matrix[:3, 3:6].mean()
    assert small[0, 2, 2] == matrix[6, 6]
