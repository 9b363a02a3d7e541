"""The forms that a request and its reply may have over HTTP, so that one endpoint serves them all. gRPC carries the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from app.request import body, inference, reply, tensors, validate
from app.request.body import Typed
from app.request.reply import ReplyFormat
from app.request.validate import Request
from app.request.vocabulary import Vocabulary
from app.settings import Limits
from model.inputs import Scores

JSON = b"application/json"
BINARY = b"application/octet-stream"
LENGTH = inference.LENGTH_HEADER.lower().encode()

Headers = Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Wire:
    """`decode` reads types and sizes; `check` the rest, once there is room for the request. Each raises what is wrong."""

    decode: Callable[[bytes | bytearray, Headers, Limits, Vocabulary], Typed]
    check: Callable[[Any, Vocabulary], Request]


Render = Callable[..., Iterator[bytes]]
"""Request, Scores, ReplyFormat, history_used, timings_ms → the reply in pieces."""


def _decode_objects(data: bytes | bytearray, headers: Headers, limits: Limits, vocabulary: Vocabulary) -> Typed:
    packed = None if vocabulary.codec is None else vocabulary.codec.read(data)
    return body.decode(data, limits) if packed is None else packed


OBJECTS = Wire(_decode_objects, validate.check)
TENSORS = Wire(
    lambda data, headers, limits, vocabulary: inference.decode(data, limits, headers.get(LENGTH)),
    tensors.check,
)


def media_type(asked: Typed | Request) -> bytes:
    """Of the reply."""
    return BINARY if isinstance(asked.reply, dict) and any(asked.reply.values()) else JSON


def render(
    request: Request, scores: Scores, form: ReplyFormat, *, history_used: int, timings_ms: dict[str, float]
) -> Iterator[bytes]:
    """The reply in the form that the request asks for, in pieces; binary data begins with the second."""
    write = reply.render if isinstance(request.reply, str) else inference.render
    return write(request, scores, form, history_used=history_used, timings_ms=timings_ms)
