"""Triton: operations on one row at a time: norms with their residual addition, the activation with its gate, RoPE. Launched by `fused`."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from model.split.kernels.order import wait_for_previous
from model.split.step import COUNTS, RECORD

_HEAD, _RECORD = tl.constexpr(COUNTS), tl.constexpr(RECORD)


@triton.jit
def normed(x, scale, bias, there, epsilon, WIDTH: tl.constexpr, CENTRED: tl.constexpr):
    """`scale · x / sqrt(mean(x²) + ε)` (Zhang and Sennrich 2019); CENTRED: of `x − mean(x)`, plus a bias (Ba et al. 2016).
    Scale and bias hold one number per column."""
    if CENTRED:
        x = tl.where(there, x - tl.sum(x, 0) / WIDTH, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
    x *= scale
    if CENTRED:
        x += bias
    return x


@triton.jit(do_not_specialize=["counted"])
def norm_rows(
    mixed, post_scale, post_bias, residual, scale, bias, out, counts, counted, epsilon, HAS_MIXED: tl.constexpr,
    HAS_POST: tl.constexpr, CENTRED: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`r ← r + post(m)`, then `out = norm(r)`; see `normed`. Without HAS_POST `r ← r + m`, without HAS_MIXED r stays as it is.
    residual fp32 `[rows, D]` in place.

    One program per row: a row's sums are always taken in the same order.
    """
    row = tl.program_id(0).to(tl.int64)
    row_count = tl.load(counts + counted)
    columns = tl.arange(0, WIDTH_BLOCK)
    there = columns < WIDTH
    # what other kernels do not write is read before waiting for them
    scale = tl.load(scale + columns, mask=there)
    if CENTRED:
        bias = tl.load(bias + columns, mask=there)
    if HAS_POST:
        post_scale = tl.load(post_scale + columns, mask=there, other=0.0)
        if CENTRED:
            post_bias = tl.load(post_bias + columns, mask=there, other=0.0)
    wait_for_previous(DEPENDENT)
    if row >= row_count:
        return
    wide = tl.load(residual + row * WIDTH + columns, mask=there, other=0.0)
    if HAS_MIXED:
        m = tl.load(mixed + row * WIDTH + columns, mask=there, other=0.0).to(tl.float32)
        if HAS_POST:
            m = normed(m, post_scale, post_bias, there, epsilon, WIDTH, CENTRED)
        wide += m
        tl.store(residual + row * WIDTH + columns, wide, mask=there)
    result = normed(wide, scale, bias, there, epsilon, WIDTH, CENTRED)
    tl.store(out + row * WIDTH + columns, result.to(out.dtype.element_ty), mask=there)


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
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`out = activation(g) · v`; gate_value `[rows, 2·F]` holds g and v side by side. Not GATED: `activation(g)` of `[rows, F]`."""
    row = tl.program_id(0).to(tl.int64)
    row_count = tl.load(counts + counted)
    wait_for_previous(DEPENDENT)
    if row >= row_count:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < WIDTH
    source = gate_value + row * (2 * WIDTH if GATED else WIDTH) + columns
    g = tl.load(source, mask=there).to(tl.float32)
    result = activated(g, ACTIVATION)
    if GATED:
        result *= tl.load(source + WIDTH, mask=there).to(tl.float32)
    tl.store(out + row * WIDTH + columns, result.to(out.dtype.element_ty), mask=there)


@triton.jit
def state_of(counts, request):
    """Where the state of a request starts, counted from a tensor of the same type, its length and its capacity: `StepArrays`."""
    slot = counts - _RECORD * (request + 1)
    start = tl.load((slot + 4).to(tl.pointer_type(tl.int64)))
    return tl.multiple_of(start, 16), tl.load(slot + 6), tl.load(slot + 7)


@triton.jit
def store_halves(target, first, second, there, HALF: tl.constexpr):
    """Stores the two halves of each head, HALF elements apart."""
    tl.store(target, first, mask=there)
    tl.store(target + HALF, second, mask=there)


@triton.jit
def turned(first, second, cos, sin):
    """`x1·cos − x2·sin`, `x2·cos + x1·sin`; explicit fma fixes the rounding, so that all kernels give the same bits."""
    return tl.fma(first, cos, -(second * sin)), tl.fma(second, cos, first * sin)


@triton.jit
def rotate_heads(source, cos, sin, there, HALF: tl.constexpr):
    """Turn the pairs `(x1, x2) = (source, source + HALF)` in place: `x1·cos − x2·sin`, `x2·cos + x1·sin`; returns both."""
    dtype: tl.constexpr = source.dtype.element_ty
    first = tl.load(source, mask=there).to(tl.float32)
    second = tl.load(source + HALF, mask=there).to(tl.float32)
    turned_first, turned_second = turned(first, second, cos, sin)
    turned_first, turned_second = turned_first.to(dtype), turned_second.to(dtype)
    store_halves(source, turned_first, turned_second, there, HALF)
    return turned_first, turned_second


@triton.jit(do_not_specialize=["layer", "counted"])
def rotate_rows(
    query, query_stride, key_value, key_value_stride, anchor, rope, rope_positions, counts, counted, layer,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, QUERY_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """RoPE (Su et al. 2021), half-split pairs: `x1 ← x1·cos − x2·sin`, `x2 ← x2·cos + x1·sin`, in place, in fp32.

    One program per row. `rope` fp32 `[2, rope_positions, K/2]`. QUERY_HEADS or KV_HEADS may be 0. The keys and values of
    context rows are also written to their request's state.
    """
    row = tl.program_id(0).to(tl.int64)
    is_there = row < tl.load(counts + counted)
    half: tl.constexpr = HEAD_WIDTH // 2
    columns = tl.arange(0, HALF_BLOCK)
    narrow = columns < half
    record = counts + _HEAD + row * _RECORD
    position = tl.load(record + 4, mask=is_there, other=0)
    cos = tl.load(rope + position * half + columns, mask=narrow)[None, :]
    sin = tl.load(rope + (rope_positions + position) * half + columns, mask=narrow)[None, :]
    wait_for_previous(DEPENDENT)
    if not is_there:
        return
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
        place = tl.load(record + 7)
        if place >= 0:
            start, _, capacity = state_of(counts, tl.load(record + 6))
            target = anchor + start + (layer.to(tl.int64) * 2 * capacity + place) * token + inner
            store_halves(target, turned_first, turned_second, there, half)
            value_first, value_second = tl.load(source + token, mask=there), tl.load(source + token + half, mask=there)
            store_halves(target + capacity.to(tl.int64) * token, value_first, value_second, there, half)
