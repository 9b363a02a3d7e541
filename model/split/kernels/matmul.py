"""Triton: a matrix product with fixed tiles, in which no row can influence another. Launched by `model.split.kernels.fused`."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl


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
):
    """`out = x @ weight`, accumulated in fp32. x `[rows, IN]`, weight `[IN, OUT]` contiguous.

    One program a tile of the result, the whole of IN in it, in steps of TILE_IN from the first: the order of additions is
    the same for every row and for every number of rows. Tiles past `counts[ROW_COUNT]` end at once. WIDEN is for the
    interpreter, which cannot multiply bf16.
    """
    row_tile = tl.program_id(1)
    row_count = tl.load(counts + ROW_COUNT)
    if row_tile * TILE_ROWS >= row_count:
        return
    rows = (row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    columns = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    inner = tl.arange(0, TILE_IN)
    there = rows < row_count
    left = x + rows[:, None] * x_stride + inner[None, :]
    right = weight + inner.to(tl.int64)[:, None] * OUT + columns[None, :]
    total = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
    for first in range(0, IN, TILE_IN):
        if IN % TILE_IN == 0:
            a = tl.load(left, mask=there[:, None], other=0.0)
        else:
            a = tl.load(left, mask=there[:, None] & (first + inner < IN)[None, :], other=0.0)
        if IN % TILE_IN == 0 and OUT % TILE_OUT == 0:
            b = tl.load(right)
        else:
            b = tl.load(right, mask=(first + inner < IN)[:, None] & (columns < OUT)[None, :], other=0.0)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        left += TILE_IN
        right += TILE_IN * OUT
    target = out + rows[:, None] * out_stride + columns[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=there[:, None] & (columns < OUT)[None, :])
