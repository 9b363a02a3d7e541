"""Strict JSON: bytes → values, in time linear in the bytes. Not for what the values mean: that is `schema`."""

from __future__ import annotations

import re
from typing import Any

import orjson

from app.errors import MalformedJson

_ESCAPE = re.compile(rb"\\(?:(u003[aA])|.)", re.DOTALL)


def parse(body: bytes | bytearray) -> Any:
    """The one JSON value that the body holds.

    Raises MalformedJson for whatever is not RFC 8259 JSON in UTF-8 without a byte order mark, and beyond it for numbers that
    are infinite as a double, lone surrogates, the same key twice in one object, and nesting beyond what can be written back
    (about 250 levels). The message names the place, never the content.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise MalformedJson(
            f"The body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})."
        ) from None
    try:
        kept = orjson.dumps(value).count(b":")
    except orjson.JSONEncodeError:
        raise MalformedJson("The body is nested too deeply.") from None
    # Written back, every member costs one colon and every string keeps its own: only a dropped duplicate loses some.
    if kept != body.count(b":") + _escaped_colons(body):
        raise MalformedJson("An object in the body has the same key twice.")
    return value


def _escaped_colons(body: bytes | bytearray) -> int:
    if b"\\u003" not in body:
        return 0
    return sum(match[1] is not None for match in _ESCAPE.finditer(body))
