"""Triton: attention of query tiles over the contexts of many requests. Launched by `model.split.kernels.fused`.

The cap bounds every logit, so a running maximum is kept only where FORM is `none` (Milakov and Gimelshein 2018). Keys are summed in
chunks, each separately, TILE_KEYS at a time: the order of additions depends on nothing but the row's own context.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from model.split.kernels.order import wait_for_previous
from model.split.kernels.rows import state_of
from model.split.step import RECORD

_RECORD = tl.constexpr(RECORD)


@triton.jit
def fast_tanh(x, EMULATED: tl.constexpr):
    """`tanh` in one instruction, within 2⁻¹¹ of its value. EMULATED: exact, then rounded to as few bits, for the interpreter."""
    if EMULATED:
        exact = 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)
        kept = exact * 8193.0  # Veltkamp's splitting at 2¹³ leaves 11 bits
        return kept - (kept - exact)
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def fast_exp2(x, EMULATED: tl.constexpr):
    """`2^x` in one instruction; results below 2⁻¹²⁶ become 0, but no weight under a cap is that small."""
    if EMULATED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def bounded_weight(
    products, FORM: tl.constexpr, SCALE: tl.constexpr, RISE: tl.constexpr, FALL: tl.constexpr, EMULATED: tl.constexpr
):  # fmt: skip
    """`exp(soft_cap(multiplier · x) − shift)` from raw products x.

    `fast_tanh`: SCALE = multiplier / cap, RISE = −shift · log2(e), FALL = cap · log2(e). `tanh`, for fp32 engines, with
    `tanh(y) = 1 − 2 / (exp(2y) + 1)`: SCALE = 2 · log2(e) · multiplier / cap, RISE = (cap − shift) · log2(e),
    FALL = 2 · cap · log2(e). Overflow of the inner exponential gives the right limit.
    """
    if FORM == "fast_tanh":
        return fast_exp2(RISE + fast_tanh(products * SCALE, EMULATED) * FALL, EMULATED)
    return tl.exp2(RISE - FALL / (tl.exp2(products * SCALE) + 1.0))


@triton.jit
def attend_keys(
    sums, q, keys, values, columns, seen, length, first, last, MASKED: tl.constexpr, TOKEN: tl.constexpr,
    HEAD_WIDTH: tl.constexpr, FORM: tl.constexpr, SCALE: tl.constexpr, RISE: tl.constexpr, FALL: tl.constexpr,
    PRECISION: tl.constexpr, EMULATED: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    """Adds keys `first … last − 1`, TILE_KEYS at a time, to `sums`: `Σ p` and `Σ p·v` of every row of q `[rows, width]`, and,
    where FORM is `none`, the maximum of `SCALE · q·k` that p is relative to; the sums are scaled down when it rises.

    MASKED: a row sees its first `seen[row]` of `length` keys; else it sees all keys of whole tiles. The keys of successive tokens
    lie TOKEN elements apart.
    """
    total, mixed, maximum = sums
    for first_key in range(first, last, TILE_KEYS):
        places = first_key + tl.arange(0, TILE_KEYS)
        stored = (columns < HEAD_WIDTH)[None, :]
        if MASKED:
            stored = stored & (places < length)[:, None]
            visible = (places[None, :] < seen[:, None]) & (places < length)[None, :]
        else:
            visible = (places >= 0)[None, :]
        address = places.to(tl.int64)[:, None] * TOKEN + columns[None, :]
        k = tl.load(keys + address, mask=stored, other=0.0).to(q.dtype)
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if FORM == "none":
            logits = tl.where(visible, products * SCALE, -1e30)
            higher = tl.maximum(maximum, tl.max(logits, 1))
            fade = tl.exp2(maximum - higher)
            total *= fade
            mixed *= fade[:, None]
            weight = tl.exp2(logits - higher[:, None])
            maximum = higher
        else:
            weight = bounded_weight(products, FORM, SCALE, RISE, FALL, EMULATED)
        if MASKED:
            weight = tl.where(visible, weight, 0.0)
        total += tl.sum(weight, 1)
        v = tl.load(values + address, mask=stored, other=0.0).to(q.dtype)
        mixed = tl.dot(weight.to(v.dtype), v, mixed, input_precision=PRECISION)
    return total, mixed, maximum


@triton.jit
def own_sums(
    q, own, there, TOKEN: tl.constexpr, FORM: tl.constexpr, SCALE: tl.constexpr, RISE: tl.constexpr,
    FALL: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """Sums, see `attend_keys`, over each row's own key alone, at `own` `[rows, width]`; its value is TOKEN elements further on."""
    own_key = tl.load(own, mask=there, other=0.0).to(tl.float32)
    own_value = tl.load(own + TOKEN, mask=there).to(tl.float32)
    products = tl.sum(q.to(tl.float32) * own_key, 1)
    weight = tl.full([q.shape[0]], 1.0, tl.float32)
    if FORM != "none":
        weight = bounded_weight(products, FORM, SCALE, RISE, FALL, EMULATED)
    return weight, weight[:, None] * own_value, products * SCALE


@triton.jit
def merged(sums, part, FORM: tl.constexpr):
    """Merges two sums of `attend_keys`, over earlier and later keys; explicit fma fixes how the device rounds."""
    total, mixed, maximum = sums
    if FORM == "none":
        higher = tl.maximum(maximum, part[2])
        before, after = tl.exp2(maximum - higher), tl.exp2(part[2] - higher)
        total = tl.fma(total, before, part[0] * after)
        mixed = tl.fma(mixed, tl.broadcast_to(before[:, None], mixed.shape), part[1] * after[:, None])
        return total, mixed, higher
    return total + part[0], mixed + part[1], maximum


@triton.jit
def no_sums(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Sums of no keys, see `attend_keys`."""
    return tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32), tl.full([ROWS], -1e30, tl.float32)


@triton.jit
def attend_chunks(
    sums, q, keys, values, columns, seen, length, place, begin, end, CHUNK_KEYS: tl.constexpr, CHUNKED: tl.constexpr,
    TOKEN: tl.constexpr, HEAD_WIDTH: tl.constexpr, FORM: tl.constexpr, SCALE: tl.constexpr, RISE: tl.constexpr,
    FALL: tl.constexpr, PRECISION: tl.constexpr, EMULATED: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    """Adds keys `begin … end − 1` to `sums`, see `attend_keys`. If CHUNKED, each chunk of CHUNK_KEYS is summed separately first."""
    empty = no_sums(q.shape[0], q.shape[1])
    for chunk in range(begin, end, CHUNK_KEYS):
        stop = tl.minimum(chunk + CHUNK_KEYS, end)
        # a context row's mask depends on where its tile begins, so all its tiles of keys take the masked path
        whole = tl.where(place < 0, stop // TILE_KEYS * TILE_KEYS, chunk)
        part = empty
        if not CHUNKED:
            part = sums
        part = attend_keys(
            part, q, keys, values, columns, seen, length, chunk, whole,
            False, TOKEN, HEAD_WIDTH, FORM, SCALE, RISE, FALL, PRECISION, EMULATED, TILE_KEYS,
        )  # fmt: skip
        part = attend_keys(
            part, q, keys, values, columns, seen, length, whole, stop,
            True, TOKEN, HEAD_WIDTH, FORM, SCALE, RISE, FALL, PRECISION, EMULATED, TILE_KEYS,
        )  # fmt: skip
        if CHUNKED:
            part = merged(sums, part, FORM)
        sums = part
    return sums


@triton.jit
def keys_seen(place, number, length, CAUSAL: tl.constexpr):
    """How many keys of a context of `length` keys row `number` (1 …) of a tile sees; `place` is that of the tile's first row."""
    if CAUSAL:
        return tl.where(place >= 0, tl.minimum(place + number, length), length)
    return length + 0 * number


@triton.jit
def tile_and_state(counts, counted, tile):
    """For a tile: its first row, its number of rows, the first row's place in its context (−1 for candidates), and the start, length and
    capacity of the context's state. The number of rows is 0 for a tile past `counts[counted]`, whose slot may hold anything."""
    there = tile < tl.load(counts + counted)
    slot = counts - _RECORD * (tile + 1)
    request = tl.load(slot + 2, mask=there, other=0)
    start, length, capacity = state_of(counts, request)
    rows = tl.load(slot + 1, mask=there, other=0)
    return tl.load(slot), rows, tl.load(slot + 3), start, length, capacity


@triton.jit(do_not_specialize=["layer", "counted"])
def attend_tiles(
    query, query_stride, own, own_stride, anchor, out, partial, totals, counts, counted, layer, rows_of_partial,
    CAUSAL: tl.constexpr, QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, FORM: tl.constexpr, SCALE: tl.constexpr, RISE: tl.constexpr, FALL: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
    CHUNK_KEYS: tl.constexpr, CHUNKED: tl.constexpr, SPREAD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`out = Σ p·v / Σ p`, `p = exp(soft_cap(multiplier · q·k) − shift)`: softmax with soft-capped logits (Grok-1; spec section 1).
    A row's own key comes first, then the keys of its context from the first on.

    One program per query head and tile of rows. A tile belongs to one request, whose keys and values start at `anchor` plus the
    request's offset, `[L, 2, capacity, G, K]`. Context rows see keys up to their own place (CAUSAL) or all; candidates (place −1)
    see all keys, whole tiles of them without a mask, and their own key and value, which stand in `own` `[rows, 2, G, K]`.
    SPREAD: a program takes one chunk, and `add_chunks` adds up what it leaves in fp32 `partial` `[chunks, rows, N, K]` and
    `totals` `[chunks, rows, N, 2]`. WIDEN is for the interpreter, which cannot multiply bf16.
    """
    head = tl.program_id(0)
    first_row, row_count, place, start, length, capacity = tile_and_state(counts, counted, tl.program_id(1))
    wait_for_previous(DEPENDENT)
    begin, last = 0, keys_seen(place, row_count, length, CAUSAL)
    end = last
    if SPREAD:
        begin = tl.program_id(2) * CHUNK_KEYS
        end = tl.minimum(begin + CHUNK_KEYS, last)
    if (row_count == 0) | ((begin > 0) & (begin >= last)):
        return
    kv_head = head // (QUERY_HEADS // KV_HEADS)
    in_tile = tl.arange(0, TILE_ROWS)
    columns = tl.arange(0, HEAD_BLOCK)
    rows = (first_row + in_tile).to(tl.int64)
    there = (in_tile < row_count)[:, None] & (columns < HEAD_WIDTH)[None, :]
    q = tl.load(query + rows[:, None] * query_stride + head * HEAD_WIDTH + columns[None, :], mask=there, other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    seen = keys_seen(place, 1 + in_tile, length, CAUSAL)
    token: tl.constexpr = KV_HEADS * HEAD_WIDTH
    keys = anchor + start + (layer.to(tl.int64) * 2 * capacity) * token + kv_head * HEAD_WIDTH
    values = keys + capacity.to(tl.int64) * token
    sums = no_sums(TILE_ROWS, HEAD_BLOCK)
    if (place < 0) & (begin == 0):
        mine = own + rows[:, None] * own_stride + kv_head * HEAD_WIDTH + columns[None, :]
        sums = own_sums(q, mine, there, token, FORM, SCALE, RISE, FALL, WIDEN)
    sums = attend_chunks(
        sums, q, keys, values, columns, seen, length, place, begin, end, CHUNK_KEYS, CHUNKED,
        token, HEAD_WIDTH, FORM, SCALE, RISE, FALL, PRECISION, WIDEN, TILE_KEYS,
    )  # fmt: skip
    if SPREAD:
        row = (tl.program_id(2) * rows_of_partial + rows) * QUERY_HEADS + head
        tl.store(partial + row[:, None] * HEAD_WIDTH + columns[None, :], sums[1], mask=there)
        tl.store(totals + 2 * row, sums[0], mask=in_tile < row_count)
        tl.store(totals + 2 * row + 1, sums[2], mask=in_tile < row_count)
    else:
        result = sums[1] / sums[0][:, None]
        target = out + rows[:, None] * (QUERY_HEADS * HEAD_WIDTH) + head * HEAD_WIDTH + columns[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=there)


@triton.jit
def chunk_of(partial, totals, row, columns, there, row_there, HEAD_WIDTH: tl.constexpr):
    """The sums that a program of `attend_tiles` stored for one chunk."""
    total = tl.load(totals + 2 * row, mask=row_there)
    mixed = tl.load(partial + row[:, None] * HEAD_WIDTH + columns[None, :], mask=there)
    return total, mixed, tl.load(totals + 2 * row + 1, mask=row_there)


@triton.jit(do_not_specialize=["counted"])
def add_chunks(
    out, partial, totals, counts, counted, rows_of_partial, CAUSAL: tl.constexpr, QUERY_HEADS: tl.constexpr,
    HEAD_WIDTH: tl.constexpr, HEAD_BLOCK: tl.constexpr, FORM: tl.constexpr, TILE_ROWS: tl.constexpr,
    CHUNK_KEYS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Completes `attend_tiles` where it is SPREAD: adds the chunks from the context's first on, as one program would."""
    head = tl.program_id(0)
    first_row, row_count, place, _, last, _ = tile_and_state(counts, counted, tl.program_id(1))
    wait_for_previous(DEPENDENT)
    if row_count == 0:
        return
    last = keys_seen(place, row_count, last, CAUSAL)
    in_tile = tl.arange(0, TILE_ROWS)
    columns = tl.arange(0, HEAD_BLOCK)
    rows = (first_row + in_tile).to(tl.int64)
    row_there = in_tile < row_count
    there = row_there[:, None] & (columns < HEAD_WIDTH)[None, :]
    row = rows * QUERY_HEADS + head
    sums = chunk_of(partial, totals, row, columns, there, row_there, HEAD_WIDTH)
    for _ in range(CHUNK_KEYS, last, CHUNK_KEYS):
        row += rows_of_partial * QUERY_HEADS
        sums = merged(sums, chunk_of(partial, totals, row, columns, there, row_there, HEAD_WIDTH), FORM)
    result = sums[1] / sums[0][:, None]
    target = out + rows[:, None] * (QUERY_HEADS * HEAD_WIDTH) + head * HEAD_WIDTH + columns[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=there)
