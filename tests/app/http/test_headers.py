"""Content-Type and Accept: RFC 9110's rules for both."""

from __future__ import annotations

import pytest

from app.errors import InvalidRequest, NotAcceptable, TooLarge, UnsupportedMediaType
from app.http.headers import (
    BATCH,
    INFER,
    RANK,
    at_least_of,
    by_name,
    check_accept,
    check_length,
    timeout_seconds_of,
    wire_of,
)
from app.request.wires import BINARY, JSON, OBJECTS, TENSORS


@pytest.mark.parametrize(
    ("accept", "takes_json", "takes_binary"),
    [
        (b"", True, True),
        (b"*/*", True, True),
        (b"application/json", True, False),
        (b"application/*", True, True),
        (b"application/octet-stream", False, True),
        (b"text/html, application/xhtml+xml;q=0.9, */*;q=0.8", True, True),
        (b"text/html", False, False),
        (b"Application/JSON; charset=utf-8", True, False),
        (b"application/json;q=0", False, False),
        (b"*/*, application/json;q=0.0", False, True),
        (b"application/json;q=0, */*", False, True),
        (b"application/*;q=0, application/json", True, False),
        (b"*/*;q=0", False, False),
        (b"application/json ; q=0.001", True, False),
        (b",,;;q=,", False, False),
        (b"text/html," * 63 + b"application/json", True, False),
        (b"text/html," * 64 + b"application/json", False, False),  # a list of 16 000 took 14 ms of the event loop
    ],
)
def test_accept(accept: bytes, takes_json: bool, takes_binary: bool) -> None:
    check_accept({}, BINARY)  # a caller that says nothing takes everything
    for media_type, is_taken in ((JSON, takes_json), (BINARY, takes_binary)):
        if is_taken:
            check_accept({b"accept": accept}, media_type)
        else:
            with pytest.raises(NotAcceptable):
                check_accept({b"accept": accept}, media_type)


@pytest.mark.parametrize("accepts", [[b"application/json", b"text/html"], [b"text/html", b"application/json"]])
def test_a_list_in_several_fields_is_one_list(accepts: list[bytes]) -> None:
    fields = [(b"x-api-key", b"one"), *((b"accept", value) for value in accepts), (b"x-api-key", b"two")]
    headers = by_name(fields)
    check_accept(headers, JSON)
    with pytest.raises(NotAcceptable):
        check_accept(headers, BINARY)
    assert (headers[b"accept"], headers[b"x-api-key"]) == (b", ".join(accepts), b"two")


@pytest.mark.parametrize(
    "sent",
    [
        b"application/json",
        b"Application/JSON; Charset=UTF-8",
        b'application/json; charset="utf-8";',
        b"application/json;\tcharset=utf-8",
    ],
)
def test_json_is_the_wire_of_its_path(sent: bytes) -> None:
    assert [wire_of({b"content-type": sent}, wires) for wires in (RANK, BATCH, INFER)] == [OBJECTS, OBJECTS, TENSORS]


def test_other_types_have_one_wire_or_none() -> None:
    assert wire_of({b"content-type": BINARY}, RANK) is TENSORS
    assert wire_of({}, INFER) is TENSORS  # tritonclient names none
    for headers, wires in (({b"content-type": BINARY}, BATCH), ({}, RANK), ({b"content-type": b"text/plain"}, INFER)):
        with pytest.raises(UnsupportedMediaType):
            wire_of(headers, wires)


@pytest.mark.parametrize("length", [b"101", b"x", b"-1", b"9" * 30])
def test_a_length_beyond_the_limit_or_none_at_all_is_refused_before_the_body(length: bytes) -> None:
    check_length({b"content-length": b"100"}, 100)
    with pytest.raises(TooLarge):
        check_length({b"content-length": length}, 100)


def test_the_shorter_timeout_counts() -> None:
    own, envoy = b"x-request-timeout-ms", b"x-envoy-expected-rq-timeout-ms"
    assert timeout_seconds_of({}) is None
    assert timeout_seconds_of({own: b"1500"}) == 1.5
    assert timeout_seconds_of({own: b"1500", envoy: b"250"}) == timeout_seconds_of({envoy: b"250"}) == 0.25
    for nothing in (b"0", b"soon", b""):
        assert timeout_seconds_of({envoy: nothing}) is None
        assert timeout_seconds_of({own: b"1500", envoy: nothing}) == 1.5
    assert timeout_seconds_of({own: b"9" * 12}) == 999_999_999.999
    for bad in (b"9" * 13, b"soon", b""):
        with pytest.raises(InvalidRequest):
            timeout_seconds_of({own: bad})


@pytest.mark.parametrize("sent", ["", "0", "12", "1764000000000-0"])
def test_which_change_a_caller_has_to_see(sent: str) -> None:
    assert at_least_of({b"x-corpus-at-least": sent.encode()} if sent else {}) == sent


@pytest.mark.parametrize("sent", ["x", "-1", "1.5", "1-2-3", "12 ", "\u00b2"])
def test_a_change_that_is_no_number_is_refused(sent: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        at_least_of({b"x-corpus-at-least": sent.encode("latin-1")})
    assert refused.value.problems[0][0] == "X-Corpus-At-Least"
