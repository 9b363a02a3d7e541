"""Builds simple requests as bytes, ready to send. For realistic traffic see `traffic`."""

from __future__ import annotations

from collections.abc import Mapping

import orjson


def post(host: str, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """A POST over HTTP/1.1, with a JSON body unless the headers say another Content-Type."""
    fields = {"Content-Type": "application/json"} | dict(headers or {})
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def rank_body(user: int, candidates: int = 16, history: int = 3) -> bytes:
    """A small, deterministic body for `POST /rank`. No two users share candidates."""
    posts = [user * 10_000 + number for number in range(1, candidates + 1)]
    past = list(range(1, history + 1))
    content = {
        "user_id": user,
        "history": {"post_id": past, "author_id": past},
        "candidates": {"post_id": posts, "author_id": posts},
    }
    return orjson.dumps(content)


def rank_request(user: int, candidates: int = 16, headers: Mapping[str, str] | None = None) -> bytes:
    """The whole request with the body of `rank_body`."""
    return post("localhost", "/rank", rank_body(user, candidates), headers)
