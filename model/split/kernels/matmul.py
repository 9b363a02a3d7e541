"""Triton: a matrix product with fixed tiles, in which no row can influence another. Launched by `model.split.kernels.fused`."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from model.split.kernels.order import wait_for_previous


@triton.jit
def multiply_inner(
    left,
    right,
    there,
    wide,
    depth,
    STRIDE: tl.constexpr,
    WHOLE_IN: tl.constexpr,
    WHOLE_OUT: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
):
    """`Σ left · right` in fp32 over `depth` inner elements, TILE_IN at a time from the first: the order of additions is the same
    for every row and for every number of rows.

    left: where each of the rows starts, `[TILE_ROWS, 1]`, those that are `there`; right: where each of the `wide` columns does,
    `[1, TILE_OUT]`, STRIDE elements apart from row to row. WHOLE_IN, WHOLE_OUT: tiles divide both axes. WIDEN is for the
    interpreter, which cannot multiply bf16.
    """
    inner = tl.arange(0, TILE_IN)
    left += inner[None, :]
    right += inner.to(tl.int64)[:, None] * STRIDE
    total = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
    for first in range(0, depth, TILE_IN):
        if WHOLE_IN:
            a = tl.load(left, mask=there[:, None], other=0.0)
        else:
            a = tl.load(left, mask=there[:, None] & (first + inner < depth)[None, :], other=0.0)
        if WHOLE_IN and WHOLE_OUT:  # noqa: SIM108 (the choice is the compiler's)
            b = tl.load(right)
        else:
            b = tl.load(right, mask=(first + inner < depth)[:, None] & wide[None, :], other=0.0)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        left += TILE_IN
        right += TILE_IN * STRIDE
    return total


@triton.jit
def multiply_tiles(
    x,
    weight,
    out,
    counts,
    x_stride,
    out_stride,
    ROW_COUNT: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`out = x @ weight`, accumulated in fp32. x `[rows, IN]`, weight `[IN, OUT]` contiguous.

    One program a tile of the result, the whole of IN in it. Tiles past `counts[ROW_COUNT]` end at once.
    """
    wait_for_previous(DEPENDENT)
    row_tile = tl.program_id(1)
    row_count = tl.load(counts + ROW_COUNT)
    if row_tile * TILE_ROWS >= row_count:
        return
    rows = (row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    columns = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    there, wide = rows < row_count, columns < OUT
    total = multiply_inner(
        x + rows[:, None] * x_stride, weight + columns[None, :],
        there, wide, IN, OUT, IN % TILE_IN == 0, OUT % TILE_OUT == 0, PRECISION, WIDEN, TILE_ROWS, TILE_OUT, TILE_IN,
    )  # fmt: skip
    target = out + rows[:, None] * out_stride + columns[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=there[:, None] & wide[None, :])
