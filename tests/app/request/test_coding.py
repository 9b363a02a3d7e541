"""gzip bodies: what they hold, and that a bomb costs no more than the limit."""

from __future__ import annotations

import gzip
import tracemalloc

import pytest

from app.errors import BadRequest, TooLarge, UnsupportedCoding
from app.request.coding import check_coding, inflate

LIMIT = 2 * 2**20


def test_a_whole_body_comes_out() -> None:
    body = b'{"user_id": 1}' * 1000
    assert inflate(gzip.compress(body), len(body)) == body
    assert inflate(bytearray(gzip.compress(b"")), LIMIT) == b""


def test_a_byte_beyond_the_limit_is_too_large() -> None:
    packed = gzip.compress(b"x" * 1000)
    assert len(inflate(packed, 1000)) == 1000
    with pytest.raises(TooLarge):
        inflate(packed, 999)


def test_a_bomb_costs_no_more_than_the_limit() -> None:
    bomb = gzip.compress(bytes(400 * 2**20), 1)
    assert len(bomb) < LIMIT
    tracemalloc.start()
    with pytest.raises(TooLarge):
        inflate(bomb, LIMIT)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * LIMIT  # the body is kept once, what is inflated for a moment twice


NO_WHOLE_MEMBER = {  # with names, since a member holds the time
    "empty": b"",
    "plain": b"plain",
    "cut": gzip.compress(b"x" * 99)[:-1],
    "longer": gzip.compress(b"x") + b"y",
    "two": gzip.compress(b"x") * 2,
}


@pytest.mark.parametrize("body", NO_WHOLE_MEMBER.values(), ids=NO_WHOLE_MEMBER)
def test_anything_but_one_whole_member_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        inflate(body, LIMIT)


def test_gzip_is_the_only_coding() -> None:
    assert [check_coding(name) for name in (b"gzip", b" GZIP ", b"x-gzip", b"identity", b"")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    for coding in (b"deflate", b"br", b"gzip, gzip", b"zstd"):
        with pytest.raises(UnsupportedCoding):
            check_coding(coding)
