"""The bounds of what a request may say, and which texts may name one. The path of a request and its plain definition share them."""

from __future__ import annotations

import re
from typing import Any

MAX_ID = 2**64 - 1
MAX_TIME = 253_402_300_799  # the last second of the year 9999: milliseconds do not fit
MAX_WEIGHT = 1e9
MAX_ACTION_VALUE = 1e6
ID_PATTERN = r"^(0|[1-9][0-9]{0,19})$"
REPLIES = ("objects", "columns")
REQUEST_ID_PATTERN = r"^[A-Za-z0-9_.:@/+=-]{1,128}$"

_REQUEST_ID = re.compile(REQUEST_ID_PATTERN, re.ASCII)


def is_request_id(value: Any) -> bool:
    """Whether a value may name a request: it goes into headers and logs as it is."""
    return type(value) is str and _REQUEST_ID.fullmatch(value) is not None
