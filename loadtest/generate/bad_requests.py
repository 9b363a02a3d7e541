"""Makes the requests of careless or hostile clients from good ones, with the replies that the contract promises."""

from __future__ import annotations

from collections.abc import Callable
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
    invalid = [
        BadRequest(name, orjson.dumps(corrupt(orjson.loads(good))), JSON, 422, "invalid_request")
        for name, corrupt in CORRUPTIONS
    ]
    return [
        *invalid,
        BadRequest("cut short", good[: len(good) // 2], JSON, 400, "malformed_json"),
        BadRequest(
            "not a number",
            good.replace(b'"impression_ts":1', b'"impression_ts":NaN,"x":1'),
            JSON,
            400,
            "malformed_json",
        ),
        BadRequest("empty body", b"", JSON, 400, "malformed_json"),
        BadRequest("media type", good, "text/plain", 415, "unsupported_media_type"),
    ]


def _with(key: str, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda body: body | {key: value}


CORRUPTIONS: tuple[tuple[str, Callable[[dict[str, Any]], dict[str, Any]]], ...] = (
    ("no candidates", _with("candidates", [])),
    ("unknown field", _with("colour", "green")),
    ("unknown action", _with("weights", {"applaud": 1.0})),
    ("unequal arrays", _with("candidates", {"post_id": [1, 2], "author_id": [1]})),
    ("id out of range", _with("candidates", [{"post_id": -1, "author_id": 1}])),
    ("user id missing", lambda body: {key: value for key, value in body.items() if key != "user_id"}),
)
