"""A ranker's weights as the split engine reads them: merged, cast and on the device. Embedding tables are in `tables`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.config import DWELL_HIDDEN_WIDTH, ModelConfig
from model.layers import rope_tables, sinusoids
from model.ranker import Ranker, TokenBuilder
from model.trunk import DecoderLayer

FFN_COLUMNS = 64  # zero columns of gate and value give zero products, and let kernels drop their masks
INPUT_ROWS = 64
LINEAR = ("query", "key", "value", "output", "ffn_gate", "ffn_value", "ffn_output")
HEAD_COLUMNS = 32  # a product with an odd number of columns depends on the row's place in some libraries


@dataclass(frozen=True, slots=True)
class Norm:
    """The scale of an RMSNorm, fp32 `[D]`; with a bias it is a LayerNorm's."""

    scale: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Linear weights `[in, out]` in the engine's dtype.

    gate_value `[D, 2·F']` and ffn_output `[F', D]` have F' = F rounded up to a multiple of `FFN_COLUMNS`, with zeros; without a
    gate gate_value is `[D, F']`. `query` `[D, N·K]` and `key_value` `[D, 2·G·K]` lie side by side in `qkv`; the last layer
    has them apart instead, because its context needs no queries. `biases` holds those of the linear weights, by the field's
    name; `head_norms` fp32 the scales for each head's query and key, `[K]` each.
    """

    attention_norm: Norm
    qkv: Tensor | None
    query: Tensor | None
    key_value: Tensor | None
    output: Tensor
    attention_post_norm: Norm | None
    ffn_norm: Norm
    gate_value: Tensor
    ffn_output: Tensor
    ffn_post_norm: Norm | None
    biases: dict[str, Tensor]
    head_norms: tuple[Tensor, Tensor] | None


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """A token is its inputs times the projection of its kind, plus its surface's and its age's vector. Small inputs are multiplied
    with their rows of the projection at load; `E` hash embeddings make a post or a candidate, `U` a user.

    projection `[Σ inputs, D]`, one kind after another; `inputs` says how many rows each has: a candidate's E·D, a history item's
    E·D and those of actions `2a − 1` (zeros where none is set) and dwell `gelu(clip(s, 0, 30) / 30 · dwell_input)`, up to a
    multiple of `INPUT_ROWS` with zeros; a user's U·D. fp32: surfaces `[2, surfaces, D]`, candidate and history; ages
    `[buckets, D]`; dwell_input `[64]`. Zeros where the checkpoint has none.
    """

    projection: Tensor
    inputs: tuple[int, int, int]
    surfaces: Tensor
    ages: Tensor
    dwell_input: Tensor


@dataclass(frozen=True, slots=True)
class SplitWeights:
    """The whole trunk. heads fp32 `[D, A + Z + padding]`, columns up to a multiple of `HEAD_COLUMNS`;
    rope fp32 `[2, positions, K/2]`: cosines and sines of every position. For sinusoidal positions they are ones and zeros, which
    rotate nothing, and `sinusoids` fp32 `[positions, D]` are added to the tokens.
    """

    layers: tuple[LayerWeights, ...]
    tokens: TokenWeights
    final_norm: Norm
    heads: Tensor
    rope: Tensor
    sinusoids: Tensor | None


def split_weights(
    ranker: Ranker, device: torch.device, dtype: torch.dtype, token_dtype: torch.dtype = torch.float32
) -> SplitWeights:
    """Merge and move a ranker's weights; the ranker itself stays as it is. `token_dtype` is that of the tokens' projection."""
    config = ranker.config
    last = config.layers - 1
    layers = tuple(_layer(layer, device, dtype, last=i == last) for i, layer in enumerate(_decoder_layers(ranker)))
    heads = [ranker.heads.actions.detach()]
    if config.continuous_actions:
        heads.append(ranker.heads.continuous.detach())
    heads.append(heads[0].new_zeros(config.width, -(config.actions + config.continuous_actions) % HEAD_COLUMNS))
    positions = torch.arange(config.candidate_position + config.candidate_length)
    half, added = config.head_width // 2, None
    if config.positions == "rope":
        rope = torch.stack([table[:, :half] for table in rope_tables(positions, config.head_width, config.rope_base)])
    else:
        rope = torch.stack((torch.ones(len(positions), half), torch.zeros(len(positions), half)))
        added = sinusoids(positions, config.width).to(device)
    return SplitWeights(
        layers=layers,
        tokens=_tokens(ranker.tokens, config, device, token_dtype),
        final_norm=_norm(ranker.heads, "norm", device),
        heads=_moved(torch.cat(heads, 1), device),
        rope=rope.to(device).contiguous(),
        sinusoids=added,
    )


def _decoder_layers(ranker: Ranker) -> list[DecoderLayer]:
    return [layer for layer in ranker.trunk.layers if isinstance(layer, DecoderLayer)]


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A contiguous copy that shares nothing with the ranker."""
    return tensor.detach().to(device=device, dtype=dtype, copy=True).contiguous()


def _norm(module: nn.Module, name: str, device: torch.device) -> Norm:
    bias = getattr(module, f"{name}_bias", None)
    return Norm(_moved(getattr(module, name), device), None if bias is None else _moved(bias, device))


def _layer(layer: DecoderLayer, device: torch.device, dtype: torch.dtype, *, last: bool) -> LayerWeights:
    config = layer.config
    padding = -config.ffn_width % FFN_COLUMNS

    def merged(suffix: str) -> dict[str, Tensor]:
        """All linear weights, or with the suffix all biases, by the field's name."""
        parts = {
            name: getattr(layer, f"{name}{suffix}").detach() for name in LINEAR if hasattr(layer, f"{name}{suffix}")
        }
        key_value = torch.cat((parts["key"], parts["value"]), -1)
        gates = [functional.pad(parts[name], (0, padding)) for name in ("ffn_gate", "ffn_value") if name in parts]
        joint = {"query": parts["query"], "key_value": key_value}
        joint = joint if last else {"qkv": torch.cat((parts["query"], key_value), -1)}
        joint |= {"output": parts["output"], "gate_value": torch.cat(gates, -1), "ffn_output": parts["ffn_output"]}
        return {name: _moved(tensor, device, dtype) for name, tensor in joint.items()}

    weights = merged("")
    return LayerWeights(
        qkv=weights.get("qkv"),
        query=weights.get("query"),
        key_value=weights.get("key_value"),
        output=weights["output"],
        gate_value=weights["gate_value"],
        ffn_output=functional.pad(weights["ffn_output"], (0, 0, 0, padding)),
        attention_norm=_norm(layer, "attention_norm", device),
        attention_post_norm=_norm(layer, "attention_post_norm", device) if config.sandwich else None,
        ffn_norm=_norm(layer, "ffn_norm", device),
        ffn_post_norm=_norm(layer, "ffn_post_norm", device) if config.sandwich else None,
        biases=merged("_bias") if config.biases else {},
        head_norms=(_moved(layer.query_norm, device), _moved(layer.key_norm, device)) if config.qk_norm else None,
    )


def _tokens(tokens: TokenBuilder, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> TokenWeights:
    width = config.width
    entity = (config.post_hashes.count + config.author_hashes.count) * width
    history = tokens.history_projection.detach().double()
    candidate = tokens.candidate_projection.detach().double()
    surfaces = tokens.surface_table.detach().double()
    user = tokens.user_projection.detach().double()
    small = [tokens.action_projection.detach().double() @ history[entity : entity + width]]
    ages, dwell_input = torch.zeros(1, width), torch.zeros(DWELL_HIDDEN_WIDTH)
    if config.has_post_age:
        ages = tokens.post_age_table.detach().double() @ candidate[entity + width :]
    if config.has_dwell:
        dwell_input = tokens.dwell_input.detach()[0]
        small.append(tokens.dwell_output.detach().double() @ history[entity + 2 * width :])
    small.append(small[0].new_zeros(-sum(map(len, small)) % INPUT_ROWS, width))
    kinds = (candidate[:entity], torch.cat((history[:entity], *small)), user)
    scale = config.input_scale  # a token is a sum of these, so that the scale needs no pass of its own
    on_candidate, on_history = (
        surfaces @ part for part in (candidate[entity : entity + width], history[entity + width : entity + 2 * width])
    )
    return TokenWeights(
        projection=_moved(scale * torch.cat(kinds), device, dtype),
        inputs=(len(kinds[0]), len(kinds[1]), len(user)),
        surfaces=_moved(scale * torch.stack((on_candidate, on_history)), device),
        ages=_moved(scale * ages, device),
        dwell_input=_moved(dwell_input, device),
    )
