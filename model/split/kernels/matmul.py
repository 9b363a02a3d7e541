"""Triton: matrix products with fixed tiles, in which no row can influence another, alone or fused with the gate or RoPE that follows.

Sizes are arguments, not constants, so that weights of all shapes share a binary. Launched by `model.split.kernels.fused`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from model.split.kernels.order import fetch_ahead, wait_for_previous
from model.split.kernels.rows import activated, turned
from model.split.step import COUNTS, RECORD

_HEAD, _RECORD = tl.constexpr(COUNTS), tl.constexpr(RECORD)


@triton.jit
def multiply_inner(
    left, right, apart, there, wide, depth, stride, PAIRED: tl.constexpr, WHOLE_IN: tl.constexpr,
    WHOLE_OUT: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr,
):  # fmt: skip
    """`Σ left · right` in fp32 over `depth` inner elements, TILE_IN at a time from the first: the order of additions is the same
    for every row and for every number of rows. PAIRED: also for the columns `apart` from those; else the second result is zeros.

    left: where each row that is `there` starts, `[TILE_ROWS, 1]`; right: where each `wide` column starts, `[1, TILE_OUT]`, with
    rows `stride` elements apart. WHOLE_IN, WHOLE_OUT: tiles divide both axes. WIDEN is for the
    interpreter, which cannot multiply bf16.
    """
    inner = tl.arange(0, TILE_IN)
    left += inner[None, :]
    right += inner.to(tl.int64)[:, None] * stride
    first = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
    second = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
    for start in range(0, depth, TILE_IN):
        inside = (start + inner < depth)[:, None] & wide[None, :]
        if WHOLE_IN:
            a = tl.load(left, mask=there[:, None])
        else:
            a = tl.load(left, mask=there[:, None] & (start + inner < depth)[None, :], other=0.0)
        if WHOLE_IN and WHOLE_OUT:  # noqa: SIM108 (the choice is the compiler's)
            b = tl.load(right)
        else:
            b = tl.load(right, mask=inside, other=0.0)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        first = tl.dot(a, b, first, input_precision=PRECISION)
        if PAIRED:
            if WHOLE_IN and WHOLE_OUT:  # noqa: SIM108
                c = tl.load(right + apart)
            else:
                c = tl.load(right + apart, mask=inside, other=0.0)
            if WIDEN:
                c = c.to(tl.float32)
            second = tl.dot(a, c, second, input_precision=PRECISION)
        left += TILE_IN
        right += TILE_IN * stride
    return first, second


@triton.jit(do_not_specialize=["counted"])
def multiply_tiles(
    x, weight, out, counts, counted, inner, out_columns, x_stride, out_stride, WHOLE_IN: tl.constexpr,
    WHOLE_OUT: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`out = x @ weight`, accumulated in fp32. x `[rows, inner]`, weight `[inner, out_columns]` contiguous.

    One program per tile of the result, over the whole inner axis. Tiles past `counts[counted]` rows end at once.
    """
    row_count = tl.load(counts + counted)
    first_column = tl.program_id(0) * TILE_OUT
    fetch_ahead(weight, first_column, inner, out_columns, TILE_OUT, TILE_IN, DEPENDENT)
    wait_for_previous(DEPENDENT)
    row_tile = tl.program_id(1)
    if row_tile * TILE_ROWS >= row_count:
        return
    rows = (row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    columns = first_column + tl.arange(0, TILE_OUT)
    there, wide = rows < row_count, columns < out_columns
    total, _ = multiply_inner(
        x + rows[:, None] * x_stride, weight + columns[None, :], 0, there, wide, inner, out_columns,
        False, WHOLE_IN, WHOLE_OUT, PRECISION, WIDEN, TILE_ROWS, TILE_OUT, TILE_IN,
    )  # fmt: skip
    target = out + rows[:, None] * out_stride + columns[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=there[:, None] & wide[None, :])


@triton.jit(do_not_specialize=["counted"])
def multiply_gate_tiles(
    x, weight, out, counts, counted, inner, out_columns, x_stride, ACTIVATION: tl.constexpr, WHOLE_IN: tl.constexpr,
    WHOLE_OUT: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`out = activation(g) · v`, `[g, v] = x @ weight`; x `[rows, inner]`, weight `[inner, 2·out_columns]`, out
    `[rows, out_columns]`. See `rows.gate_rows`; products are rounded as if they were stored in between, so the bits are
    those of separate kernels."""
    row_count = tl.load(counts + counted)
    first_column = tl.program_id(0) * TILE_OUT
    fetch_ahead(weight, first_column, inner, 2 * out_columns, TILE_OUT, TILE_IN, DEPENDENT)
    fetch_ahead(weight, out_columns + first_column, inner, 2 * out_columns, TILE_OUT, TILE_IN, DEPENDENT)
    wait_for_previous(DEPENDENT)
    row_tile = tl.program_id(1)
    if row_tile * TILE_ROWS >= row_count:
        return
    rows = (row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    columns = first_column + tl.arange(0, TILE_OUT)
    there, wide = rows < row_count, columns < out_columns
    dtype: tl.constexpr = out.dtype.element_ty
    gate, value = multiply_inner(
        x + rows[:, None] * x_stride, weight + columns[None, :], out_columns, there, wide, inner, 2 * out_columns,
        True, WHOLE_IN, WHOLE_OUT, PRECISION, WIDEN, TILE_ROWS, TILE_OUT, TILE_IN,
    )  # fmt: skip
    result = activated(gate.to(dtype).to(tl.float32), ACTIVATION) * value.to(dtype).to(tl.float32)
    target = out + rows[:, None] * out_columns + columns[None, :]
    tl.store(target, result.to(dtype), mask=there[:, None] & wide[None, :])


@triton.jit
def keep_pairs(
    first, second, anchor, counts, record, layer, there, is_value, columns, wanted, token, HALF: tl.constexpr
):  # fmt: skip
    """Stores pairs of keys and values, at these columns of a token, in the states of the rows that belong to a context."""
    place = tl.load(record + 7, mask=there, other=-1)
    kept = place >= 0
    slot = counts - _RECORD * (tl.load(record + 6, mask=kept) + 1)
    start = tl.multiple_of(tl.load((slot + 4).to(tl.pointer_type(tl.int64)), mask=kept), 16)
    capacity = tl.load(slot + 7, mask=kept).to(tl.int64)
    first_key = start + (layer.to(tl.int64) * 2 * capacity + place) * token
    later = tl.where(is_value, capacity[:, None] * token - token, 0)
    stored = anchor + first_key[:, None] + later + columns
    tl.store(stored, first, mask=kept[:, None] & wanted)
    tl.store(stored + HALF, second, mask=kept[:, None] & wanted)


@triton.jit(do_not_specialize=["layer", "counted", "query_heads", "kv_heads"])
def multiply_rotate_tiles(
    x, weight, out, anchor, rope, rope_positions, counts, layer, counted, inner, out_columns, x_stride, out_stride,
    query_heads, kv_heads, HEAD_WIDTH: tl.constexpr, WHOLE_IN: tl.constexpr, WHOLE_OUT: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`out = x @ weight`, with queries and keys rotated; the keys and values of context rows are also written to their request's
    state: see `rows.rotate_rows`. weight `[inner, out_columns]` makes queries, keys and values; either number of heads may be 0.

    One program per tile of rows and of TILE_OUT pairs of columns, half a head apart; rounded as in `multiply_gate_tiles`.
    """
    half: tl.constexpr = HEAD_WIDTH // 2
    dtype: tl.constexpr = out.dtype.element_ty
    row_count = tl.load(counts + counted)
    row_tile = tl.program_id(1)
    rows = (row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    pairs = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    there, wide, head, within = rows < row_count, pairs < out_columns // 2, pairs // half, pairs % half
    columns = head * HEAD_WIDTH + within
    first_column = tl.program_id(0) * TILE_OUT // half * HEAD_WIDTH + tl.program_id(0) * TILE_OUT % half
    fetch_ahead(weight, first_column, inner, out_columns, TILE_OUT, TILE_IN, DEPENDENT)
    fetch_ahead(weight, first_column + half, inner, out_columns, TILE_OUT, TILE_IN, DEPENDENT)
    wait_for_previous(DEPENDENT)
    if row_tile * TILE_ROWS >= row_count:
        return
    first, second = multiply_inner(
        x + rows[:, None] * x_stride, weight + columns[None, :], half, there, wide, inner, out_columns,
        True, WHOLE_IN, WHOLE_OUT, PRECISION, WIDEN, TILE_ROWS, TILE_OUT, TILE_IN,
    )  # fmt: skip
    first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    record = counts + _HEAD + rows * _RECORD
    position = tl.load(record + 4, mask=there)
    stored_here = there[:, None] & wide[None, :]
    angle = rope + position[:, None] * half + within[None, :]
    cos = tl.load(angle, mask=stored_here)
    sin = tl.load(angle + rope_positions * half, mask=stored_here)
    turned_first, turned_second = turned(first, second, cos, sin)
    is_value = (head >= query_heads + kv_heads)[None, :]
    first = tl.where(is_value, first, turned_first).to(dtype)
    second = tl.where(is_value, second, turned_second).to(dtype)
    target = out + rows[:, None] * out_stride + columns[None, :]
    tl.store(target, first, mask=stored_here)
    tl.store(target + half, second, mask=stored_here)
    if (kv_heads > 0) & ((tl.program_id(0) + 1) * TILE_OUT > query_heads * half):
        inner_columns = columns[None, :] - query_heads * HEAD_WIDTH
        keep_pairs(
            first, second, anchor, counts, record, layer, there, is_value, inner_columns,
            stored_here & (inner_columns >= 0), kv_heads * HEAD_WIDTH, half,
        )  # fmt: skip
