"""Triton: how kernels read the arrays that describe a step, by the names of `model.split.step`. Records are read as int32."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from model.split.step import ROW, STATE, TILE, word, words

ROW_WORDS, TILE_WORDS, STATE_WORDS = (tl.constexpr(words(record)) for record in (ROW, TILE, STATE))
POST, AUTHOR, POSITION, SURFACE, AGE, REQUEST, PLACE = (
    tl.constexpr(word(ROW, name)) for name in ("post", "author", "position", "surface", "age", "request", "place")
)
TILE_FIRST_ROW, TILE_ROW_COUNT, TILE_REQUEST, TILE_PLACE = (
    tl.constexpr(word(TILE, name)) for name in ("first_row", "rows", "request", "place")
)
STATE_START, STATE_LENGTH, STATE_CAPACITY = (
    tl.constexpr(word(STATE, name)) for name in ("start", "length", "capacity")
)


@triton.jit
def id_of(rows, row, field):
    """The id POST or AUTHOR of a row, int64 with the same bits."""
    return tl.load((rows + row * ROW_WORDS + field).to(tl.pointer_type(tl.int64)))


@triton.jit
def state_of(states, request):
    """Of a request's keys and values: where they start, counted from a tensor of their type; how many tokens they have; how many
    they have room for."""
    state = states + request * STATE_WORDS
    start = tl.load((state + STATE_START).to(tl.pointer_type(tl.int64)))
    return tl.multiple_of(start, 16), tl.load(state + STATE_LENGTH), tl.load(state + STATE_CAPACITY)
