"""The address of a feed is read as redis-py reads it, or refused without a word of it."""

from __future__ import annotations

import pytest

from app.corpus.address import FeedAddress

SECRET = "p@s/s#w:rd%1?[x]"
CODED = "p%40s%2Fs%23w%3Ard%251%3F%5Bx%5D"


@pytest.mark.parametrize(
    ("address", "url", "stream"),
    [
        ("redis://host/posts", "redis://host", "posts"),
        ("rediss://host:6379/posts", "rediss://host:6379", "posts"),
        ("redis://host/2/posts", "redis://host/2", "posts"),
        ("redis://[::1]:6379/posts", "redis://[::1]:6379", "posts"),
        ("redis://host/posts%3Aeu", "redis://host", "posts:eu"),
        ("redis://host/a%2Fb%25", "redis://host", "a/b%"),
        ("redis://host/posts?socket_keepalive=true&db=3", "redis://host?socket_keepalive=true&db=3", "posts"),
        (f"redis://me:{CODED}@host/posts", f"redis://me:{CODED}@host", "posts"),
    ],
)
def test_an_address_names_a_server_and_a_stream(address: str, url: str, stream: str) -> None:
    assert FeedAddress.of(address) == (url, stream)


@pytest.mark.parametrize(
    "address",
    [
        f"redis://:{SECRET}@host:6379/posts",
        "redis://:se@cret@host/posts",
        "redis://:se/cret@host/posts",
        "redis://:se?cret@host/posts",
        "redis://:secret@host:port/posts",
        "redis://:secret@host:0/posts",
        "redis://:secret@host:65536/posts",
        "redis://:secret@/posts",
        "redis://:secret@host/",
        "redis://:secret@host/posts/",
        "redis://:secret@host/a/posts",
        "redis://:secret@host/posts#x",
        "redis://:secret@host/po sts",
        "kafka://secret:9092/posts",
        "secret",
    ],
)
def test_another_form_is_refused_and_no_piece_of_it_is_said(address: str) -> None:
    with pytest.raises(ValueError, match=r"^must be redis://.* @ is written %40, / is %2F, # is %23") as refused:
        FeedAddress.of(address)
    assert "secret" not in str(refused.value)
    assert SECRET[:3] not in str(refused.value)
    assert refused.value.__suppress_context__ or refused.value.__context__ is None
