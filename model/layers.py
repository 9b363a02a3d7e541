"""The operations of a decoder layer, each as its plain definition. Not for speed: faster paths are tested against these.

Letters as in `model.config`. Every function takes activations of any float dtype and returns the same dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from model.config import Activation, CapForm

MASKED = -1e30


def rms_norm(x: Tensor, scale: Tensor, epsilon: float) -> Tensor:
    """`scale · x / sqrt(mean(x²) + ε)` over the last axis, in fp32, cast back. `scale` is a plain factor, `[D]`."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (scale.float() * normed).to(x.dtype)


def layer_norm(x: Tensor, scale: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """`scale · (x − mean(x)) / sqrt(var(x) + ε) + bias` over the last axis, biased variance, in fp32, cast back. scale, bias `[D]`."""
    return functional.layer_norm(x.float(), scale.shape, scale.float(), bias.float(), epsilon).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight + bias`, weight `[in, out]` and bias `[out]` cast to the activation dtype."""
    product = x @ weight.to(x.dtype)
    return product if bias is None else product + bias.to(x.dtype)


def rope_tables(positions: Tensor, head_width: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, fp32 `[..., K]`, of integer positions `[...]`; the two halves of K hold the same angles."""
    exponents = torch.arange(0, head_width, 2, device=positions.device) / head_width
    angles = positions.float()[..., None] / float(base) ** exponents
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on half-split pairs: `x·cos + concat(-x2, x1)·sin`, in fp32, cast back. x `[..., T, heads, K]`, tables `[..., T, K]`."""
    first, second = x.float().chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (x.float() * cos[..., None, :] + turned * sin[..., None, :]).to(x.dtype)


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Embeddings of positions `[...]`, to add to tokens, fp32 `[..., D]` (Vaswani et al. 2017): `sin(p · 10000^(−2i/D))` at feature 2i,
    the cosine at 2i + 1.
    """
    half = width // 2
    cos, sin = (table[..., :half] for table in rope_tables(positions, width, 10_000.0))
    return torch.stack((sin, cos), -1).flatten(-2)


def ranking_mask(
    context_length: int, candidates: int, *, bidirectional: bool, device: torch.device | None = None
) -> Tensor:
    """Which key each row sees, bool `[T, T]`. Context rows see the past (or all of the context); a candidate sees the
    whole context and itself, never another candidate:

                 context   candidates
        context  1 0 0 0 | 0 0 0         1 everywhere on the left block when `bidirectional`
                 1 1 0 0 | 0 0 0
                 1 1 1 0 | 0 0 0
                 1 1 1 1 | 0 0 0
                 --------+------
        cand.    1 1 1 1 | 1 0 0
                 1 1 1 1 | 0 1 0
                 1 1 1 1 | 0 0 1
    """
    length = context_length + candidates
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    if bidirectional:
        mask[:context_length, :context_length] = True
    mask[context_length:, context_length:] = torch.eye(candidates, dtype=torch.bool, device=device)
    return mask


def attention_logits(query: Tensor, key: Tensor, multiplier: float) -> Tensor:
    """`multiplier · QKᵀ` in fp32, `[B, N, T, S]`, before cap and mask. query `[B, T, N, K]`; key `[B, S, G, K]`, query head n
    reads head `n // (N/G)`; there is no hidden `1/sqrt(K)`."""
    key = key.repeat_interleave(query.shape[2] // key.shape[2], 2)
    return torch.einsum("btnk,bsnk->bnts", query, key).float() * multiplier


def soft_cap(logits: Tensor, cap: float | None, form: CapForm = "tanh") -> Tensor:
    """`cap · tanh(logits / cap)`, or `logits / (1 + |logits| / cap)` (`softsign`): close to the identity far below the cap, and
    never beyond it. A cap of None leaves them unchanged."""
    if cap is None:
        return logits
    return cap * torch.tanh(logits / cap) if form == "tanh" else logits / (1 + logits.abs() / cap)


def attention_weights(
    query: Tensor, key: Tensor, mask: Tensor, multiplier: float, cap: float | None, form: CapForm = "tanh"
) -> Tensor:
    """`softmax(mask(soft_cap(logits)))` in fp32, `[B, N, T, S]`: the cap comes before the mask. mask bool, broadcast to `[B, T, S]`."""
    logits = soft_cap(attention_logits(query, key, multiplier), cap, form)
    return torch.softmax(torch.where(mask[..., None, :, :], logits, MASKED), -1)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    multiplier: float,
    cap: float | None,
    form: CapForm = "tanh",
) -> Tensor:
    """Grouped-query attention with soft-capped logits, dense: `attention_weights · V`, `[B, T, N, K]`. key, value `[B, T, G, K]`."""
    weights = attention_weights(query, key, mask, multiplier, cap, form).to(value.dtype)
    return torch.einsum("bnts,bsnk->btnk", weights, value.repeat_interleave(query.shape[2] // key.shape[2], 2))


def activate(x: Tensor, activation: Activation) -> Tensor:
    """gelu by its tanh approximation (`gelu_tanh`) or exact (`gelu`), or `silu`: `x · sigmoid(x)`."""
    if activation == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
