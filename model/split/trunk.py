"""The trunk over flat rows: context and candidates go through the layers side by side. The step says which rows to run, the kernels how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from model.config import ModelConfig
from model.split.kernels.contract import Kernels, Part, Projected, Step, Tables, shape_name, split_part
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
        self._fusable = self._fusable_names()

    def linear_weights(self) -> list[Tensor]:
        """One weight of each shape that the trunk and the heads multiply with."""
        ends = (self.weights.layers[0], self.weights.layers[-1])
        weights = [w for layer in ends for w in (layer.qkv, layer.query, layer.key_value, layer.output)]
        weights += [w for layer in ends for w in (layer.gate_value, layer.ffn_output)] + [self.weights.heads]
        return list({tuple(weight.shape): weight for weight in weights if weight is not None}.values())

    def _fusable_names(self) -> list[Projected | Literal["gate_value"]]:
        """Weights whose product is followed directly by the gate or RoPE, with no bias or norm in between."""
        first, last = self.weights.layers[0], self.weights.layers[-1]
        names: list[Projected | Literal["gate_value"]] = ["gate_value"] if self.config.gated else []
        names += ["qkv", "query", "key_value"]
        return [name for name in names if name not in (first.biases.keys() | last.biases.keys())]

    def choose(self, step: Callable[[int], Step], sizes: Sequence[int]) -> dict[str, Any]:
        """See `Kernels.choose`; `step` makes a step of at most the given number of rows."""
        return self.kernels.choose(self.linear_weights(), lambda rows: self.parts(step(rows).at(rows)), sizes)

    def parts(self, step: Step) -> list[Part]:
        """Each kind of operation of a forward separately, on the trunk's own activations; plain products before fused ones."""
        between = {
            "qkv": (self.normed, self.qkv), "query": (self.normed, self.query), "key_value": (self.normed, self.key_value),
            "output": (self.mixed, self.projected), "gate_value": (self.normed, self.gate_value),
            "ffn_output": (self.hidden, self.projected),
        }  # fmt: skip
        products: dict[str, Part] = {}
        fused: list[Part] = []
        for name, (x, out) in between.items():
            weights = [weight for layer in self.weights.layers if (weight := getattr(layer, name)) is not None]
            if not weights:
                continue

            def product(i: int, weights: list[Tensor] = weights, x: Tensor = x, out: Tensor = out) -> None:
                self.kernels.multiply(step, x, weights[i], out)

            shape, rows = shape_name(weights[0]), step.rows
            part = Part(shape, rows, len(weights), product, [x[:rows]], [out[: step.used]], weights)
            products.setdefault(shape, part)
            fused += [self._fused(step, each, x, out, weights) for each in self._fusable if each == name]
        return [*products.values(), *fused, *self._others(step)]

    def _fused(
        self, step: Step, name: Projected | Literal["gate_value"], x: Tensor, out: Tensor, weights: list[Tensor]
    ) -> Part:
        """A product fused with the gate or with RoPE."""
        kernels, hidden, inputs = self.kernels, self.hidden, [x[: step.rows]]
        if name == "gate_value":

            def gate(i: int) -> None:
                kernels.multiply_gate(step, x, weights[i], out, hidden)

            return Part(name, step.rows, len(weights), gate, inputs, [hidden[: step.used]], weights)
        step = step.at(step.rows, tail=name == "query")
        first = 0 if name == "qkv" else len(self.weights.layers) - 1

        def rotate(i: int) -> None:
            kernels.multiply_rotate(step, x, weights[i], out, name, first + i)

        states = [] if name == "query" else [state.keys_values for state in step.states]
        return Part(name, step.rows, len(weights), rotate, inputs, [out[: step.used], *states], weights)

    def _others(self, step: Step) -> list[Part]:
        """Tokens, attention and norms."""
        kernels, layers, count, rows = self.kernels, self.weights.layers, len(self.weights.layers), step.rows
        is_tail, queries = count == 1, self.query.shape[1]
        query, key_value = self.qkv[:, :queries], self.qkv[:, queries:]
        if is_tail:
            query, key_value = self.query, self.key_value
        attending = step.at(rows, tail=is_tail)

        def embed(i: int) -> None:
            kernels.embed(step, self.tables, self.weights.tokens, self.residual)

        def attend(i: int) -> None:
            kernels.attend(attending, query, key_value, i, self.mixed)

        def norm(i: int) -> None:
            layer = layers[i]
            kernels.norm(step, self.projected, layer.attention_post_norm, self.residual, layer.ffn_norm, self.normed)

        read = [query[:rows], key_value[:rows], *(state.keys_values for state in step.states)]
        normed = [self.projected[:rows], self.residual[:rows]]
        return [
            Part("embed", rows, 1, embed, [], [self.residual[: step.used]], [self.weights.tokens.projection]),
            Part("attend", rows, max(1, count - 1), attend, read, [self.mixed[: attending.used]]),
            Part("norm", rows, count, norm, normed, [self.normed[: step.used]]),
        ]

    def body(self, step: Step) -> None:
        """All rows, up to the last layer's keys and values."""
        kernels, layers, rows = self.kernels, self.weights.layers, step.rows
        kernels.embed(step, self.tables, self.weights.tokens, self.residual)
        if self.weights.sinusoids is not None:
            self.residual[:rows] += self.weights.sinusoids[step.arrays.positions[:rows].long()]
        kernels.norm(step, None, None, self.residual, layers[0].attention_norm, self.normed)
        queries = self.query.shape[1]
        for i, layer in enumerate(layers[:-1]):
            self._project(step, "qkv", self.qkv, i)
            kernels.attend(step, self.qkv[:, :queries], self.qkv[:, queries:], i, self.mixed)
            self._after_attention(step, layer, layers[i + 1].attention_norm, self.normed)
        self._project(step, "key_value", self.key_value, len(layers) - 1)

    def tail(self, step: Step) -> None:
        """Candidates only: the last layer from its queries on, and the heads; leaves raw outputs in `logits` `[rows, A + Z …]`."""
        step, index = step.at(step.rows, tail=True), len(self.weights.layers) - 1
        self._project(step, "query", self.query, index)
        self.kernels.attend(step, self.query, self.key_value, index, self.mixed)
        self._after_attention(step, self.weights.layers[-1], self.weights.final_norm, self.final)
        self.kernels.multiply(step, self.final, self.weights.heads, self.logits)

    def whole(self, step: Step) -> None:
        """Both halves, with the same number of rows each."""
        self.body(step)
        self.tail(step)

    def _after_attention(self, step: Step, layer: LayerWeights, next_norm: Norm, out: Tensor) -> None:
        """Output projection, FFN and both residual additions; `out` is the residual stream, normed for what follows."""
        kernels = self.kernels
        self._multiply(step, self.mixed, layer, "output", self.projected)
        kernels.norm(step, self.projected, layer.attention_post_norm, self.residual, layer.ffn_norm, self.normed)
        if "gate_value" in self._fusable:
            kernels.multiply_gate(step, self.normed, layer.gate_value, self.gate_value, self.hidden)
        else:
            self._multiply(step, self.normed, layer, "gate_value", self.gate_value)
            kernels.gate(step, self.gate_value, self.hidden)
        self._multiply(step, self.hidden, layer, "ffn_output", self.projected)
        kernels.norm(step, self.projected, layer.ffn_post_norm, self.residual, next_norm, out)

    def _multiply(self, step: Step, x: Tensor, layer: LayerWeights, name: str, out: Tensor) -> None:
        """A linear map of a layer, by the name of its weight."""
        self.kernels.multiply(step, x, getattr(layer, name), out)
        if name in layer.biases:
            out[: step.rows] += layer.biases[name]

    def _project(self, step: Step, part: Projected, out: Tensor, index: int) -> None:
        """Queries, keys and values as attention uses them, rotated."""
        kernels, layer = self.kernels, self.weights.layers[index]
        if part in self._fusable:
            kernels.multiply_rotate(step, self.normed, getattr(layer, part), out, part, index)
            return
        self._multiply(step, self.normed, layer, part, out)
        kernels.rotate(step, *split_part(self.config, part, out), index)
