"""Makes the requests of careless or hostile clients from good ones, with the replies that the contract promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class BadRequest:
    """A body and its media type. The reply must have this `status` and this `code`."""

    name: str
    body: bytes
    media_type: str
    status: int
    code: str


def bad_requests(good: bytes) -> list[BadRequest]:
    """One bad request of each kind, made from a good body."""
    content = orjson.loads(good)
    invalid = {name: content | fields for name, fields in WRONG_FIELDS.items()}
    invalid["user id missing"] = {key: value for key, value in content.items() if key != "user_id"}
    malformed = {
        "cut short": good[: len(good) // 2],
        "not a number": good.replace(b'"impression_ts":1', b'"impression_ts":NaN,"x":1'),
        "empty body": b"",
    }
    return [
        *(BadRequest(name, orjson.dumps(body), JSON, 422, "invalid_request") for name, body in invalid.items()),
        *(BadRequest(name, body, JSON, 400, "malformed_json") for name, body in malformed.items()),
        BadRequest("media type", good, "text/plain", 415, "unsupported_media_type"),
    ]


WRONG_FIELDS: dict[str, dict[str, Any]] = {
    "no candidates": {"candidates": []},
    "unknown field": {"colour": "green"},
    "unknown action": {"weights": {"applaud": 1.0}},
    "unequal arrays": {"candidates": {"post_id": [1, 2], "author_id": [1]}},
    "id out of range": {"candidates": [{"post_id": -1, "author_id": 1}]},
}
