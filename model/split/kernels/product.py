"""Triton: the matrix product with fixed tiles, in which no row can influence another. Sizes are arguments, so that weights of all
shapes share a binary.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """The definition: `x @ weight`, `[M, in]` by `[in, out]`, accumulated in fp32."""
    return x.float() @ weight.float()


@triton.jit
def multiply_inner(
    left, right, there, wide, depth, stride, WHOLE_IN: tl.constexpr, WHOLE_OUT: tl.constexpr, PRECISION: tl.constexpr,
    WIDEN: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr,
):  # fmt: skip
    """`Σ left · right` in fp32 over `depth` inner elements, TILE_IN at a time from the first: the order of additions is the same
    for every row and for every number of rows.

    left: where each row that is `there` starts, `[TILE_ROWS, 1]`; right: where each `wide` column starts, `[1, TILE_OUT]`, with
    rows `stride` elements apart. WHOLE_IN, WHOLE_OUT: tiles divide both axes. WIDEN is for the
    interpreter, which cannot multiply bf16.
    """
    inner = tl.arange(0, TILE_IN)
    left += inner[None, :]
    right += inner.to(tl.int64)[:, None] * stride
    total = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
    for start in range(0, depth, TILE_IN):
        if WHOLE_IN:
            a = tl.load(left, mask=there[:, None])
        else:
            a = tl.load(left, mask=there[:, None] & (start + inner < depth)[None, :], other=0.0)
        if WHOLE_IN and WHOLE_OUT:  # noqa: SIM108 (the choice is the compiler's)
            b = tl.load(right)
        else:
            b = tl.load(right, mask=(start + inner < depth)[:, None] & wide[None, :], other=0.0)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        left += TILE_IN
        right += TILE_IN * stride
    return total


@triton.jit(do_not_specialize=["counted"])
def multiply_tiles(
    x, weight, out, counts, counted, inner, out_columns, x_stride, out_stride, WHOLE_IN: tl.constexpr,
    WHOLE_OUT: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
):  # fmt: skip
    """`out = x @ weight`, accumulated in fp32. x `[rows, inner]`, weight `[inner, out_columns]` contiguous.

    One program per tile of the result, over the whole inner axis. Tiles past `counts[counted]` rows end at once.
    """
    row_count = tl.load(counts + counted)
    row_tile = tl.program_id(1)
    if row_tile * TILE_ROWS >= row_count:
        return
    rows = (row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    columns = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    there, wide = rows < row_count, columns < out_columns
    total = multiply_inner(
        x + rows[:, None] * x_stride, weight + columns[None, :], there, wide, inner, out_columns,
        WHOLE_IN, WHOLE_OUT, PRECISION, WIDEN, TILE_ROWS, TILE_OUT, TILE_IN,
    )  # fmt: skip
    target = out + rows[:, None] * out_stride + columns[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=there[:, None] & wide[None, :])
