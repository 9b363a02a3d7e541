"""Triton: operations on one row at a time, RMSNorm with its residual addition and the gated GELU. Launched by `fused`."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_rows(
    mixed,
    post_scale,
    residual,
    scale,
    out,
    counts,
    epsilon,
    ROW_COUNT: tl.constexpr,
    HAS_MIXED: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
):
    """`r ← r + post_scale · m / rms(m)`, then `out = scale · r / rms(r)`, `rms(x) = sqrt(mean(x²) + ε)` (Zhang and Sennrich
    2019; the sandwich of spec section 1). residual fp32 `[rows, D]` in place; the first half only if HAS_MIXED.

    One program a row: a row's sum is always taken in the same order.
    """
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(counts + ROW_COUNT):
        return
    columns = tl.arange(0, WIDTH_BLOCK)
    there = columns < WIDTH
    wide = tl.load(residual + row * WIDTH + columns, mask=there, other=0.0)
    if HAS_MIXED:
        m = tl.load(mixed + row * WIDTH + columns, mask=there, other=0.0).to(tl.float32)
        m = m * tl.rsqrt(tl.sum(m * m, 0) / WIDTH + epsilon)
        wide += m * tl.load(post_scale + columns, mask=there, other=0.0)
        tl.store(residual + row * WIDTH + columns, wide, mask=there)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + epsilon)
    normed *= tl.load(scale + columns, mask=there, other=0.0)
    tl.store(out + row * WIDTH + columns, normed.to(out.dtype.element_ty), mask=there)


@triton.jit
def gate_rows(gate_value, out, counts, ROW_COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """`out = gelu(g) · v`, tanh approximation (Hendrycks and Gimpel 2016): `gelu(g) = g / (1 + exp(−2u))`,
    `u = sqrt(2/π) · (g + 0.044715 g³)`. gate_value `[rows, 2·F]` holds g and v side by side; out `[rows, F]`.
    """
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(counts + ROW_COUNT):
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < WIDTH
    source = gate_value + row * (2 * WIDTH) + columns
    g = tl.load(source, mask=there, other=0.0).to(tl.float32)
    v = tl.load(source + WIDTH, mask=there, other=0.0).to(tl.float32)
    inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
    tl.store(out + row * WIDTH + columns, (g / (1.0 + tl.exp(-2.0 * inner)) * v).to(out.dtype.element_ty), mask=there)
