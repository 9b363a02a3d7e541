"""Hashes text ids to the 64-bit ids that a model reads: XXH64 of the UTF-8 with seed 0, as publicly defined."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

IdKind = Literal["uint64", "text"]
"""The kind of ids in a checkpoint, log or corpus."""

MAX_TEXT_BYTES = 128
TEXT_RULE = f"must be a text of 1 to {MAX_TEXT_BYTES} bytes of UTF-8"

_SURROGATE = re.compile("[\ud800-\udfff]")


def is_text_id(value: Any) -> bool:
    """Whether this is a valid text id of a user, post or author."""
    if type(value) is not str or not 0 < len(value) <= MAX_TEXT_BYTES or _SURROGATE.search(value):
        return False
    return value.isascii() or len(value.encode()) <= MAX_TEXT_BYTES


def text_id(value: str) -> int:
    """The 64-bit id of a valid text. A hash of 0 becomes 1, because 0 is padding."""
    return xxhash.xxh64_intdigest(value.encode()) or 1


def text_ids(values: Iterable[str]) -> NDArray[np.uint64]:
    """The ids of valid texts, uint64 `[n]`."""
    return np.fromiter(map(text_id, values), np.uint64)


def collision(pieces: Callable[[], Iterable[Sequence[str]]]) -> tuple[str, str] | None:
    """Two different texts with the same id, if any, found by a second hash. `pieces` is called up to twice; needs 16 bytes a text."""
    pairs = [
        np.array([text_ids(texts), [xxhash.xxh3_64_intdigest(text.encode()) for text in texts]], np.uint64)
        for texts in pieces()
    ]
    if not pairs:
        return None
    ids, seconds = np.concatenate(pairs, 1)
    order = np.lexsort((seconds, ids))
    same = (ids[order][1:] == ids[order][:-1]) & (seconds[order][1:] != seconds[order][:-1])
    if not same.any():
        return None
    shared_id = ids[order][1:][same][0]
    texts_of_id = dict.fromkeys(text for texts in pieces() for text in texts if text_id(text) == shared_id)
    first, second, *_ = texts_of_id
    return first, second
