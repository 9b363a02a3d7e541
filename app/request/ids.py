"""Ids: unsigned 64-bit integers, as JSON integers or as decimal strings without leading zeros."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

MAX_ID = 2**64 - 1
MAX_ID_DIGITS = len(str(MAX_ID))


def are_ids(values: Sequence[Any]) -> bool:
    """Whether all of these JSON values are ids."""
    if not set(map(type, values)) <= {int, str}:
        return False
    try:
        read_ids(values)
    except (ValueError, OverflowError):
        return False
    return True


def read_ids(values: Sequence[int | str]) -> NDArray[np.uint64]:
    """uint64 `[n]`. Raises ValueError or OverflowError for what is no id."""
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
    """All of them with commas between."""
    try:
        return ",".join(values).encode()
    except TypeError:  # some are integers
        pass
    try:
        return orjson.dumps(values)[1:-1].translate(None, b'"')
    except orjson.JSONEncodeError:  # 2^64 and more
        raise ValueError from None
