"""Ids: unsigned 64-bit integers, as JSON integers or as decimal strings without leading zeros; or texts, whose hash the model reads."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from weights.text_ids import TEXT_RULE, IdKind, is_text_id, text_id

MAX_ID = 2**64 - 1
MAX_ID_DIGITS = len(str(MAX_ID))
ID_RULE = "must be an unsigned 64-bit integer, as a JSON integer or a decimal string without leading zeros"
ID_RULES: dict[IdKind, str] = {"uint64": ID_RULE, "text": f"{TEXT_RULE}, as all ids of this checkpoint are"}


def are_ids(values: Sequence[Any], kind: IdKind = "uint64") -> bool:
    """Whether all of these JSON values are ids."""
    if kind == "text":
        return all(map(is_text_id, values))
    if not set(map(type, values)) <= {int, str}:
        return False
    try:
        read_ids(values)
    except (ValueError, OverflowError):
        return False
    return True


def read_ids(values: Sequence[int | str], kind: IdKind = "uint64") -> NDArray[np.uint64]:
    """Ids as uint64 `[n]`. Raises ValueError or OverflowError for a bad integer id; text ids must be valid already."""
    if kind == "text":
        return np.fromiter(map(text_id, values), np.uint64)  # type: ignore[arg-type]
    with suppress(TypeError):
        return np.asarray(array("Q", values))  # type: ignore[type-var]  # integers alone
    decimals = _joined(values)
    if decimals.translate(None, b"0123456789,"):
        raise ValueError
    numbers = orjson.loads(b"[%b]" % decimals)  # refuses empty strings and leading zeros
    if len(numbers) != len(values) or float in map(type, numbers):  # a comma in a string; 2^64 and more
        raise ValueError
    return np.asarray(array("Q", numbers))


def _joined(values: Sequence[Any]) -> bytes:
    """The ids joined by commas, without quotes."""
    try:
        return ",".join(values).encode()
    except TypeError:  # some are integers
        pass
    try:
        return orjson.dumps(values)[1:-1].translate(None, b'"')
    except orjson.JSONEncodeError:  # 2^64 and more
        raise ValueError from None


def echo_of(sent: Sequence[int | str]) -> bytes:
    """Ids in the codec's form: int64 ends `[n]`, then each id's JSON followed by a comma."""
    written = orjson.dumps(sent)[1:-1] + b","
    ends = np.flatnonzero(np.frombuffer(written, np.uint8) == ord(",")) + 1
    if len(ends) != len(sent):  # some ids contain commas
        ends = np.cumsum([len(orjson.dumps(id_)) + 1 for id_ in sent])
    return ends.astype(np.int64).tobytes() + written


def echoed(echo: bytes, count: int) -> list[int | str]:
    """The ids of an echo."""
    sent: list[int | str] = orjson.loads(b"[%b]" % echo[8 * count : -1])
    return sent


def texts_of(data: bytes | memoryview, count: int) -> NDArray[Any] | str:
    """The texts of a tensor, each preceded by its length in 4 bytes, or the sentence that says what is wrong."""
    texts: list[str] = []
    place = 0
    with suppress(UnicodeDecodeError):
        while len(texts) < count and place + 4 <= len(data):
            start, place = place + 4, place + 4 + int.from_bytes(data[place : place + 4], "little")
            texts.append(str(data[start:place], "utf-8"))
        if len(texts) == count and place == len(data):
            return np.array(texts, object)
    return "must hold texts in UTF-8, each behind its length in 4 bytes, as many as its shape says"
