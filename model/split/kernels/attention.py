"""Triton: attention of query tiles over the contexts of many requests.

The cap bounds every logit, so a running maximum is kept only where FORM is `none` (Milakov and Gimelshein 2018). Keys are summed
TILE_KEYS at a time from the context's first: the order of additions depends on nothing but the row's own context.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.layers import MASKED, soft_cap
from model.split.kernels.contract import softmax_shift
from model.split.kernels.fields import TILE_FIRST_ROW, TILE_PLACE, TILE_REQUEST, TILE_ROW_COUNT, TILE_WORDS, state_of

LOG2_E = math.log2(math.e)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, limits: Tensor, own: tuple[Tensor, Tensor] | None, multiplier: float,
    cap: float | None,
) -> Tensor:  # fmt: skip
    """The definition: attention of rows over one context. Row m sees the context's first `limits[m]` keys and, with `own`, itself.

    query `[M, N, K]`; keys, values `[S, G, K]`; limits int `[M]`; own key and value `[M, G, K]`. Every logit is
    `soft_cap(multiplier · q·k)`. Returns fp32 `[M, N, K]`.

                  context        own
        row 0   1 1 1 0 0 0   |  1           limits[0] = 3
        row 1   1 1 1 1 1 1   |    1         limits[1] = 6
    """
    group = query.shape[1] // keys.shape[1]
    query, keys, values = query.float(), keys.float(), values.float()
    logits = soft_cap(multiplier * torch.einsum("mnk,snk->mns", query, keys.repeat_interleave(group, 1)), cap)
    seen = torch.arange(keys.shape[0], device=query.device) < limits[:, None]
    logits = torch.where(seen[:, None], logits, MASKED)
    values = values.repeat_interleave(group, 1)
    if own is None:
        return torch.einsum("mns,snk->mnk", torch.softmax(logits, -1), values)
    own_key, own_value = (x.float().repeat_interleave(group, 1) for x in own)
    diagonal = soft_cap(multiplier * (query * own_key).sum(-1, keepdim=True), cap)
    weights = torch.softmax(torch.cat((logits, diagonal), -1), -1)
    return torch.einsum("mns,snk->mnk", weights[..., :-1], values) + weights[..., -1:] * own_value


def softmax_constants(multiplier: float, cap: float | None, dtype: torch.dtype) -> dict[str, Any]:
    """FORM, SCALE, RISE and FALL of `bounded_weight`; without a cap only SCALE matters."""
    shift = softmax_shift(cap)
    if cap is None:
        return {"FORM": "none", "SCALE": LOG2_E * multiplier, "RISE": 0.0, "FALL": 0.0}
    if dtype == torch.bfloat16:
        return {"FORM": "fast_tanh", "SCALE": multiplier / cap, "RISE": -shift * LOG2_E, "FALL": cap * LOG2_E}
    scale = 2 * LOG2_E * multiplier / cap
    return {"FORM": "tanh", "SCALE": scale, "RISE": (cap - shift) * LOG2_E, "FALL": 2 * cap * LOG2_E}


@triton.jit
def fast_tanh(x, EMULATED: tl.constexpr):
    """`tanh` in one instruction, within 2⁻¹¹ of its value. EMULATED: exact, then rounded to as few bits, for the interpreter."""
    if EMULATED:
        exact = 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)
        scaled = exact * 8193.0  # Veltkamp's splitting at 2¹³ leaves 11 bits
        return scaled - (scaled - exact)
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
    own_value = tl.load(own + TOKEN, mask=there, other=0.0).to(tl.float32)
    products = tl.sum(q.to(tl.float32) * own_key, 1)
    weight = tl.full([q.shape[0]], 1.0, tl.float32)
    if FORM != "none":
        weight = bounded_weight(products, FORM, SCALE, RISE, FALL, EMULATED)
    return weight, weight[:, None] * own_value, products * SCALE


@triton.jit
def keys_seen(place, number, length, CAUSAL: tl.constexpr):
    """How many keys of a context of `length` keys row `number` (1 …) of a tile sees; `place` is that of the tile's first row."""
    if CAUSAL:
        return tl.where(place >= 0, tl.minimum(place + number, length), length)
    return length + 0 * number


@triton.jit(do_not_specialize=["counted", "layer"])
def attend_tiles(
    query, query_stride, own, own_stride, anchor, out, counts, counted, tiles, states, layer, CAUSAL: tl.constexpr,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, HEAD_BLOCK: tl.constexpr, FORM: tl.constexpr,
    SCALE: tl.constexpr, RISE: tl.constexpr, FALL: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    """`out = Σ p·v / Σ p`, `p = exp(soft_cap(multiplier · q·k) − shift)`: softmax with soft-capped logits (Grok-1).
    A row's own key comes first, then the keys of its context from the first on.

    One program per query head and tile of rows. A tile belongs to one request, whose keys and values start at `anchor` plus the
    state's start, `[L, 2, capacity, G, K]`. Context rows see keys up to their own place (CAUSAL) or all; candidates (place −1)
    see all keys, whole tiles of them without a mask, and their own key and value, which stand in `own` `[rows, 2, G, K]`.
    WIDEN is for the interpreter, which cannot multiply bf16.
    """
    head = tl.program_id(0)
    if tl.program_id(1) >= tl.load(counts + counted):
        return
    tile = tiles + tl.program_id(1) * TILE_WORDS
    row_count, place = tl.load(tile + TILE_ROW_COUNT), tl.load(tile + TILE_PLACE)
    start, length, capacity = state_of(states, tl.load(tile + TILE_REQUEST))
    kv_head = head // (QUERY_HEADS // KV_HEADS)
    in_tile = tl.arange(0, TILE_ROWS)
    columns = tl.arange(0, HEAD_BLOCK)
    rows = (tl.load(tile + TILE_FIRST_ROW) + in_tile).to(tl.int64)
    there = (in_tile < row_count)[:, None] & (columns < HEAD_WIDTH)[None, :]
    q = tl.load(query + rows[:, None] * query_stride + head * HEAD_WIDTH + columns[None, :], mask=there, other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    token: tl.constexpr = KV_HEADS * HEAD_WIDTH
    keys = anchor + start + (layer.to(tl.int64) * 2 * capacity) * token + kv_head * HEAD_WIDTH
    values = keys + capacity.to(tl.int64) * token
    total = tl.zeros([TILE_ROWS], tl.float32)
    sums = total, tl.zeros([TILE_ROWS, HEAD_BLOCK], tl.float32), total - 1e30
    if place < 0:
        mine = own + rows[:, None] * own_stride + kv_head * HEAD_WIDTH + columns[None, :]
        sums = own_sums(q, mine, there, token, FORM, SCALE, RISE, FALL, WIDEN)
    last = keys_seen(place, row_count, length, CAUSAL)
    # a context row's mask depends on where its tile begins, so all its tiles of keys take the masked path
    whole = tl.where(place < 0, last // TILE_KEYS * TILE_KEYS, 0)
    seen = keys_seen(place, 1 + in_tile, length, CAUSAL)
    sums = attend_keys(
        sums, q, keys, values, columns, seen, length, 0, whole,
        False, token, HEAD_WIDTH, FORM, SCALE, RISE, FALL, PRECISION, WIDEN, TILE_KEYS,
    )  # fmt: skip
    sums = attend_keys(
        sums, q, keys, values, columns, seen, length, whole, last,
        True, token, HEAD_WIDTH, FORM, SCALE, RISE, FALL, PRECISION, WIDEN, TILE_KEYS,
    )  # fmt: skip
    result = sums[1] / sums[0][:, None]
    target = out + rows[:, None] * (QUERY_HEADS * HEAD_WIDTH) + head * HEAD_WIDTH + columns[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=there)
