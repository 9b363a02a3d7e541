"""Triton: tokens from embedding rows and features, gathered inside the projection. Launched by `model.split.kernels.fused`."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def history_inputs(
    rows,
    there,
    columns,
    narrow,
    actions,
    action_weights,
    dwell,
    dwell_input,
    dwell_output,
    WIDTH: tl.constexpr,
    ACTIONS: tl.constexpr,
    HAS_DWELL: tl.constexpr,
    DWELL_WIDTH: tl.constexpr,
):
    """What actions and dwell seconds add to history tokens: `(2a − 1) @ W` unless no action is set, `gelu(s/30 · in) @ out`."""
    total = tl.zeros([rows.shape[0], columns.shape[0]], tl.float32)
    acted = tl.zeros([rows.shape[0]], tl.int32)
    for action in range(0, ACTIONS):
        value = tl.load(actions + rows * ACTIONS + action, mask=there, other=0.0)
        acted = acted | (value != 0.0).to(tl.int32)
        weight = tl.load(action_weights + action * WIDTH + columns, mask=narrow, other=0.0)
        total += (2.0 * value - 1.0)[:, None] * weight[None, :]
    total = tl.where((acted != 0)[:, None], total, 0.0)
    if HAS_DWELL:
        seconds = tl.load(dwell + rows, mask=there, other=0.0)
        fraction = tl.minimum(tl.maximum(seconds, 0.0), 30.0) / 30.0
        for hidden in range(0, DWELL_WIDTH):
            h = fraction * tl.load(dwell_input + hidden)
            h = h / (1.0 + tl.exp(-1.5957691216057308 * (h + 0.044715 * h * h * h)))  # tanh gelu, see rows.gate_rows
            weight = tl.load(dwell_output + hidden * WIDTH + columns, mask=narrow, other=0.0)
            total += h[:, None] * weight[None, :]
    return total


@triton.jit
def embed_tiles(
    table,
    slot_offsets,
    projection,
    surfaces,
    ages,
    action_weights,
    dwell_input,
    dwell_output,
    out,
    counts,
    token_tiles,
    embedding_rows,
    features,
    actions,
    dwell,
    TILE_COUNT: tl.constexpr,
    ENTITY_SLOTS: tl.constexpr,
    USER_SLOTS: tl.constexpr,
    ROW_SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SURFACES: tl.constexpr,
    ACTIONS: tl.constexpr,
    HAS_AGES: tl.constexpr,
    HAS_DWELL: tl.constexpr,
    DWELL_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
):
    """`token = concat(embeddings) @ projection + small inputs`, spec section 2; embedding row 0 reads as zero.

    One program a tile of rows of one kind (0 candidate, 1 history, 2 user) and TILE_OUT columns. Embedding j of a post is
    row `embedding_rows[row, j]` of the table that starts `slot_offsets[j]` elements after `table`; a user's offsets follow
    those of a post. The small inputs come multiplied with their rows of the projection: surfaces `[2, surfaces, D]`, ages
    `[buckets, D]`, actions `(2a − 1) @ [A, D]` unless none is set, dwell `gelu(clip(s, 0, 30)/30 · in) @ [64, D]`.
    """
    tile = tl.program_id(1)
    if tile >= tl.load(counts + TILE_COUNT):
        return
    in_tile = tl.arange(0, TILE_ROWS)
    rows = (tl.load(token_tiles + tile * 4) + in_tile).to(tl.int64)
    there = in_tile < tl.load(token_tiles + tile * 4 + 1)
    kind = tl.load(token_tiles + tile * 4 + 2)
    columns = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    narrow = columns < WIDTH
    inner = tl.arange(0, TILE_IN)
    slots = tl.where(kind == 2, USER_SLOTS, ENTITY_SLOTS)
    first_slot = tl.where(kind == 2, ENTITY_SLOTS, 0)
    total = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
    for slot in range(0, slots):
        row = tl.load(embedding_rows + rows * ROW_SLOTS + slot, mask=there, other=0)
        start = tl.multiple_of(tl.load(slot_offsets + first_slot + slot), 16)
        source = table + start + row.to(tl.int64)[:, None] * WIDTH
        right = projection + (kind * ENTITY_SLOTS + slot).to(tl.int64) * (WIDTH * WIDTH)
        for first in range(0, WIDTH, TILE_IN):
            within = first + inner < WIDTH
            a = tl.load(source + (first + inner)[None, :], mask=(row != 0)[:, None] & within[None, :], other=0.0)
            w = tl.load(
                right + (first + inner)[:, None] * WIDTH + columns[None, :],
                mask=within[:, None] & narrow[None, :],
                other=0.0,
            )
            total = tl.dot(a.to(tl.float32), w, total, input_precision=PRECISION)
    if kind < 2:
        surface = tl.load(features + rows * 2, mask=there, other=0) + kind * SURFACES
        total += tl.load(surfaces + surface[:, None] * WIDTH + columns[None, :], mask=narrow[None, :], other=0.0)
    if HAS_AGES:  # noqa: SIM102 (decided when compiling; the inner one on the device)
        if kind == 0:
            age = tl.load(features + rows * 2 + 1, mask=there, other=0)
            total += tl.load(ages + age[:, None] * WIDTH + columns[None, :], mask=narrow[None, :], other=0.0)
    if kind == 1:
        total += history_inputs(
            rows, there, columns, narrow, actions, action_weights, dwell, dwell_input, dwell_output,
            WIDTH, ACTIONS, HAS_DWELL, DWELL_WIDTH,
        )  # fmt: skip
    target = out + rows[:, None] * WIDTH + columns[None, :]
    tl.store(target, total, mask=there[:, None] & narrow[None, :])
