"""Peers of the engine on the same card: the dense definition, eager; FlexAttention and SDPA with a mask, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from loadtest.gpu.card import Card
from model.batch import collate
from model.engine import Item
from model.layers import activate, rms_norm, rope_tables, rotate
from model.names import checkpoint_parameters
from model.ranker import Ranker


def dense_eager(ranker: Ranker, item: Item, card: Card, dtype: torch.dtype) -> Callable[[], Tensor]:
    """A forward of the plain definition, with ids hashed and copied in advance."""
    batch = collate([(item.context, item.candidates)], ranker.config).to(card.device)
    return torch.inference_mode()(lambda: ranker(batch, dtype)[0])


class PeerRanker:
    """The ranker over one sequence with FlexAttention, with the soft cap as score modification and isolation as block mask; or with
    SDPA, which has no cap and so does the same work for a ranker without one.

    `ranker` must already be in the trunk's dtype. Serves one context length and number of candidates; others compile again.
    """

    def __init__(
        self, ranker: Ranker, item: Item, card: Card, dtype: torch.dtype, attention: Literal["flex", "sdpa"]
    ) -> None:
        self._ranker, self._attention = ranker, attention
        self._dtype = dtype
        self._batch = collate([(item.context, item.candidates)], ranker.config).to(card.device)
        self._context = 1 + len(item.context)
        self._length = self._context + len(item.candidates)
        self._device = card.device
        torch.compiler.reset()  # every shape compiles again, and beyond a limit torch silently falls back to eager
        # one layer with its weights as arguments, so that it compiles once for all layers
        self._layer = torch.compile(self._plain_layer, dynamic=False) if card.is_cuda else self._plain_layer
        self._weights = [_weights(layer) for layer in ranker.trunk.layers]

    def mask(self) -> BlockMask | Tensor:
        """Context rows see the past, candidates see the context and themselves. Built per request, so its cost is timed separately."""
        context = self._context

        def seen(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return ((column < context) & (column <= row)) | (row == column)

        length = self._length
        if self._attention == "flex":
            return create_block_mask(seen, None, None, length, length, device=self._device)
        places = torch.arange(length, device=self._device)
        return seen(places, places, places[:, None], places[None, :])

    @torch.inference_mode()
    def forward(self, mask: BlockMask | Tensor) -> Tensor:
        """Logits `[1, C, A]`."""
        hidden, _, _ = self._ranker.build_inputs(self._batch)
        hidden = hidden.to(self._dtype)
        config = self._ranker.config
        cos, sin = rope_tables(self._batch.positions, config.head_width, config.rope_base)
        for weights in self._weights:
            hidden = self._layer(weights, hidden, cos, sin, mask)
        logits: Tensor = self._ranker.heads(hidden[:, self._context :])[0]
        return logits

    def _plain_layer(
        self, weights: tuple[Tensor, ...], hidden: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | Tensor
    ) -> Tensor:
        norm, *projections, output, post_norm, ffn_norm, ffn_gate, ffn_value, ffn_output, ffn_post_norm = weights
        config, epsilon = self._ranker.config, self._ranker.config.norm_epsilon
        normed = rms_norm(hidden, norm, epsilon)
        heads = [linear(normed, weight).unflatten(-1, (-1, config.head_width)) for weight in projections]
        query, key = (rotate(x, cos, sin).transpose(1, 2) for x in heads[:2])

        scale, value = config.attention_multiplier, heads[2].transpose(1, 2)
        cap = config.attention_cap or 0.0

        def capped(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return cap * torch.tanh(score / cap)

        if isinstance(mask, Tensor):
            mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
        else:
            mixed = flex_attention(
                query, key, value, score_mod=capped, block_mask=mask, scale=scale, enable_gqa=True
            )  # fmt: skip
        hidden = hidden + rms_norm(linear(mixed.transpose(1, 2).flatten(-2), output), post_norm, epsilon)
        normed = rms_norm(hidden, ffn_norm, epsilon)
        hidden_ffn = activate(linear(normed, ffn_gate), "gelu_tanh") * linear(normed, ffn_value)
        mixed = linear(hidden_ffn, ffn_output)
        return hidden + rms_norm(mixed, ffn_post_norm, epsilon)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.to(x.dtype)


def _weights(layer: torch.nn.Module) -> tuple[Tensor, ...]:
    named = dict(checkpoint_parameters(layer))
    names = (
        "attention_norm query key value output attention_post_norm ffn_norm ffn_gate ffn_value ffn_output ffn_post_norm"
    )
    return tuple(named[name].detach() for name in names.split())
