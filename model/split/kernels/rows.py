"""Triton: operations on one row at a time: norms with their residual addition, the activation with its gate, RoPE."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from model.config import Activation
from model.layers import activate, layer_norm, rms_norm
from model.split.kernels.fields import PLACE, POSITION, REQUEST, ROW_WORDS, state_of
from model.split.weights import NormWeights


def norm(x: Tensor, weights: NormWeights, epsilon: float) -> Tensor:
    """The definition of a norm: x `[M, D]` through an RMSNorm or, with a bias, a LayerNorm, in fp32."""
    if weights.bias is None:
        return rms_norm(x.float(), weights.scale, epsilon)
    return layer_norm(x.float(), weights.scale, weights.bias, epsilon)


def add_norm(
    mixed: Tensor | None, post: NormWeights | None, residual: Tensor, weights: NormWeights, epsilon: float
) -> tuple[Tensor, Tensor]:
    """The definition: `residual += post(mixed)`, or `mixed` itself without a `post`; then `norm(residual)`, all `[M, D]` in fp32."""
    if mixed is not None:
        residual = residual + (norm(mixed, post, epsilon) if post else mixed.float())
    return residual, norm(residual, weights, epsilon)


@triton.jit
def normed(x, scale, bias, there, epsilon, WIDTH: tl.constexpr, CENTRED: tl.constexpr):
    """`scale · x / sqrt(mean(x²) + ε)` (Zhang and Sennrich 2019); CENTRED: of `x − mean(x)`, plus a bias (Ba et al. 2016).
    Scale and bias point to one number per column."""
    columns = tl.arange(0, x.shape[0])
    if CENTRED:
        x = tl.where(there, x - tl.sum(x, 0) / WIDTH, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
    x *= tl.load(scale + columns, mask=there, other=0.0)
    if CENTRED:
        x += tl.load(bias + columns, mask=there, other=0.0)
    return x


@triton.jit(do_not_specialize=["counted"])
def norm_rows(
    mixed, post_scale, post_bias, residual, scale, bias, out, counts, counted, epsilon, HAS_MIXED: tl.constexpr,
    HAS_POST: tl.constexpr, CENTRED: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
):  # fmt: skip
    """`r ← r + post(m)`, then `out = norm(r)`; see `normed`. Without HAS_POST `r ← r + m`, without HAS_MIXED r stays as it is.
    residual fp32 `[rows, D]` in place.

    One program per row: a row's sums are always taken in the same order.
    """
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(counts + counted):
        return
    columns = tl.arange(0, WIDTH_BLOCK)
    there = columns < WIDTH
    wide = tl.load(residual + row * WIDTH + columns, mask=there, other=0.0)
    if HAS_MIXED:
        m = tl.load(mixed + row * WIDTH + columns, mask=there, other=0.0).to(tl.float32)
        if HAS_POST:
            m = normed(m, post_scale, post_bias, there, epsilon, WIDTH, CENTRED)
        wide += m
        tl.store(residual + row * WIDTH + columns, wide, mask=there)
    result = normed(wide, scale, bias, there, epsilon, WIDTH, CENTRED)
    tl.store(out + row * WIDTH + columns, result.to(out.dtype.element_ty), mask=there)


def gate(gate_value: Tensor, activation: Activation, *, gated: bool = True) -> Tensor:
    """The definition: `activation(gate) ⊙ value` of `[M, 2·F]` with gate and value side by side: fp32 `[M, F]`. Without a gate: of
    `[M, F]`."""
    if not gated:
        return activate(gate_value.float(), activation)
    gates, values = gate_value.float().chunk(2, -1)
    return activate(gates, activation) * values


@triton.jit
def activated(g, ACTIVATION: tl.constexpr):
    """`gelu_tanh` (Hendrycks and Gimpel 2016): `g / (1 + exp(−2u))`, `u = sqrt(2/π) · (g + 0.044715 g³)`; `gelu`:
    `g · (1 + erf(g / √2)) / 2`; `silu`: `g / (1 + exp(−g))`."""
    if ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        return g / (1.0 + tl.exp(-2.0 * inner))
    if ACTIVATION == "gelu":
        return 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476))
    return g / (1.0 + tl.exp(-g))


@triton.jit(do_not_specialize=["counted"])
def gate_rows(
    gate_value, out, counts, counted, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`out = activation(g) · v`; gate_value `[rows, 2·F]` holds g and v side by side. Not GATED: `activation(g)` of `[rows, F]`."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(counts + counted):
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < WIDTH
    source = gate_value + row * (2 * WIDTH if GATED else WIDTH) + columns
    result = activated(tl.load(source, mask=there).to(tl.float32), ACTIVATION)
    if GATED:
        result *= tl.load(source + WIDTH, mask=there).to(tl.float32)
    tl.store(out + row * WIDTH + columns, result.to(out.dtype.element_ty), mask=there)


@triton.jit
def store_halves(target, first, second, there, HALF: tl.constexpr):
    """Stores the two halves of each head, HALF elements apart."""
    tl.store(target, first, mask=there)
    tl.store(target + HALF, second, mask=there)


@triton.jit
def rotate_heads(source, cos, sin, there, HALF: tl.constexpr):
    """Turn the pairs `(x1, x2) = (source, source + HALF)` in place: `x1·cos − x2·sin`, `x2·cos + x1·sin`; returns both. Explicit fma
    fixes the rounding."""
    dtype: tl.constexpr = source.dtype.element_ty
    first = tl.load(source, mask=there).to(tl.float32)
    second = tl.load(source + HALF, mask=there).to(tl.float32)
    turned_first = tl.fma(first, cos, -(second * sin)).to(dtype)
    turned_second = tl.fma(second, cos, first * sin).to(dtype)
    store_halves(source, turned_first, turned_second, there, HALF)
    return turned_first, turned_second


@triton.jit(do_not_specialize=["counted", "layer"])
def rotate_rows(
    query, query_stride, key_value, key_value_stride, anchor, rope, rope_positions, counts, counted, rows, states, layer,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, QUERY_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    """RoPE (Su et al. 2021), half-split pairs, in place, in fp32: see `model.layers.rotate`. Then the keys and values of context rows
    are stored in their request's state.

    One program per row. `rope` fp32 `[2, rope_positions, K/2]`. QUERY_HEADS or KV_HEADS may be 0.
    """
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(counts + counted):
        return
    half: tl.constexpr = HEAD_WIDTH // 2
    columns = tl.arange(0, HALF_BLOCK)
    narrow = columns < half
    record = rows + row * ROW_WORDS
    position = tl.load(record + POSITION)
    cos = tl.load(rope + position * half + columns, mask=narrow)[None, :]
    sin = tl.load(rope + (rope_positions + position) * half + columns, mask=narrow)[None, :]
    if QUERY_HEADS > 0:
        heads = tl.arange(0, QUERY_BLOCK)
        there = (heads < QUERY_HEADS)[:, None] & narrow[None, :]
        rotate_heads(query + row * query_stride + heads[:, None] * HEAD_WIDTH + columns[None, :], cos, sin, there, half)
    if KV_HEADS > 0:
        token: tl.constexpr = KV_HEADS * HEAD_WIDTH
        heads = tl.arange(0, KV_BLOCK)
        there = (heads < KV_HEADS)[:, None] & narrow[None, :]
        inner = heads[:, None] * HEAD_WIDTH + columns[None, :]
        source = key_value + row * key_value_stride + inner
        turned_first, turned_second = rotate_heads(source, cos, sin, there, half)
        place = tl.load(record + PLACE)
        if place >= 0:
            start, _, capacity = state_of(states, tl.load(record + REQUEST))
            target = anchor + start + (layer.to(tl.int64) * 2 * capacity + place) * token + inner
            store_halves(target, turned_first, turned_second, there, half)
            value_first, value_second = tl.load(source + token, mask=there), tl.load(source + token + half, mask=there)
            store_halves(target + capacity.to(tl.int64) * token, value_first, value_second, there, half)
