"""The transformer over a whole sequence with a dense mask: the definition that every faster path must equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.layers import activate, attention, layer_norm, linear, rms_norm, rope_tables, rotate, sinusoids


def zeros(*shape: int) -> nn.Parameter:
    """A parameter as upstream initialises it: every trunk weight, norm scales included, starts at 0."""
    return nn.Parameter(torch.zeros(*shape))


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What one layer computed: `query [B, T, N, K]` and `key [B, T, G, K]` as attention multiplies them, the residual stream before the
    layer, and what its attention and its feed-forward network added to the stream, each `[B, T, D]`."""

    query: Tensor
    key: Tensor
    stream: Tensor
    attention_update: Tensor
    ffn_update: Tensor


Watch = Callable[[Seen], None]
"""Each layer calls it once, in order."""


def declare_norm(module: nn.Module, name: str, config: ModelConfig) -> None:
    """Give a module the parameters of one norm over the model's width: `name`, and `name_bias` where the config's norm has one."""
    setattr(module, name, zeros(config.width))
    if config.norm == "layer":
        setattr(module, f"{name}_bias", zeros(config.width))


def normed(module: nn.Module, name: str, x: Tensor, config: ModelConfig) -> Tensor:
    """Apply the norm that `declare_norm` declared to x `[..., D]`."""
    if config.norm == "rms":
        return rms_norm(x, getattr(module, name), config.norm_epsilon)
    return layer_norm(x, getattr(module, name), getattr(module, f"{name}_bias"), config.norm_epsilon)


class DecoderLayer(nn.Module):
    """`h += attention(norm(h))`, then `h += ffn(norm(h))`; with a sandwich, what is added is normed too. Weights are `[in, out]`."""

    attention_norm: Tensor
    attention_post_norm: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    ffn_norm: Tensor
    ffn_post_norm: Tensor
    ffn_gate: Tensor
    ffn_value: Tensor
    ffn_output: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, queries, keys = config.width, config.query_heads * config.head_width, config.kv_heads * config.head_width
        self.config = config
        declare_norm(self, "attention_norm", config)
        self._declare("query", width, queries)
        self._declare("key", width, keys)
        self._declare("value", width, keys)
        if config.qk_norm:
            self.query_norm = zeros(config.head_width)
            self.key_norm = zeros(config.head_width)
        self._declare("output", queries, width)
        if config.sandwich:
            declare_norm(self, "attention_post_norm", config)
        declare_norm(self, "ffn_norm", config)
        self._declare("ffn_gate", width, config.ffn_width)
        if config.gated:
            self._declare("ffn_value", width, config.ffn_width)
        self._declare("ffn_output", config.ffn_width, width)
        if config.sandwich:
            declare_norm(self, "ffn_post_norm", config)

    def _declare(self, name: str, inputs: int, outputs: int) -> None:
        setattr(self, name, zeros(inputs, outputs))
        if self.config.biases:
            setattr(self, f"{name}_bias", zeros(outputs))

    def forward(
        self, hidden: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Tensor, watch: Watch | None = None
    ) -> Tensor:
        """hidden `[B, T, D]`, RoPE tables `[B, T, K]`, mask bool `[B, T, T]`; returns `[B, T, D]`."""
        config = self.config
        query, key, value = self._heads(hidden, rope)
        multiplier, cap, form = config.attention_multiplier, config.attention_cap, config.cap_form
        mixed = attention(query, key, value, mask, multiplier, cap, form).flatten(-2)
        attended = self._post("attention_post_norm", self._linear("output", mixed))
        fed = self._post("ffn_post_norm", self._ffn(hidden + attended))
        if watch is not None:
            watch(Seen(query, key, hidden, attended, fed))
        return hidden + attended + fed

    def _heads(self, hidden: Tensor, rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as attention uses them, with norm and RoPE applied."""
        config = self.config
        x = normed(self, "attention_norm", hidden, config)
        query = self._linear("query", x).unflatten(-1, (config.query_heads, config.head_width))
        key = self._linear("key", x).unflatten(-1, (config.kv_heads, config.head_width))
        value = self._linear("value", x).unflatten(-1, (config.kv_heads, config.head_width))
        if config.qk_norm:
            query = rms_norm(query, self.query_norm, config.norm_epsilon)
            key = rms_norm(key, self.key_norm, config.norm_epsilon)
        if rope:
            query, key = rotate(query, *rope), rotate(key, *rope)
        return query, key, value

    def _ffn(self, hidden: Tensor) -> Tensor:
        x = normed(self, "ffn_norm", hidden, self.config)
        inner = activate(self._linear("ffn_gate", x), self.config.activation)
        return self._linear("ffn_output", inner * self._linear("ffn_value", x) if self.config.gated else inner)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return linear(x, getattr(self, name), getattr(self, f"{name}_bias") if self.config.biases else None)

    def _post(self, name: str, x: Tensor) -> Tensor:
        return normed(self, name, x, self.config) if self.config.sandwich else x


class Trunk(nn.Module):
    """`L` decoder layers. Holds no norm of its own after the last one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))

    def decoder_layers(self) -> list[DecoderLayer]:
        """The layers in order, typed as `DecoderLayer`."""
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def forward(self, hidden: Tensor, positions: Tensor, mask: Tensor, watch: Watch | None = None) -> Tensor:
        """hidden `[B, T, D]`, positions int64 `[B, T]`, mask bool `[B, T, T]` (rows see columns); returns `[B, T, D]`."""
        config = self.config
        hidden, rope = hidden * config.input_scale, None
        if config.positions == "rope":
            rope = rope_tables(positions, config.head_width, config.rope_base)
        else:
            hidden = hidden + sinusoids(positions, config.width).to(hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, rope, mask, watch)
        return hidden
