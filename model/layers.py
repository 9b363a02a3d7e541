"""The operations of a decoder layer, each as its plain definition. Not for speed: faster paths are tested against these.

Letters as in `model.config`. Every function takes activations of any float dtype and returns the same dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.config import Activation

MASKED = -1e30


def zeros(*shape: int) -> nn.Parameter:
    """A parameter as upstream initialises it: every trunk weight, norm scales included, starts at 0."""
    return nn.Parameter(torch.zeros(*shape))


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without `torch.`, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


class Linear(nn.Module):
    """`x @ weight + bias`: weight `[in, out]` and bias `[out]`, if there is one, cast to the activation dtype."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = zeros(inputs, outputs)
        self.bias = zeros(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., in]` to `[..., out]`."""
        product: Tensor = x @ self.weight.to(x.dtype)
        return product if self.bias is None else product + self.bias.to(x.dtype)


class RMSNorm(nn.Module):
    """`scale · x / sqrt(mean(x²) + ε)` over the last axis, in fp32, cast back. `scale` is a plain factor, `[D]`."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.scale = zeros(width)

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., D]` to `[..., D]`."""
        return rms_norm(x, self.scale, self.epsilon)


class LayerNorm(nn.Module):
    """`scale · (x − mean(x)) / sqrt(var(x) + ε) + bias` over the last axis, biased variance, in fp32, cast back. scale, bias `[D]`."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.scale = zeros(width)
        self.bias = zeros(width)

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., D]` to `[..., D]`."""
        return layer_norm(x, self.scale, self.bias, self.epsilon)


def rms_norm(x: Tensor, scale: Tensor, epsilon: float) -> Tensor:
    """The formula of `RMSNorm`."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (scale.float() * normed).to(x.dtype)


def layer_norm(x: Tensor, scale: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """The formula of `LayerNorm`."""
    return functional.layer_norm(x.float(), scale.shape, scale.float(), bias.float(), epsilon).to(x.dtype)


def rope_tables(positions: Tensor, head_width: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, fp32 `[..., K]`, of integer positions `[...]`; the two halves of K hold the same angles."""
    exponents = torch.arange(0, head_width, 2, device=positions.device) / head_width
    angles = positions.float()[..., None] / float(base) ** exponents
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate_half(x: Tensor) -> Tensor:
    """`concat(-x2, x1)` of the two halves of the last axis."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on half-split pairs: `x·cos + rotate_half(x)·sin`, in fp32, cast back. x `[..., T, heads, K]`, tables `[..., T, K]`."""
    wide = x.float()
    return (wide * cos[..., None, :] + rotate_half(wide) * sin[..., None, :]).to(x.dtype)


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Embeddings of positions `[...]`, to add to tokens, fp32 `[..., D]` (Vaswani et al. 2017): `sin(p · 10000^(−2i/D))` at feature 2i,
    the cosine at 2i + 1.
    """
    half = width // 2
    cos, sin = (table[..., :half] for table in rope_tables(positions, width, 10_000.0))
    return torch.stack((sin, cos), -1).flatten(-2)


def make_recsys_attn_mask(
    seq_len: int, candidate_start_offset: int, *, bidirectional: bool = False, device: torch.device | None = None
) -> Tensor:
    """Which key each row sees, bool `[T, T]` for T = `seq_len`; candidates begin at `candidate_start_offset`. Context rows see the past
    (or all of the context); a candidate sees the whole context and itself, never another candidate:

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
    context = candidate_start_offset
    mask = torch.ones(seq_len, seq_len, dtype=torch.bool, device=device).tril()
    if bidirectional:
        mask[:context, :context] = True
    mask[context:, context:] = torch.eye(seq_len - context, dtype=torch.bool, device=device)
    return mask


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """`cap · tanh(logits / cap)`: close to the identity far below the cap, and never beyond it. A cap of None leaves them unchanged."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def attention_weights(query: Tensor, key: Tensor, mask: Tensor, multiplier: float, cap: float | None) -> Tensor:
    """`softmax(mask(soft_cap(multiplier · QKᵀ)))` in fp32, `[B, N, T, S]`: the cap comes before the mask.

    query `[B, T, N, K]`; key `[B, S, G, K]`, query head n reads head `n // (N/G)`; mask bool, broadcast to `[B, T, S]`. There is
    no hidden `1/sqrt(K)`.
    """
    key = key.repeat_interleave(query.shape[2] // key.shape[2], 2)
    logits = soft_cap(torch.einsum("btnk,bsnk->bnts", query, key).float() * multiplier, cap)
    return torch.softmax(torch.where(mask[..., None, :, :], logits, MASKED), -1)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, multiplier: float, cap: float | None) -> Tensor:
    """Grouped-query attention with soft-capped logits, dense: `attention_weights · V`, `[B, T, N, K]`. key, value `[B, S, G, K]`."""
    weights = attention_weights(query, key, mask, multiplier, cap).to(value.dtype)
    return torch.einsum("bnts,bsnk->btnk", weights, value.repeat_interleave(query.shape[2] // key.shape[2], 2))


def activate(x: Tensor, activation: Activation) -> Tensor:
    """gelu by its tanh approximation (`gelu_tanh`) or exact (`gelu`), or `silu`: `x · sigmoid(x)`."""
    if activation == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
