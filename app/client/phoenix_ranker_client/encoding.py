"""A request's values → JSON. Numpy, pandas and date values become plain ones; what no JSON can hold is refused by the name of its field."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import orjson

OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATETIME
MAX_INTEGER, MIN_INTEGER = 2**64 - 1, -(2**63)


class Unsendable(ValueError):
    """A value that cannot be sent. `field` names it as the service does, for example `candidates.post_id[3]`."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.message = field, message


def encode(body: Mapping[str, Any]) -> bytes:
    """The JSON of a body. Raises Unsendable for None, NaN, and values of other types than JSON has."""
    try:
        content = orjson.dumps(body, default=_plain, option=OPTIONS)
    except orjson.JSONEncodeError as error:
        _check(body, "")
        raise Unsendable("body", str(error)) from error  # it is nested deeper than any request
    if b"null" in content:  # orjson writes null for None and for NaN; a text that contains "null" passes the check
        _check(body, "")
    return content


def _plain(value: Any) -> Any:
    """The value as types that JSON has, for orjson, which calls this for the types that it does not know. Raises TypeError."""
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise TypeError("must be Unix seconds, or a datetime with a time zone")
        return int(value.timestamp())
    if getattr(getattr(value, "dtype", None), "kind", "") in ("M", "m"):  # numpy's dates have no time zone
        raise TypeError("must be Unix seconds, or a datetime with a time zone")
    if hasattr(value, "tolist"):  # scalars and arrays of numpy, series and indexes of pandas
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    raise TypeError(f"must not be a {type(value).__name__}")


def _check(value: Any, place: str) -> None:
    """Raises Unsendable for the first value below `place` that JSON cannot hold."""
    if value is None:
        raise Unsendable(place, "must not be None; leave an unknown value out, or use its default")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise Unsendable(place, "must be a finite number")
    elif isinstance(value, int):
        if not MIN_INTEGER <= value <= MAX_INTEGER:
            raise Unsendable(place, "must fit in 64 bits")
    elif isinstance(value, str):
        if not value.isascii() and not value.encode(errors="ignore") == value.encode(errors="surrogatepass"):
            raise Unsendable(place, "must be Unicode text without lone surrogates")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str | int):
                raise Unsendable(place, f"must have texts as keys, not a {type(key).__name__}")
            _check(item, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check(item, f"{place}[{index}]")
    else:
        try:
            orjson.dumps(value, option=OPTIONS)  # what orjson knows beside these, such as UUIDs and enumerations
        except orjson.JSONEncodeError:
            try:
                plain = _plain(value)
            except TypeError as error:
                raise Unsendable(place, str(error)) from error
            _check(plain, place)
