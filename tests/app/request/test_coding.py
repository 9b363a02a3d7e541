"""gzip bodies: what they hold, and that a bomb costs no more than the limit."""

from __future__ import annotations

import gzip
import tracemalloc

import pytest

from app.errors import BadRequest, TooLarge, UnsupportedCoding
from app.request.coding import check_coding, inflate

LIMIT = 2 * 2**20


def test_a_whole_body_comes_out_and_none_that_is_a_byte_too_long() -> None:
    body = b'{"user_id": 1}' * 1000
    assert inflate(gzip.compress(body), len(body)) == body
    with pytest.raises(TooLarge):
        inflate(gzip.compress(body), len(body) - 1)
    assert inflate(bytearray(gzip.compress(b"")), LIMIT) == b""


def test_a_bomb_costs_no_more_than_the_limit() -> None:
    bomb = gzip.compress(bytes(400 * 2**20), 1)
    assert len(bomb) < LIMIT
    tracemalloc.start()
    with pytest.raises(TooLarge):
        inflate(bomb, LIMIT)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * LIMIT  # the body is kept once, what is inflated for a moment twice


def test_anything_but_one_whole_member_is_refused() -> None:
    member = gzip.compress(b"x")
    for body in (b"", b"plain", member[:-1], member + b"y", member * 2):
        with pytest.raises(BadRequest):
            inflate(body, LIMIT)


def test_gzip_is_the_only_coding() -> None:
    assert all(map(check_coding, (b"gzip", b" GZIP ", b"x-gzip")))
    assert not any(map(check_coding, (b"identity", b"")))
    for coding in (b"deflate", b"br", b"gzip, gzip", b"zstd"):
        with pytest.raises(UnsupportedCoding):
            check_coding(coding)
