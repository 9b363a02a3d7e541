"""Triton: operations on one row at a time, norms with their residual addition and the activation with its gate. Launched by `fused`."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from model.split.kernels.order import wait_for_previous


@triton.jit
def normed(x, scale, bias, columns, there, epsilon, WIDTH: tl.constexpr, CENTRED: tl.constexpr):
    """`scale · x / sqrt(mean(x²) + ε)` (Zhang and Sennrich 2019); CENTRED: of `x − mean(x)`, plus a bias (Ba et al. 2016)."""
    if CENTRED:
        x = tl.where(there, x - tl.sum(x, 0) / WIDTH, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
    x *= tl.load(scale + columns, mask=there, other=0.0)
    if CENTRED:
        x += tl.load(bias + columns, mask=there, other=0.0)
    return x


@triton.jit
def norm_rows(
    mixed,
    post_scale,
    post_bias,
    residual,
    scale,
    bias,
    out,
    counts,
    epsilon,
    ROW_COUNT: tl.constexpr,
    HAS_MIXED: tl.constexpr,
    HAS_POST: tl.constexpr,
    CENTRED: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`r ← r + post(m)`, then `out = norm(r)`; see `normed`. Without HAS_POST `r ← r + m`, without HAS_MIXED not even that.
    residual fp32 `[rows, D]` in place.

    One program a row: a row's sums are always taken in the same order.
    """
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(counts + ROW_COUNT):
        return
    columns = tl.arange(0, WIDTH_BLOCK)
    there = columns < WIDTH
    wide = tl.load(residual + row * WIDTH + columns, mask=there, other=0.0)
    if HAS_MIXED:
        m = tl.load(mixed + row * WIDTH + columns, mask=there, other=0.0).to(tl.float32)
        if HAS_POST:
            m = normed(m, post_scale, post_bias, columns, there, epsilon, WIDTH, CENTRED)
        wide += m
        tl.store(residual + row * WIDTH + columns, wide, mask=there)
    result = normed(wide, scale, bias, columns, there, epsilon, WIDTH, CENTRED)
    tl.store(out + row * WIDTH + columns, result.to(out.dtype.element_ty), mask=there)


@triton.jit
def norm_head_rows(
    x,
    x_stride,
    scale,
    counts,
    epsilon,
    ROW_COUNT: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """RMSNorm in place of each head of a row, scale `[K]`. One program a row and head."""
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(counts + ROW_COUNT):
        return
    columns = tl.arange(0, HEAD_BLOCK)
    there = columns < HEAD_WIDTH
    place = x + row * x_stride + tl.program_id(1) * HEAD_WIDTH + columns
    wide = tl.load(place, mask=there, other=0.0).to(tl.float32)
    result = normed(wide, scale, scale, columns, there, epsilon, HEAD_WIDTH, False)
    tl.store(place, result.to(x.dtype.element_ty), mask=there)


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


@triton.jit
def gate_rows(
    gate_value,
    out,
    counts,
    ROW_COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`out = activation(g) · v`; gate_value `[rows, 2·F]` holds g and v side by side. Not GATED: `activation(g)` of `[rows, F]`."""
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(counts + ROW_COUNT):
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < WIDTH
    source = gate_value + row * (2 * WIDTH if GATED else WIDTH) + columns
    g = tl.load(source, mask=there, other=0.0).to(tl.float32)
    result = activated(g, ACTIVATION)
    if GATED:
        result *= tl.load(source + WIDTH, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, result.to(out.dtype.element_ty), mask=there)
