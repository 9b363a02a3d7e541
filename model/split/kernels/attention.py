"""Triton: attention of query tiles over the contexts of many requests, and RoPE. Launched by `model.split.kernels.fused`."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from model.split.kernels.order import wait_for_previous
from model.split.step import COUNTS, RECORD

_HEAD, _RECORD = tl.constexpr(COUNTS), tl.constexpr(RECORD)


@triton.jit
def state_of(counts, request):
    """Where the state of a request starts, counted from a tensor of the same type, its length and its capacity: `StepArrays`."""
    slot = counts - _RECORD * (request + 1)
    start = tl.load((slot + 4).to(tl.pointer_type(tl.int64)))
    return tl.multiple_of(start, 16), tl.load(slot + 6), tl.load(slot + 7)


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
    """`2^x` in one instruction; below 2⁻¹²⁶, where no weight under a cap lies, 0."""
    if EMULATED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def bounded_weight(
    products, FORM: tl.constexpr, SCALE: tl.constexpr, RISE: tl.constexpr, FALL: tl.constexpr, EMULATED: tl.constexpr
):
    """`exp(soft_cap(multiplier · x) − shift)` from raw products x.

    `fast_tanh`: SCALE = multiplier / cap, RISE = −shift · log2(e), FALL = cap · log2(e). `tanh`, for fp32 engines, with
    `tanh(y) = 1 − 2 / (exp(2y) + 1)`: SCALE = 2 · log2(e) · multiplier / cap, RISE = (cap − shift) · log2(e),
    FALL = 2 · cap · log2(e). Overflow of the inner exponential gives the right limit. `softsign`: SCALE = log2(e) · multiplier,
    RISE = −shift · log2(e), FALL = 1 / (cap · log2(e)).
    """
    if FORM == "fast_tanh":
        return fast_exp2(RISE + fast_tanh(products * SCALE, EMULATED) * FALL, EMULATED)
    if FORM == "tanh":
        return tl.exp2(RISE - FALL / (tl.exp2(products * SCALE) + 1.0))
    logits = products * SCALE
    return tl.exp2(RISE + logits / (1.0 + tl.abs(logits) * FALL))


@triton.jit
def attend_keys(
    sums,
    q,
    keys,
    values,
    columns,
    seen,
    length,
    first,
    last,
    MASKED: tl.constexpr,
    TOKEN: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    FORM: tl.constexpr,
    SCALE: tl.constexpr,
    RISE: tl.constexpr,
    FALL: tl.constexpr,
    PRECISION: tl.constexpr,
    EMULATED: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Adds keys `first … last − 1`, TILE_KEYS at a time, to `sums`: `Σ p` and `Σ p·v` of every row of q `[rows, width]`, and the
    maximum of `SCALE · q·k` that p is relative to where FORM is `none`; what was summed is scaled down when it rises.

    MASKED: a row sees its first `seen[row]` of `length` keys; else all of whole tiles. A token's keys lie TOKEN elements after
    those of the one before.
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
def attend_self(
    sums,
    q,
    own,
    there,
    TOKEN: tl.constexpr,
    FORM: tl.constexpr,
    SCALE: tl.constexpr,
    RISE: tl.constexpr,
    FALL: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """Adds to `sums`, see `attend_keys`, each row's own key, to which `own` points `[rows, width]`, and value, TOKEN elements on."""
    total, mixed, maximum = sums
    own_key = tl.load(own, mask=there, other=0.0).to(tl.float32)
    own_value = tl.load(own + TOKEN, mask=there, other=0.0).to(tl.float32)
    products = tl.sum(q.to(tl.float32) * own_key, 1)
    if FORM == "none":
        higher = tl.maximum(maximum, products * SCALE)
        fade = tl.exp2(maximum - higher)
        total *= fade
        mixed *= fade[:, None]
        weight = tl.exp2(products * SCALE - higher)
        maximum = higher
    else:
        weight = bounded_weight(products, FORM, SCALE, RISE, FALL, EMULATED)
    return total + weight, mixed + weight[:, None] * own_value, maximum


@triton.jit(do_not_specialize=["layer"])
def attend_tiles(
    query,
    query_stride,
    own,
    own_stride,
    anchor,
    out,
    counts,
    layer,
    TILE_COUNT: tl.constexpr,
    CAUSAL: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    FORM: tl.constexpr,
    SCALE: tl.constexpr,
    RISE: tl.constexpr,
    FALL: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`out = Σ p·v / Σ p`, `p = exp(soft_cap(multiplier · q·k) − shift)`: softmax with soft-capped logits (Grok-1;
    spec section 1). The cap bounds every logit, so no running maximum is kept but where FORM is `none` (Milakov and Gimelshein
    2018), and keys are always added up from the context's first, TILE_KEYS at a time: the order depends on nothing but the
    row's own context.

    One program a query head and tile of rows. A tile belongs to one request, whose keys and values start at
    `anchor` plus the request's offset, laid out `[L, 2, capacity, G, K]`. Context rows see keys up to their own place (CAUSAL) or
    all; candidates (place −1) see all keys, whole tiles of them without a mask, and their own key and value, which stand in
    `own` `[rows, 2, G, K]`. WIDEN is for the interpreter, which cannot multiply bf16.
    """
    wait_for_previous(DEPENDENT)
    head = tl.program_id(0)
    tile = tl.program_id(1)
    if tile >= tl.load(counts + TILE_COUNT):
        return
    slot = counts - _RECORD * (tile + 1)
    first_row, row_count, place = tl.load(slot), tl.load(slot + 1), tl.load(slot + 3)
    start, length, capacity = state_of(counts, tl.load(slot + 2))
    kv_head = head // (QUERY_HEADS // KV_HEADS)

    in_tile = tl.arange(0, TILE_ROWS)
    columns = tl.arange(0, HEAD_BLOCK)
    rows = (first_row + in_tile).to(tl.int64)
    there = (in_tile < row_count)[:, None] & (columns < HEAD_WIDTH)[None, :]
    q = tl.load(query + rows[:, None] * query_stride + head * HEAD_WIDTH + columns[None, :], mask=there, other=0.0)
    if WIDEN:
        q = q.to(tl.float32)

    seen = tl.zeros([TILE_ROWS], tl.int32) + length
    last = length
    if CAUSAL:  # noqa: SIM102 (decided when compiling; the inner one on the device)
        if place >= 0:
            seen = place + 1 + in_tile
            last = tl.minimum(place + row_count, length)
    token: tl.constexpr = KV_HEADS * HEAD_WIDTH
    keys = anchor + start + (layer.to(tl.int64) * 2 * capacity) * token + kv_head * HEAD_WIDTH
    values = keys + capacity.to(tl.int64) * token

    sums = (
        tl.zeros([TILE_ROWS], tl.float32),
        tl.zeros([TILE_ROWS, HEAD_BLOCK], tl.float32),
        tl.full([TILE_ROWS], -1e30, tl.float32),
    )
    # a context row's mask depends on where its tile begins, so that its tiles of keys all go one way
    whole = tl.where(place < 0, length // TILE_KEYS * TILE_KEYS, 0)
    sums = attend_keys(
        sums, q, keys, values, columns, seen, length, 0, whole,
        False, token, HEAD_WIDTH, FORM, SCALE, RISE, FALL, PRECISION, WIDEN, TILE_KEYS,
    )  # fmt: skip
    sums = attend_keys(
        sums, q, keys, values, columns, seen, length, whole, last,
        True, token, HEAD_WIDTH, FORM, SCALE, RISE, FALL, PRECISION, WIDEN, TILE_KEYS,
    )  # fmt: skip
    if place < 0:
        mine = own + rows[:, None] * own_stride + kv_head * HEAD_WIDTH + columns[None, :]
        sums = attend_self(sums, q, mine, there, token, FORM, SCALE, RISE, FALL, WIDEN)
    result = sums[1] / sums[0][:, None]
    target = out + rows[:, None] * (QUERY_HEADS * HEAD_WIDTH) + head * HEAD_WIDTH + columns[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=there)


@triton.jit
def store_halves(target, first, second, there, HALF: tl.constexpr):
    """The two halves of each head, HALF elements apart."""
    tl.store(target, first, mask=there)
    tl.store(target + HALF, second, mask=there)


@triton.jit
def turned(first, second, cos, sin):
    """`x1·cos − x2·sin`, `x2·cos + x1·sin`; said as the device is to round them, so that all kernels give the same bits."""
    return tl.fma(first, cos, -(second * sin)), tl.fma(second, cos, first * sin)


@triton.jit
def rotate_heads(source, cos, sin, there, HALF: tl.constexpr):
    """Turn the pairs `(x1, x2) = (source, source + HALF)` in place: `x1·cos − x2·sin`, `x2·cos + x1·sin`; returns both."""
    dtype: tl.constexpr = source.dtype.element_ty
    first = tl.load(source, mask=there, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=there, other=0.0).to(tl.float32)
    turned_first, turned_second = turned(first, second, cos, sin)
    turned_first, turned_second = turned_first.to(dtype), turned_second.to(dtype)
    store_halves(source, turned_first, turned_second, there, HALF)
    return turned_first, turned_second


@triton.jit(do_not_specialize=["layer"])
def rotate_rows(
    query,
    query_stride,
    key_value,
    key_value_stride,
    anchor,
    rope,
    rope_positions,
    counts,
    layer,
    ROW_COUNT: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """RoPE (Su et al. 2021), half-split pairs: `x1 ← x1·cos − x2·sin`, `x2 ← x2·cos + x1·sin`, in place, in fp32.

    One program a row. `rope` fp32 `[2, rope_positions, K/2]`. QUERY_HEADS or KV_HEADS may be 0. The keys and values of
    context rows are also written to their request's state.
    """
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(counts + ROW_COUNT):
        return
    half: tl.constexpr = HEAD_WIDTH // 2
    columns = tl.arange(0, HALF_BLOCK)
    narrow = columns < half
    record = counts + _HEAD + row * _RECORD
    position = tl.load(record + 4)
    cos = tl.load(rope + position * half + columns, mask=narrow, other=0.0)[None, :]
    sin = tl.load(rope + (rope_positions + position) * half + columns, mask=narrow, other=0.0)[None, :]
    if QUERY_HEADS > 0:
        heads = tl.arange(0, QUERY_BLOCK)
        there = (heads < QUERY_HEADS)[:, None] & narrow[None, :]
        rotate_heads(query + row * query_stride + heads[:, None] * HEAD_WIDTH + columns[None, :], cos, sin, there, half)
    if KV_HEADS > 0:
        token: tl.constexpr = KV_HEADS * HEAD_WIDTH
        heads = tl.arange(0, KV_BLOCK)
        there = (heads < KV_HEADS)[:, None] & narrow[None, :]
        inner = heads[:, None] * HEAD_WIDTH + columns[None, :]
        source = key_value + row * key_value_stride + inner
        turned_first, turned_second = rotate_heads(source, cos, sin, there, half)
        place = tl.load(record + 7)
        if place >= 0:
            start, _, capacity = state_of(counts, tl.load(record + 6))
            target = anchor + start + (layer.to(tl.int64) * 2 * capacity + place) * token + inner
            store_halves(target, turned_first, turned_second, there, half)
            value_first, value_second = tl.load(source + token, mask=there), tl.load(source + token + half, mask=there)
            store_halves(target + capacity.to(tl.int64) * token, value_first, value_second, there, half)
