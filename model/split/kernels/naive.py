"""Plain fp32 definitions of the split engine's operations: what every fast path is tested against. Not for use in an engine.

Tokens have their definition in `model.ranker.TokenBuilder`, RoPE in `model.layers.rotate`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from model.layers import MASKED, rms_norm


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    limits: Tensor,
    own: tuple[Tensor, Tensor] | None,
    multiplier: float,
    cap: float,
) -> Tensor:
    """Attention of rows over one context: row m sees the context's first `limits[m]` keys and, with `own`, itself.

    query `[M, N, K]`; keys, values `[S, G, K]`; limits int `[M]`; own key and value `[M, G, K]`. Every logit is
    `cap · tanh(multiplier · q·k / cap)`, spec section 1. Returns fp32 `[M, N, K]`.

                  context        own
        row 0   1 1 1 0 0 0   |  1           limits[0] = 3
        row 1   1 1 1 1 1 1   |    1         limits[1] = 6
    """
    heads = query.shape[1]
    group = heads // keys.shape[1]
    query, keys, values = query.float(), keys.float(), values.float()
    logits = multiplier * torch.einsum("mnk,snk->mns", query, keys.repeat_interleave(group, 1))
    logits = cap * torch.tanh(logits / cap)
    seen = torch.arange(keys.shape[0], device=query.device) < limits[:, None]
    logits = torch.where(seen[:, None], logits, MASKED)
    values = values.repeat_interleave(group, 1)
    if own is None:
        return torch.einsum("mns,snk->mnk", torch.softmax(logits, -1), values)
    own_key, own_value = (x.float().repeat_interleave(group, 1) for x in own)
    diagonal = cap * torch.tanh(multiplier * (query * own_key).sum(-1, keepdim=True) / cap)
    weights = torch.softmax(torch.cat((logits, diagonal), -1), -1)
    return torch.einsum("mns,snk->mnk", weights[..., :-1], values) + weights[..., -1:] * own_value


def add_norm(
    mixed: Tensor | None, post_scale: Tensor | None, residual: Tensor, scale: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """`residual += rms_norm(mixed, post_scale)`, then `rms_norm(residual, scale)`, all `[M, D]` in fp32: returns both."""
    if mixed is not None and post_scale is not None:
        residual = residual + rms_norm(mixed.float(), post_scale, epsilon)
    return residual, rms_norm(residual, scale, epsilon)


def gate(gate_value: Tensor) -> Tensor:
    """`gelu(gate) ⊙ value`, tanh approximation, of `[M, 2·F]` holding gate and value side by side: fp32 `[M, F]`."""
    gates, values = gate_value.float().chunk(2, -1)
    return functional.gelu(gates, approximate="tanh") * values


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight`, `[M, in]` by `[in, out]`, accumulated in fp32."""
    return x.float() @ weight.float()
