"""Triton: matrix products that go on with what follows them, the gate or RoPE. Launched by `model.split.kernels.fusion`."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from model.split.kernels.attention import turned
from model.split.kernels.order import wait_for_previous
from model.split.kernels.rows import activated
from model.split.step import COUNTS, RECORD

_HEAD, _RECORD = tl.constexpr(COUNTS), tl.constexpr(RECORD)


@triton.jit
def multiply_pairs(
    x,
    weight,
    rows,
    columns,
    row_count,
    x_stride,
    STRIDE: tl.constexpr,
    APART: tl.constexpr,
    IN: tl.constexpr,
    WHOLE_OUT: tl.constexpr,
    wide,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
):
    """`x @ weight` for pairs of columns, `columns` and those APART from them, each added up as by `matmul.multiply_inner` and
    rounded to DTYPE as where it is stored in between: the bits are those of separate kernels."""
    inner = tl.arange(0, TILE_IN)
    left = x + rows[:, None] * x_stride + inner[None, :]
    right = weight + inner.to(tl.int64)[:, None] * STRIDE + columns[None, :]
    there = (rows < row_count)[:, None]
    first = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
    second = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
    for start in range(0, IN, TILE_IN):
        if IN % TILE_IN == 0:
            a = tl.load(left, mask=there, other=0.0)
        else:
            a = tl.load(left, mask=there & (start + inner < IN)[None, :], other=0.0)
        if IN % TILE_IN == 0 and WHOLE_OUT:
            b = tl.load(right)
            c = tl.load(right + APART)
        else:
            inside = (start + inner < IN)[:, None] & wide[None, :]
            b = tl.load(right, mask=inside, other=0.0)
            c = tl.load(right + APART, mask=inside, other=0.0)
        if WIDEN:
            a, b, c = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32)
        first = tl.dot(a, b, first, input_precision=PRECISION)
        second = tl.dot(a, c, second, input_precision=PRECISION)
        left += TILE_IN
        right += TILE_IN * STRIDE
    return first.to(DTYPE).to(tl.float32), second.to(DTYPE).to(tl.float32)


@triton.jit
def multiply_gate_tiles(
    x,
    weight,
    out,
    counts,
    x_stride,
    ROW_COUNT: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`out = activation(g) · v`, `[g, v] = x @ weight`; x `[rows, IN]`, weight `[IN, 2·OUT]`, out `[rows, OUT]`. See `rows.gate_rows`."""
    wait_for_previous(DEPENDENT)
    row_tile = tl.program_id(1)
    row_count = tl.load(counts + ROW_COUNT)
    if row_tile * TILE_ROWS >= row_count:
        return
    rows = (row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    columns = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    wide = columns < OUT
    dtype: tl.constexpr = out.dtype.element_ty
    gate, value = multiply_pairs(
        x, weight, rows, columns, row_count, x_stride, 2 * OUT, OUT, IN, OUT % TILE_OUT == 0, wide,
        dtype, PRECISION, WIDEN, TILE_ROWS, TILE_OUT, TILE_IN,
    )  # fmt: skip
    result = activated(gate, ACTIVATION) * value
    target = out + rows[:, None] * OUT + columns[None, :]
    tl.store(target, result.to(dtype), mask=(rows < row_count)[:, None] & wide[None, :])


@triton.jit(do_not_specialize=["layer"])
def multiply_rotate_tiles(
    x,
    weight,
    out,
    anchor,
    rope,
    rope_positions,
    counts,
    layer,
    x_stride,
    out_stride,
    ROW_COUNT: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`out = x @ weight`, queries and keys turned and the keys and values of context rows also written to their request's state:
    see `attention.rotate_rows`. weight `[IN, OUT]` makes QUERY_HEADS queries and KV_HEADS keys and values, either may be 0.

    One program a tile of rows and of TILE_OUT pairs of columns, half a head apart.
    """
    wait_for_previous(DEPENDENT)
    row_tile = tl.program_id(1)
    row_count = tl.load(counts + ROW_COUNT)
    if row_tile * TILE_ROWS >= row_count:
        return
    half: tl.constexpr = HEAD_WIDTH // 2
    dtype: tl.constexpr = out.dtype.element_ty
    rows = (row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    pairs = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    wide, head, within = pairs < OUT // 2, pairs // half, pairs % half
    columns = head * HEAD_WIDTH + within
    first, second = multiply_pairs(
        x, weight, rows, columns, row_count, x_stride, OUT, half, IN, OUT // 2 % TILE_OUT == 0, wide,
        dtype, PRECISION, WIDEN, TILE_ROWS, TILE_OUT, TILE_IN,
    )  # fmt: skip
    there = (rows < row_count)[:, None] & wide[None, :]
    record = counts + _HEAD + rows * _RECORD
    position = tl.load(record + 4, mask=rows < row_count, other=0)
    angle = rope + position[:, None] * half + within[None, :]
    cos = tl.load(angle, mask=there, other=0.0)
    sin = tl.load(angle + rope_positions * half, mask=there, other=0.0)
    turned_first, turned_second = turned(first, second, cos, sin)
    is_value = (head >= QUERY_HEADS + KV_HEADS)[None, :]
    first = tl.where(is_value, first, turned_first).to(dtype)
    second = tl.where(is_value, second, turned_second).to(dtype)
    target = out + rows[:, None] * out_stride + columns[None, :]
    tl.store(target, first, mask=there)
    tl.store(target + half, second, mask=there)
    if KV_HEADS > 0:  # noqa: SIM102 (decided when compiling; the inner one on the device)
        if (tl.program_id(0) + 1) * TILE_OUT > QUERY_HEADS * half:
            token: tl.constexpr = KV_HEADS * HEAD_WIDTH
            place = tl.load(record + 7, mask=rows < row_count, other=-1)
            kept = place >= 0
            slot = counts - _RECORD * (tl.load(record + 6, mask=kept, other=0) + 1)
            start = tl.multiple_of(tl.load((slot + 4).to(tl.pointer_type(tl.int64)), mask=kept, other=0), 16)
            capacity = tl.load(slot + 7, mask=kept, other=0).to(tl.int64)
            first_key = start + (layer.to(tl.int64) * 2 * capacity + place) * token
            later = tl.where(is_value, capacity[:, None] * token - token, 0)
            inner = columns[None, :] - QUERY_HEADS * HEAD_WIDTH
            kept_here = kept[:, None] & there & (inner >= 0)
            stored = anchor + first_key[:, None] + later + inner
            tl.store(stored, first, mask=kept_here)
            tl.store(stored + half, second, mask=kept_here)
