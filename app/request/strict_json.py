"""Strict JSON: bytes → plain values, in time linear in the bytes. Requests that are right never come here: see `body`."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from app.errors import MalformedJson

SHORT_BYTES = 256  # up to which `count`, whose time is the colons', is faster than numpy's calls


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
        refuse_duplicates(body, orjson.dumps(value))
    except orjson.JSONEncodeError:
        raise MalformedJson("The body is nested too deeply.") from None
    return value


def refuse_duplicates(body: bytes | bytearray, written: bytes) -> None:
    """Raise MalformedJson if an object in the body has the same key twice. `written`: the parsed value, written back as JSON.

    Every member has one colon and every string keeps its own, so only a dropped duplicate loses some.
    """
    colons = _colons(body)
    if b"\\" in body:
        escapes = body.replace(b"\\\\", b"").split(b"\\")[1:]  # what is left of a backslash begins an escape
        colons += sum(escape[:5] in (b"u003a", b"u003A") for escape in escapes)
    if _colons(written) != colons:
        raise MalformedJson("An object in the body has the same key twice.")


def _colons(text: bytes | bytearray) -> int:
    if len(text) < SHORT_BYTES:
        return text.count(b":")
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == ord(":")))
