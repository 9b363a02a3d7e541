"""The Grok transformer over a whole sequence with a dense mask: the definition that every faster path must equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.layers import attention, gated_ffn, linear, rms_norm, rope_tables, rotate


def zeros(*shape: int) -> nn.Parameter:
    """A parameter as upstream initialises it: every trunk weight, norm scales included, starts at 0."""
    return nn.Parameter(torch.zeros(*shape))


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What one layer computed: `query [B, T, N, K]` and `key [B, T, G, K]` as they meet, the stream before it and what its attention
    and its feed-forward network added to it, each `[B, T, D]`."""

    query: Tensor
    key: Tensor
    stream: Tensor
    attention_update: Tensor
    ffn_update: Tensor


Watch = Callable[[Seen], None]
"""Called by each layer in turn."""


class DecoderLayer(nn.Module):
    """Sandwich norm: `h += norm(attention(norm(h)))`, then `h += norm(ffn(norm(h)))`. Weights are `[in, out]`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, queries, keys = config.width, config.query_heads * config.head_width, config.kv_heads * config.head_width
        self.config = config
        self.attention_norm = zeros(width)
        self.query = zeros(width, queries)
        self.key = zeros(width, keys)
        self.value = zeros(width, keys)
        self.output = zeros(queries, width)
        self.attention_post_norm = zeros(width)
        self.ffn_norm = zeros(width)
        self.ffn_gate = zeros(width, config.ffn_width)
        self.ffn_value = zeros(width, config.ffn_width)
        self.ffn_output = zeros(config.ffn_width, width)
        self.ffn_post_norm = zeros(width)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, watch: Watch | None = None) -> Tensor:
        """hidden `[B, T, D]`, RoPE tables `[B, T, K]`, mask bool `[B, T, T]`; returns `[B, T, D]`."""
        config, epsilon = self.config, self.config.norm_epsilon
        normed = rms_norm(hidden, self.attention_norm, epsilon)
        query = linear(normed, self.query).unflatten(-1, (config.query_heads, config.head_width))
        key = linear(normed, self.key).unflatten(-1, (config.kv_heads, config.head_width))
        value = linear(normed, self.value).unflatten(-1, (config.kv_heads, config.head_width))
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = attention(query, key, value, mask, config.attention_multiplier, config.attention_cap)
        attended = rms_norm(linear(mixed.flatten(-2), self.output), self.attention_post_norm, epsilon)
        normed = rms_norm(hidden + attended, self.ffn_norm, epsilon)
        fed = rms_norm(gated_ffn(normed, self.ffn_gate, self.ffn_value, self.ffn_output), self.ffn_post_norm, epsilon)
        if watch is not None:
            watch(Seen(query, key, hidden, attended, fed))
        return hidden + attended + fed


class Trunk(nn.Module):
    """`L` decoder layers. Holds no norm of its own after the last one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))

    def decoder_layers(self) -> list[DecoderLayer]:
        """The layers in order, by their type."""
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def forward(self, hidden: Tensor, positions: Tensor, mask: Tensor, watch: Watch | None = None) -> Tensor:
        """hidden `[B, T, D]`, positions int64 `[B, T]`, mask bool `[B, T, T]` (rows see columns); returns `[B, T, D]`."""
        cos, sin = rope_tables(positions, self.config.head_width, self.config.rope_base)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, mask, watch)
        return hidden
