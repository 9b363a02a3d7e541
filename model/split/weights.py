"""A ranker's weights as the split engine reads them: merged, cast and on the device. Embedding tables are in `tables`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from model.config import DWELL_HIDDEN_WIDTH, ModelConfig
from model.layers import LayerNorm, Linear, RMSNorm, rope_tables, sinusoids
from model.ranker import Ranker, TokenBuilder, by_feature, candidate_features, history_features
from model.trunk import DecoderLayer

FFN_COLUMNS = 64  # zero columns of gate and value give zero products, and let kernels drop their masks
INPUT_ROWS = 64
HEAD_COLUMNS = 32  # a product with an odd number of columns depends on the row's place in some libraries


@dataclass(frozen=True, slots=True)
class NormWeights:
    """The scale of an RMSNorm, fp32 `[D]`; with a bias it is a LayerNorm's."""

    scale: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Linear weights `[in, out]` in the engine's dtype.

    gate_value `[D, 2·F']` and ffn_output `[F', D]` have F' = F rounded up to a multiple of `FFN_COLUMNS`, with zeros; without a
    gate gate_value is `[D, F']`. `query` `[D, N·K]` and `key_value` `[D, 2·G·K]` lie side by side in `qkv`; the last layer
    has them apart instead, because its context needs no queries. `biases` holds those of the linear weights, by the field's
    name.
    """

    attention_norm: NormWeights
    qkv: Tensor | None
    query: Tensor | None
    key_value: Tensor | None
    output: Tensor
    attention_post_norm: NormWeights | None
    ffn_norm: NormWeights
    gate_value: Tensor
    ffn_output: Tensor
    ffn_post_norm: NormWeights | None
    biases: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """A token is its inputs times the projection of its kind, plus the vectors of its surface, its age and its codes. Small inputs are
    multiplied with their rows of the projection at load; `E` hash embeddings make a post or a candidate, `U` a user.

    projection `[Σ inputs, D]`, one kind after another; `inputs` says how many rows each has: a candidate's E·D, a history item's
    E·D and those of actions `2a − 1` (zeros where none is set) and dwell `gelu(clip(s, 0, 30) / 30 · dwell_input)`, up to a
    multiple of `INPUT_ROWS` with zeros; a user's U·D. fp32: surfaces `[2, surfaces, D]`, candidate and history; ages
    `[buckets, D]`; codes `[2, L · V, D]`, as surfaces; dwell_input `[64]`. Zeros where the checkpoint has none.
    """

    projection: Tensor
    inputs: tuple[int, int, int]
    surfaces: Tensor
    ages: Tensor
    codes: Tensor
    dwell_input: Tensor


@dataclass(frozen=True, slots=True)
class SplitWeights:
    """The whole trunk. heads fp32 `[D, A + Z + padding]`, columns up to a multiple of `HEAD_COLUMNS`;
    rope fp32 `[2, positions, K/2]`: cosines and sines of every position. For sinusoidal positions they are ones and zeros, which
    rotate nothing, and `sinusoids` fp32 `[positions, D]` are added to the tokens.
    """

    layers: tuple[LayerWeights, ...]
    tokens: TokenWeights
    final_norm: NormWeights
    heads: Tensor
    rope: Tensor
    sinusoids: Tensor | None


def split_weights(
    ranker: Ranker, device: torch.device, dtype: torch.dtype, token_dtype: torch.dtype = torch.float32
) -> SplitWeights:
    """Merge and move a ranker's weights; the ranker itself stays as it is. `token_dtype` is that of the tokens' projection."""
    config = ranker.config
    decoder_layers = ranker.trunk.decoder_layers()
    last = len(decoder_layers) - 1
    layers = tuple(_layer(layer, config, device, dtype, last=i == last) for i, layer in enumerate(decoder_layers))
    heads = [ranker.heads.actions.weight.detach()]
    if ranker.heads.continuous is not None:
        heads.append(ranker.heads.continuous.weight.detach())
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
        final_norm=_norm(ranker.heads.norm, device),
        heads=_moved(torch.cat(heads, 1), device),
        rope=rope.to(device).contiguous(),
        sinusoids=added,
    )


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A contiguous copy that shares nothing with the ranker."""
    return tensor.detach().to(device=device, dtype=dtype, copy=True).contiguous()


def _norm(norm: RMSNorm | LayerNorm, device: torch.device) -> NormWeights:
    return NormWeights(_moved(norm.scale, device), _moved(norm.bias, device) if isinstance(norm, LayerNorm) else None)


def _layer(
    layer: DecoderLayer, config: ModelConfig, device: torch.device, dtype: torch.dtype, *, last: bool
) -> LayerWeights:
    """`last`: the layer whose context needs no queries."""
    attention, ffn = layer.attention, layer.ffn
    padding = -config.ffn_width % FFN_COLUMNS
    gates = [ffn.gate] if ffn.value is None else [ffn.gate, ffn.value]
    joined: dict[str, tuple[list[Linear], int]] = {  # linear maps side by side, and zero columns after each
        "query": ([attention.query], 0),
        "key_value": ([attention.key, attention.value], 0),
        "qkv": ([attention.query, attention.key, attention.value], 0),
        "output": ([attention.output], 0),
        "gate_value": (gates, padding),
        "ffn_output": ([ffn.output], 0),
    }
    for name in ("qkv",) if last else ("query", "key_value"):
        del joined[name]

    def merged(maps: Sequence[Linear], columns: int) -> Tensor:
        return _moved(torch.cat([functional.pad(linear.weight, (0, columns)) for linear in maps], -1), device, dtype)

    def merged_bias(maps: Sequence[Linear], columns: int) -> Tensor:
        biases = [functional.pad(linear.bias, (0, columns)) for linear in maps if linear.bias is not None]
        return _moved(torch.cat(biases, -1), device, dtype)

    weights = {name: merged(*maps) for name, maps in joined.items()}
    post_norms = (layer.attention_post_norm, layer.ffn_post_norm)
    attention_post_norm, ffn_post_norm = (None if norm is None else _norm(norm, device) for norm in post_norms)
    return LayerWeights(
        qkv=weights.get("qkv"),
        query=weights.get("query"),
        key_value=weights.get("key_value"),
        output=weights["output"],
        gate_value=weights["gate_value"],
        ffn_output=functional.pad(weights["ffn_output"], (0, 0, 0, padding)),
        attention_norm=_norm(layer.attention_norm, device),
        attention_post_norm=attention_post_norm,
        ffn_norm=_norm(layer.ffn_norm, device),
        ffn_post_norm=ffn_post_norm,
        biases={name: merged_bias(*maps) for name, maps in joined.items()} if config.biases else {},
    )


def _tokens(tokens: TokenBuilder, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> TokenWeights:
    history = by_feature(tokens.history_projection.detach().double(), history_features(config))
    candidate = by_feature(tokens.candidate_projection.detach().double(), candidate_features(config))
    surfaces = tokens.surface_table.detach().double()
    user = tokens.user_projection.detach().double()
    small = [tokens.action_projection.detach().double() @ history["actions"]]
    ages, dwell_input = torch.zeros(1, config.width), torch.zeros(DWELL_HIDDEN_WIDTH)
    codes = torch.zeros(2, 1, config.width)
    if config.token_levels:
        table = tokens.code_table.detach().double()
        codes = torch.stack((table @ candidate["codes"], table @ history["codes"]))
    if config.has_post_age:
        ages = tokens.post_age_table.detach().double() @ candidate["post_age"]
    if config.has_dwell:
        dwell_input = tokens.dwell_input.detach()[0]
        small.append(tokens.dwell_output.detach().double() @ history["dwell"])
    small.append(small[0].new_zeros(-sum(map(len, small)) % INPUT_ROWS, config.width))
    kinds = (
        torch.cat((candidate["post"], candidate["author"])),
        torch.cat((history["post"], history["author"], *small)),
        user,
    )
    scale = config.input_scale  # a token is a sum of these, so that the scale needs no pass of its own
    return TokenWeights(
        projection=_moved(scale * torch.cat(kinds), device, dtype),
        inputs=(len(kinds[0]), len(kinds[1]), len(user)),
        surfaces=_moved(scale * torch.stack((surfaces @ candidate["surface"], surfaces @ history["surface"])), device),
        ages=_moved(scale * ages, device),
        codes=_moved(scale * codes, device),
        dwell_input=_moved(dwell_input, device),
    )
