"""The forms that a request and its reply may have over HTTP, so that one endpoint serves them all. gRPC carries the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from app.request import codec, inference, reply, tensors, validate
from app.request.body import Typed
from app.request.validate import Request
from app.request.vocabulary import Vocabulary
from app.settings import Limits

JSON = b"application/json"
BINARY = b"application/octet-stream"
LENGTH = inference.LENGTH_HEADER.lower().encode()

Headers = Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Wire:
    """`decode` reads types and sizes; `check` does the rest once the request is admitted. Both raise an error for a bad request.
    `render` writes the reply in pieces."""

    decode: Callable[[bytes | bytearray, Headers, Limits, Vocabulary], Typed]
    check: Callable[[Any, Vocabulary], Request]
    render: Render


Render = Callable[..., Iterator[bytes]]
"""Request, Scores, ReplyFormat, history_used, timings_ms → the reply in pieces; binary data begins with the second."""

OBJECTS = Wire(codec.decode, validate.check, reply.render)
TENSORS = Wire(
    lambda data, headers, limits, vocabulary: inference.decode(data, limits, headers.get(LENGTH)),
    tensors.check,
    inference.render,
)


def media_type(asked: Typed | Request) -> bytes:
    """The media type of the reply."""
    return BINARY if isinstance(asked.reply, dict) and any(asked.reply.values()) else JSON
