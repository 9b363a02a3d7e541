"""Strict JSON: what stock parsers let through is refused, what is valid comes through unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.errors import MalformedJson
from app.request.body import decode
from app.request.strict_json import parse
from app.settings import Limits

REFUSED = {
    "empty": b"",
    "blank": b"  ",
    "garbage": b"{} x",
    "trailing comma": b'{"a": 1,}',
    "single quotes": b"{'a': 1}",
    "comment": b'{"a": 1} // yes',
    "NaN": b'{"a": NaN}',
    "Infinity": b"[Infinity]",
    "-Infinity": b"[-Infinity]",
    "infinite as a double": b"[1e999]",
    "infinite integer": b"9" * 400,
    "leading zero": b"[01]",
    "plus": b"[+1]",
    "hex": b"[0x10]",
    "byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "UTF-16 without mark": '{"a": 1}'.encode("utf-16-le"),
    "UTF-32": '{"a": 1}'.encode("utf-32"),
    "Latin-1": '"é"'.encode("latin-1"),
    "overlong UTF-8": b'"\xc0\xaf"',
    "raw surrogate": b'"\xed\xa0\x80"',
    "lone high surrogate": b'"\\ud800"',
    "lone low surrogate": b'"\\udc00"',
    "control character": b'"\x00"',
    "cut off": b'{"a": [1, 2',
    "duplicate key": b'{"a": 1, "a": 2}',
    "duplicate key, equal values": b'{"a": 1, "a": 1}',
    "duplicate key, deep": b'[{"b": [{"a": 1, "a": 1}]}]',
    "duplicate key, one escaped": b'{"a": 1, "\\u0061": 2}',
    "duplicate key hidden by an escaped colon": b'{"a": 1, "a": 2, "b": "\\u003a"}',
    "duplicate key with colons": b'{"a:": "::", "a:": "\\u003A"}',
    "deep arrays": b"[" * 600 + b"]" * 600,
    "deeper arrays": b"[" * 30_000,
    "deep objects": b'{"a":' * 600 + b"1" + b"}" * 600,
}


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED.keys())
def test_refused(body: bytes) -> None:
    for read in (parse, lambda raw: decode(raw, Limits())):
        with pytest.raises(MalformedJson):
            read(body)


@pytest.mark.parametrize(
    "body", [b'{"a": ":", "b": {"a": 1}}', b'"\\u003a"', b'"\\\\u003a"', b'{"\\u003a:": ":\\\\\\u003a"}']
)
def test_colons_in_strings_are_no_members(body: bytes) -> None:
    assert parse(body) == json.loads(body)


@pytest.mark.parametrize("body", [b'{"a": 1, "secretive": 1, "secretive": 2}', b'{"secretive": secretive}'])
def test_the_message_holds_nothing_of_the_body(body: bytes) -> None:
    with pytest.raises(MalformedJson) as caught:
        parse(body)
    assert "secretive" not in caught.value.detail


integers, floats = st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False, allow_infinity=False)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | integers | floats | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@example([2**64 - 1, 2**63], True)
@given(json_values, st.booleans())
def test_valid_json_comes_through(value: Any, ascii_only: bool) -> None:
    assert parse(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


members = st.lists(
    st.tuples(st.sampled_from(["a", "b", ":", "a:"]), st.sampled_from(['":"', "1", '{"c":":"}', '"\\u003a"'])),
    max_size=5,
)


@settings(max_examples=300, deadline=None)
@given(members)
def test_duplicates_are_found_exactly(pairs: list[tuple[str, str]]) -> None:
    body = "{" + ",".join(f'"{key}":{value}' for key, value in pairs) + "}"
    if len({key for key, _ in pairs}) < len(pairs):
        with pytest.raises(MalformedJson):
            parse(body.encode())
    else:
        assert parse(body.encode()) == json.loads(body)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=40))
def test_bytes_parse_or_are_refused(body: bytes) -> None:
    try:
        parse(body)
    except MalformedJson:
        return
    json.loads(body)
