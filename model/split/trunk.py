"""The trunk over flat rows: context and candidates go through the layers side by side. The step says which rows to run, the kernels how."""

from __future__ import annotations

import torch
from torch import Tensor

from model.config import ModelConfig
from model.split.kernels.contract import Kernels, Step, Tables
from model.split.step import TILE_ROWS
from model.split.weights import LayerWeights, NormWeights, SplitWeights


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

    def body(self, step: Step) -> None:
        """All rows, up to the last layer's keys and values."""
        kernels, (*layers, last), rows = self.kernels, self.weights.layers, step.rows
        kernels.embed(step, self.tables, self.weights.tokens, self.residual)
        if self.weights.sinusoids is not None:
            self.residual[:rows] += self.weights.sinusoids[step.arrays.row("position")[:rows].long()]
        norms = [layer.attention_norm for layer in self.weights.layers]
        kernels.norm(step, None, None, self.residual, norms[0], self.normed)
        queries = self.query.shape[1]
        query, key_value = self.qkv[:, :queries], self.qkv[:, queries:]
        for i, layer in enumerate(layers):
            self._multiply(step, self.normed, layer, "qkv", self.qkv)
            kernels.rotate(step, query, key_value, i)
            kernels.attend(step, query, key_value, i, self.mixed)
            self._after_attention(step, layer, norms[i + 1], self.normed)
        self._multiply(step, self.normed, last, "key_value", self.key_value)
        kernels.rotate(step, None, self.key_value, len(layers))

    def tail(self, step: Step) -> None:
        """Candidates only: the last layer from its queries on, and the heads; leaves raw outputs in `logits` `[rows, A + Z …]`."""
        step, kernels = step.at(step.rows, tail=True), self.kernels
        layer, index = self.weights.layers[-1], len(self.weights.layers) - 1
        self._multiply(step, self.normed, layer, "query", self.query)
        kernels.rotate(step, self.query, None, index)
        kernels.attend(step, self.query, self.key_value, index, self.mixed)
        self._after_attention(step, layer, self.weights.final_norm, self.final)
        kernels.multiply(step, self.final, self.weights.heads, self.logits)

    def _after_attention(self, step: Step, layer: LayerWeights, next_norm: NormWeights, out: Tensor) -> None:
        """Output projection, FFN and both residual additions; `out` is the residual stream, normed for what follows."""
        kernels = self.kernels
        self._multiply(step, self.mixed, layer, "output", self.projected)
        kernels.norm(step, self.projected, layer.attention_post_norm, self.residual, layer.ffn_norm, self.normed)
        self._multiply(step, self.normed, layer, "gate_value", self.gate_value)
        kernels.gate(step, self.gate_value, self.hidden)
        self._multiply(step, self.hidden, layer, "ffn_output", self.projected)
        kernels.norm(step, self.projected, layer.ffn_post_norm, self.residual, next_norm, out)

    def _multiply(self, step: Step, x: Tensor, layer: LayerWeights, name: str, out: Tensor) -> None:
        """A linear map of a layer, by the name of its weight."""
        self.kernels.multiply(step, x, getattr(layer, name), out)
        if name in layer.biases:
            out[: step.rows] += layer.biases[name]
