"""Triton: tokens, as inputs gathered from the embedding tables and then multiplied. Their definition is `model.ranker.TokenBuilder`."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from model.split.kernels.fields import AGE, AUTHOR, POST, ROW_WORDS, SURFACE, id_of
from model.split.kernels.product import multiply_inner
from model.split.step import COUNTS, word

_ROWS, _CANDIDATES, _FIRST_USER = (tl.constexpr(word(COUNTS, name)) for name in ("rows", "candidates", "first_user"))


@triton.jit
def hashed_row(id, function):
    """A table's row under one hash function, int64 `[scale, bias, modulus, rows − 1]`; see `model.batch.hash_rows`."""
    modulus = tl.load(function + 2)
    raw = (id * tl.load(function) + tl.load(function + 1)) % modulus  # wraps; the sign is the dividend's
    raw = tl.where(raw < 0, raw + modulus, raw)
    return tl.where(id == 0, 0, raw % tl.load(function + 3) + 1)


@triton.jit
def small_inputs(
    target, features, dwell_input, ACTIONS: tl.constexpr, DWELL_WIDTH: tl.constexpr, SMALL: tl.constexpr,
    SMALL_BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores the SMALL inputs of a history item from its actions and, where DWELL_WIDTH is not 0, its dwell seconds, which follow them."""
    columns = tl.arange(0, SMALL_BLOCK)
    actions = tl.load(features + columns, mask=columns < ACTIONS, other=0.0)
    acted = tl.max((actions != 0.0).to(tl.int32), 0)
    small = tl.where((columns < ACTIONS) & (acted != 0), 2.0 * actions - 1.0, 0.0)
    if DWELL_WIDTH > 0:
        in_dwell = (columns >= ACTIONS) & (columns < ACTIONS + DWELL_WIDTH)
        fraction = tl.minimum(tl.maximum(tl.load(features + ACTIONS), 0.0), 30.0) / 30.0
        h = fraction * tl.load(dwell_input + columns - ACTIONS, mask=in_dwell)
        h = h / (1.0 + tl.exp(-1.5957691216057308 * (h + 0.044715 * h * h * h)))  # tanh gelu, see rows.activated
        small = tl.where(in_dwell, h, small)
    tl.store(target + columns, small.to(target.dtype.element_ty), mask=columns < SMALL)


@triton.jit
def gather_rows(
    table, slots, dwell_input, out, out_stride, counts, rows, history, POST_SLOTS: tl.constexpr, ENTITY_SLOTS: tl.constexpr,
    USER_SLOTS: tl.constexpr, ROW_SLOTS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, ACTIONS: tl.constexpr,
    DWELL_WIDTH: tl.constexpr, SMALL: tl.constexpr, SMALL_BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the inputs of tokens, see `TokenWeights`, to out `[rows, inputs]`; embedding row 0 reads as zero.

    One program per row and embedding, and one more for a history item's actions and dwell seconds (DWELL_WIDTH 0: none).
    slots int64 `[E + U, 5]`: where the embedding's table starts, in elements from `table`, and its hash function.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1)
    candidates = tl.load(counts + _CANDIDATES)
    if row >= tl.load(counts + _ROWS):
        return
    is_user = row >= tl.load(counts + _FIRST_USER)
    target = out + row * out_stride
    if slot < tl.where(is_user, USER_SLOTS, ENTITY_SLOTS):
        entry = slots + 5 * tl.where(is_user, ENTITY_SLOTS + slot, slot)
        is_author = (slot >= POST_SLOTS) & (is_user == 0)
        place = hashed_row(id_of(rows, row, tl.where(is_author, AUTHOR, POST)), entry + 1)
        columns = tl.arange(0, WIDTH_BLOCK)
        there = columns < WIDTH
        start = tl.multiple_of(tl.load(entry), 16)
        embedding = tl.load(table + start + place * WIDTH + columns, mask=there & (place != 0), other=0.0)
        tl.store(target + slot * WIDTH + columns, embedding.to(out.dtype.element_ty), mask=there)
    if (slot == ROW_SLOTS) & (row >= candidates) & (is_user == 0):
        features = history + (row - candidates) * (ACTIONS + 1)
        small_inputs(target + ENTITY_SLOTS * WIDTH, features, dwell_input, ACTIONS, DWELL_WIDTH, SMALL, SMALL_BLOCK)


@triton.jit
def tile_of_kind(counts, tile, TILE_ROWS: tl.constexpr):
    """First row, row after the last, and kind (0 candidate, 1 history, 2 user) of a tile, which holds rows of one kind."""
    candidates = tl.load(counts + _CANDIDATES)
    first_user = tl.load(counts + _FIRST_USER)
    candidate_tiles = tl.cdiv(candidates, TILE_ROWS)
    history_tiles = tl.cdiv(first_user - candidates, TILE_ROWS)
    kind = (tile >= candidate_tiles).to(tl.int32) + (tile >= candidate_tiles + history_tiles).to(tl.int32)
    before = tl.where(kind == 0, 0, tl.where(kind == 1, candidate_tiles, candidate_tiles + history_tiles))
    start = tl.where(kind == 0, 0, tl.where(kind == 1, candidates, first_user))
    stop = tl.where(kind == 0, candidates, tl.where(kind == 1, first_user, tl.load(counts + _ROWS)))
    return start + (tile - before) * TILE_ROWS, stop, kind


@triton.jit(do_not_specialize=["surface_count"])
def project_tiles(
    inputs, inputs_stride, projection, surfaces, ages, code_table, out, counts, rows, codes, candidate_in, history_in, user_in,
    out_columns, surface_count, WHOLE_IN: tl.constexpr, WHOLE_OUT: tl.constexpr, HAS_AGES: tl.constexpr,
    CODE_LEVELS: tl.constexpr, CODE_VALUES: tl.constexpr, PRECISION: tl.constexpr,
    WIDEN: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr,
):  # fmt: skip
    """`token = inputs @ projection of its kind + surface + age + codes`, see `TokenWeights`; out fp32 `[rows, D]`. CODE_LEVELS 0: no codes.

    One program per tile of rows of one kind and of columns, over the whole inner axis: see `product.multiply_tiles`.
    """
    first, stop, kind = tile_of_kind(counts, tl.program_id(1), TILE_ROWS)
    if first >= stop:
        return
    columns = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    skipped = tl.where(kind == 0, 0, tl.where(kind == 1, candidate_in, candidate_in + history_in))
    depth = tl.where(kind == 0, candidate_in, tl.where(kind == 1, history_in, user_in))
    places = (first + tl.arange(0, TILE_ROWS)).to(tl.int64)
    there, wide = places < stop, columns < out_columns
    total = multiply_inner(
        inputs + places[:, None] * inputs_stride, projection + skipped.to(tl.int64) * out_columns + columns[None, :], there,
        wide, depth, out_columns, WHOLE_IN, WHOLE_OUT, PRECISION, WIDEN, TILE_ROWS, TILE_OUT, TILE_IN,
    )  # fmt: skip
    record = rows + places * ROW_WORDS
    if kind < 2:
        surface = tl.load(record + SURFACE, mask=there, other=0) + kind * surface_count
        total += tl.load(surfaces + surface[:, None] * out_columns + columns[None, :], mask=wide[None, :])
    if HAS_AGES:  # noqa: SIM102 (decided when compiling; the inner one on the device)
        if kind == 0:
            age = tl.load(record + AGE, mask=there, other=0)
            total += tl.load(ages + age[:, None] * out_columns + columns[None, :], mask=wide[None, :])
    if CODE_LEVELS > 0:  # noqa: SIM102
        if kind < 2:
            for level in range(CODE_LEVELS):
                code = tl.load(codes + places * CODE_LEVELS + level, mask=there, other=0)
                code_row = kind * (CODE_LEVELS * CODE_VALUES) + level * CODE_VALUES + code - 1
                vector = code_table + code_row[:, None].to(tl.int64) * out_columns + columns[None, :]
                total += tl.load(vector, mask=(code != 0)[:, None] & wide[None, :], other=0.0)
    tl.store(out + places[:, None] * out_columns + columns[None, :], total, mask=there[:, None] & wide[None, :])
