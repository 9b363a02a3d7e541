"""A ranker's weights as the split engine reads them: merged, cast and on the device. Not for the embedding tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from model.config import DWELL_HIDDEN_WIDTH, ModelConfig
from model.layers import rope_tables
from model.ranker import Ranker, TokenBuilder
from model.trunk import DecoderLayer

FFN_COLUMNS = 64  # zero columns of gate and value give zero products, and let kernels drop their masks
HEAD_COLUMNS = 32  # a product with an odd number of columns depends on the row's place in some libraries


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Linear weights `[in, out]` in the engine's dtype, norm scales fp32 `[D]`.

    gate_value `[D, 2·F']` and ffn_output `[F', D]` have F' = F rounded up to a multiple of `FFN_COLUMNS`, with zeros.
    `query` `[D, N·K]` and `key_value` `[D, 2·G·K]` lie side by side in `qkv`; the last layer has them apart instead,
    because its context needs no queries.
    """

    attention_norm: Tensor
    qkv: Tensor | None
    query: Tensor | None
    key_value: Tensor | None
    output: Tensor
    attention_post_norm: Tensor
    ffn_norm: Tensor
    gate_value: Tensor
    ffn_output: Tensor
    ffn_post_norm: Tensor


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """All fp32. Every small input is multiplied with its rows of the projection at load, so that only the hash embeddings
    are left to multiply; `E` hash embeddings make a post or a candidate, `U` a user.

    projection `[(2·E + U)·D, D]`: candidate, history, user. surfaces `[2, surfaces, D]`: candidate, history.
    ages `[buckets, D]`, actions `[A, D]`, dwell_input `[64]`, dwell_output `[64, D]`; zeros where the checkpoint has none.
    """

    projection: Tensor
    surfaces: Tensor
    ages: Tensor
    actions: Tensor
    dwell_input: Tensor
    dwell_output: Tensor


@dataclass(frozen=True, slots=True)
class SplitWeights:
    """The whole trunk. heads fp32 `[D, A + Z + padding]`, columns up to a multiple of `HEAD_COLUMNS`;
    rope fp32 `[2, positions, K/2]`: cosines and sines of every position.
    """

    layers: tuple[LayerWeights, ...]
    tokens: TokenWeights
    final_norm: Tensor
    heads: Tensor
    rope: Tensor


def split_weights(ranker: Ranker, device: torch.device, dtype: torch.dtype) -> SplitWeights:
    """Merge and move a ranker's weights; the ranker itself stays as it is."""
    config = ranker.config
    last = config.layers - 1
    layers = tuple(_layer(layer, device, dtype, last=i == last) for i, layer in enumerate(_decoder_layers(ranker)))
    heads = [ranker.heads.actions.detach()]
    if config.continuous_actions:
        heads.append(ranker.heads.continuous.detach())
    heads.append(heads[0].new_zeros(config.width, -(config.actions + config.continuous_actions) % HEAD_COLUMNS))
    positions = torch.arange(config.candidate_position + config.candidate_length)
    half = config.head_width // 2
    rope = torch.stack([table[:, :half] for table in rope_tables(positions, config.head_width, config.rope_base)])
    return SplitWeights(
        layers=layers,
        tokens=_tokens(ranker.tokens, config, device),
        final_norm=_moved(ranker.heads.norm, device),
        heads=_moved(torch.cat(heads, 1), device),
        rope=rope.to(device).contiguous(),
    )


def _decoder_layers(ranker: Ranker) -> list[DecoderLayer]:
    return [layer for layer in ranker.trunk.layers if isinstance(layer, DecoderLayer)]


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A contiguous copy that shares nothing with the ranker."""
    return tensor.detach().to(device=device, dtype=dtype, copy=True).contiguous()


def _layer(layer: DecoderLayer, device: torch.device, dtype: torch.dtype, *, last: bool) -> LayerWeights:
    query = _moved(layer.query, device, dtype)
    key_value = _moved(torch.cat((layer.key.detach(), layer.value.detach()), 1), device, dtype)
    gate, value, output = layer.ffn_gate.detach(), layer.ffn_value.detach(), layer.ffn_output.detach()
    padding = -gate.shape[1] % FFN_COLUMNS
    gate, value = (functional.pad(weight, (0, padding)) for weight in (gate, value))
    return LayerWeights(
        attention_norm=_moved(layer.attention_norm, device),
        qkv=None if last else torch.cat((query, key_value), 1),
        query=query if last else None,
        key_value=key_value if last else None,
        output=_moved(layer.output, device, dtype),
        attention_post_norm=_moved(layer.attention_post_norm, device),
        ffn_norm=_moved(layer.ffn_norm, device),
        gate_value=_moved(torch.cat((gate, value), 1), device, dtype),
        ffn_output=_moved(functional.pad(output, (0, 0, 0, padding)), device, dtype),
        ffn_post_norm=_moved(layer.ffn_post_norm, device),
    )


def _tokens(tokens: TokenBuilder, config: ModelConfig, device: torch.device) -> TokenWeights:
    width = config.width
    entity = (config.post_hashes.count + config.author_hashes.count) * width
    history = tokens.history_projection.detach().double()
    candidate = tokens.candidate_projection.detach().double()
    surfaces = tokens.surface_table.detach().double()
    projection = torch.cat((candidate[:entity], history[:entity], tokens.user_projection.detach().double()))
    ages, dwell_input = torch.zeros(1, width), torch.zeros(DWELL_HIDDEN_WIDTH)
    dwell_output = torch.zeros(DWELL_HIDDEN_WIDTH, width)
    if config.has_post_age:
        ages = tokens.post_age_table.detach().double() @ candidate[entity + width :]
    if config.has_dwell:
        dwell_input = tokens.dwell_input.detach()[0]
        dwell_output = tokens.dwell_output.detach().double() @ history[entity + 2 * width :]
    on_history = surfaces @ history[entity + width : entity + 2 * width]
    return TokenWeights(
        projection=_moved(projection, device),
        surfaces=_moved(torch.stack((surfaces @ candidate[entity : entity + width], on_history)), device),
        ages=_moved(ages, device),
        actions=_moved(tokens.action_projection.detach().double() @ history[entity : entity + width], device),
        dwell_input=_moved(dwell_input, device),
        dwell_output=_moved(dwell_output, device),
    )
