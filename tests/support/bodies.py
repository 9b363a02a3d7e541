"""A request for the fake engine's checkpoint, as JSON values, and its forms. Needs neither torch nor HTTP."""

from __future__ import annotations

import copy
from typing import Any

GOOD: dict[str, Any] = {
    "user_id": "1868434417286410240",
    "history": [
        {"post_id": 17, "author_id": 5, "actions": ["favorite", "2"], "product_surface": 3, "dwell_time": 12.5},
        {"post_id": "18", "author_id": 0, "actions": {"reply": 0.5}},
        {"post_id": 0, "author_id": 9},
    ],
    "candidates": [
        {"post_id": 90, "author_id": 7, "product_surface": 15, "created_at": 1779990000},
        {"post_id": "9223372036854775809", "author_id": "18446744073709551615"},
        {"post_id": 0, "author_id": 0},
    ],
    "impression_ts": 1780000000,
    "weights": {"favorite": 1.0, "report": -20},
    "top_k": 3,
    "actions_wanted": ["report", "favorite"],
    "request_id": "page-7",
}
"""A request for the fake engine's checkpoint that uses every field."""


def good(**changes: Any) -> dict[str, Any]:
    """`GOOD` with top-level fields replaced; `...` takes one out."""
    body = copy.deepcopy(GOOD) | changes
    return {name: value for name, value in body.items() if value is not ...}


def in_columns(items: list[dict[str, Any]], **defaults: Any) -> dict[str, list[Any]]:
    """The columns form of posts as objects; a field that some lack gets its default there."""
    missing = {"product_surface": 0, "actions": 0, "dwell_time": 0, "created_at": 0} | defaults
    names = dict.fromkeys(name for item in items for name in item)
    return {name: [item.get(name, missing.get(name)) for item in items] for name in names}
