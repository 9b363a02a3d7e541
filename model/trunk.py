"""The transformer over a whole sequence with a dense mask: the definition that every faster path must equal.

`h += norm(attention(norm(h)))`, then `h += norm(ffn(norm(h)))`: Grok's layer, with a norm on both sides of each branch (a sandwich).
"""

from __future__ import annotations

from torch import Tensor, nn

from model.config import ModelConfig
from model.layers import LayerNorm, Linear, RMSNorm, activate, attention, rope_tables, rotate, sinusoids

Rope = tuple[Tensor, Tensor]
"""Cosines and sines of each token's position, fp32 `[B, T, K]`."""


def make_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """A norm over the model's width, of the config's kind."""
    return (RMSNorm if config.norm == "rms" else LayerNorm)(config.width, config.norm_epsilon)


class MultiHeadAttention(nn.Module):
    """Grouped-query attention with RoPE on queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width, queries, keys = config.width, config.query_heads * config.head_width, config.kv_heads * config.head_width
        self.query = Linear(width, queries, bias=config.biases)
        self.key = Linear(width, keys, bias=config.biases)
        self.value = Linear(width, keys, bias=config.biases)
        self.output = Linear(queries, width, bias=config.biases)

    def forward(self, x: Tensor, rope: Rope | None, mask: Tensor) -> Tensor:
        """x `[B, T, D]`, mask bool `[B, T, T]`; returns `[B, T, D]`."""
        query, key = self.query_and_key(x, rope)
        value = self.value(x).unflatten(-1, (-1, self.config.head_width))
        mixed = attention(query, key, value, mask, self.config.attention_multiplier, self.config.attention_cap)
        output: Tensor = self.output(mixed.flatten(-2))
        return output

    def query_and_key(self, x: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor]:
        """Queries `[B, T, N, K]` and keys `[B, T, G, K]` as attention multiplies them, rotated."""
        query = self.query(x).unflatten(-1, (-1, self.config.head_width))
        key = self.key(x).unflatten(-1, (-1, self.config.head_width))
        return (rotate(query, *rope), rotate(key, *rope)) if rope else (query, key)


class DenseBlock(nn.Module):
    """The feed-forward network: `output(activation(gate(x)) ⊙ value(x))`, without `value` where the config has no gate.

    Upstream these are `linear` (gate), `linear_v` (value) and `linear_1` (output).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.gate = Linear(config.width, config.ffn_width, bias=config.biases)
        self.value = Linear(config.width, config.ffn_width, bias=config.biases) if config.gated else None
        self.output = Linear(config.ffn_width, config.width, bias=config.biases)

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., D]` to `[..., D]`."""
        hidden = activate(self.gate(x), self.activation)
        output: Tensor = self.output(hidden if self.value is None else hidden * self.value(x))
        return output


class DecoderLayer(nn.Module):
    """Attention and feed-forward network, each normed before and, in a sandwich, after: `rms_norm`, `_1`, `_2` and `_3` upstream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = MultiHeadAttention(config)
        self.attention_post_norm = make_norm(config) if config.sandwich else None
        self.ffn_norm = make_norm(config)
        self.ffn = DenseBlock(config)
        self.ffn_post_norm = make_norm(config) if config.sandwich else None

    def forward(self, hidden: Tensor, rope: Rope | None, mask: Tensor) -> Tensor:
        """hidden `[B, T, D]`, mask bool `[B, T, T]`; returns `[B, T, D]`."""
        attended = self.attention(self.attention_norm(hidden), rope, mask)
        hidden = hidden + (self.attention_post_norm(attended) if self.attention_post_norm else attended)
        fed: Tensor = self.ffn(self.ffn_norm(hidden))
        return hidden + (self.ffn_post_norm(fed) if self.ffn_post_norm else fed)


class Transformer(nn.Module):
    """`L` decoder layers. Holds no norm of its own after the last one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))

    def forward(self, hidden: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """hidden `[B, T, D]`, positions int64 `[B, T]`, mask bool `[B, T, T]` (rows see columns); returns `[B, T, D]`."""
        hidden, rope = self.with_positions(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, rope, mask)
        return hidden

    def with_positions(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Rope | None]:
        """What the first layer takes: scaled tokens and, for RoPE, the rotations; sinusoids are added to the tokens instead."""
        config, hidden = self.config, hidden * self.config.input_scale
        if config.positions == "rope":
            return hidden, rope_tables(positions, config.head_width, config.rope_base)
        return hidden + sinusoids(positions, config.width).to(hidden.dtype), None

    def decoder_layers(self) -> list[DecoderLayer]:
        """The layers in order, typed as `DecoderLayer`."""
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
