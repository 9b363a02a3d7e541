"""The trunk over flat rows: context and candidates go through the layers side by side. The step says which rows, the kernels how."""

from __future__ import annotations

import torch
from torch import Tensor

from model.config import ModelConfig
from model.split.kernels.contract import Kernels, Step, Tables
from model.split.step import TILE_ROWS
from model.split.weights import LayerWeights, Norm, SplitWeights


class SplitTrunk:
    """Activations for up to `capacity` rows, and the two halves of a forward. `body` computes every row up to the last layer's
    keys and values; `tail` the rest of the last layer and the heads, for candidates alone. Allocates nothing per call.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: SplitWeights,
        tables: Tables,
        kernels: Kernels,
        capacity: int,
        dtype: torch.dtype,
    ) -> None:
        self.config = config
        self.weights = weights
        self.tables = tables
        self.kernels = kernels
        device = weights.heads.device

        def rows(width: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(capacity + TILE_ROWS, width, dtype=dtype, device=device)

        queries, keys = config.query_heads * config.head_width, config.kv_heads * config.head_width
        self.residual = rows(config.width, torch.float32)
        self.normed = rows(config.width)
        self.qkv = rows(queries + 2 * keys)
        self.query = rows(queries)
        self.key_value = rows(2 * keys)
        self.mixed = rows(queries)
        self.projected = rows(config.width)
        self.gate_value = rows(weights.layers[0].gate_value.shape[1])
        self.hidden = rows(weights.layers[0].ffn_output.shape[0])
        self.final = rows(config.width, torch.float32)
        self.logits = rows(weights.heads.shape[1], torch.float32)

    def linear_weights(self) -> list[Tensor]:
        """One weight of each shape that the trunk and the heads multiply with."""
        ends = (self.weights.layers[0], self.weights.layers[-1])
        weights = [w for layer in ends for w in (layer.qkv, layer.query, layer.key_value, layer.output)]
        weights += [w for layer in ends for w in (layer.gate_value, layer.ffn_output)] + [self.weights.heads]
        return list({tuple(weight.shape): weight for weight in weights if weight is not None}.values())

    def body(self, step: Step, rows: int) -> None:
        """All rows, up to the last layer's keys and values."""
        kernels, layers = self.kernels, self.weights.layers
        kernels.embed(step, self.tables, self.weights.tokens, self.residual, rows)
        if self.weights.sinusoids is not None:
            self.residual[:rows] += self.weights.sinusoids[step.arrays.positions[:rows].long()]
        kernels.norm(step, None, None, self.residual, layers[0].attention_norm, self.normed, rows)
        queries = self.query.shape[1]
        for i, layer in enumerate(layers[:-1]):
            self._multiply(step, self.normed, layer, "qkv", self.qkv, rows)
            query, key_value = self.qkv[:, :queries], self.qkv[:, queries:]
            self._rotate(step, query, key_value, i, rows)
            kernels.attend(step, query, key_value, i, self.mixed, rows)
            self._after_attention(step, layer, layers[i + 1].attention_norm, self.normed, rows, tail=False)
        self._multiply(step, self.normed, layers[-1], "key_value", self.key_value, rows)
        self._rotate(step, None, self.key_value, len(layers) - 1, rows)

    def tail(self, step: Step, rows: int) -> None:
        """Candidates only: the last layer from its queries on, and the heads; leaves raw outputs in `logits` `[rows, A + Z …]`."""
        kernels, last = self.kernels, self.weights.layers[-1]
        index = len(self.weights.layers) - 1
        self._multiply(step, self.normed, last, "query", self.query, rows, tail=True)
        self._rotate(step, self.query, None, index, rows, tail=True)
        kernels.attend(step, self.query, self.key_value, index, self.mixed, rows, tail=True)
        self._after_attention(step, last, self.weights.final_norm, self.final, rows, tail=True)
        kernels.multiply(step, self.final, self.weights.heads, self.logits, rows, tail=True)

    def _after_attention(
        self, step: Step, layer: LayerWeights, next_norm: Norm, out: Tensor, rows: int, *, tail: bool
    ) -> None:
        """Output projection, FFN and both residual additions; `out` is the residual stream, normed for what follows."""
        kernels = self.kernels
        self._multiply(step, self.mixed, layer, "output", self.projected, rows, tail=tail)
        post, norm = layer.attention_post_norm, layer.ffn_norm
        kernels.norm(step, self.projected, post, self.residual, norm, self.normed, rows, tail=tail)
        self._multiply(step, self.normed, layer, "gate_value", self.gate_value, rows, tail=tail)
        kernels.gate(step, self.gate_value, self.hidden, rows, tail=tail)
        self._multiply(step, self.hidden, layer, "ffn_output", self.projected, rows, tail=tail)
        kernels.norm(step, self.projected, layer.ffn_post_norm, self.residual, next_norm, out, rows, tail=tail)

    def _multiply(
        self, step: Step, x: Tensor, layer: LayerWeights, name: str, out: Tensor, rows: int, *, tail: bool = False
    ) -> None:
        """A linear map of a layer, by the name of its weight."""
        self.kernels.multiply(step, x, getattr(layer, name), out, rows, tail=tail)
        if name in layer.biases:
            out[:rows] += layer.biases[name]

    def _rotate(
        self, step: Step, query: Tensor | None, key_value: Tensor | None, index: int, rows: int, *, tail: bool = False
    ) -> None:
        """Queries and keys as they meet: each head normed where the trunk does so, then turned."""
        scales = self.weights.layers[index].head_norms
        if scales is not None:
            pairs = ((query, self.config.query_heads, scales[0]), (key_value, self.config.kv_heads, scales[1]))
            for heads, count, scale in pairs:
                if heads is not None:
                    self.kernels.norm_heads(step, heads, count, scale, rows, tail=tail)
        self.kernels.rotate(step, query, key_value, index, rows, tail=tail)
