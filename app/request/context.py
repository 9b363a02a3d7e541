"""The wire of requests for a context: a body → a `Request` without candidates, and the reply that says its handle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from app.request import body, validate
from app.request.body import Body
from app.request.codec import Packed
from app.request.reply import ReplyFormat, tail_of
from app.request.validate import Request
from app.request.vocabulary import Vocabulary
from app.request.wires import Wire
from app.settings import Limits
from model.inputs import Scores


def decode(
    data: bytes | bytearray, headers: Mapping[bytes, bytes], limits: Limits, vocabulary: Vocabulary
) -> Packed | Body:
    """As `wires.Wire.decode`: by the compiled codec, or by `body.decode` if that declines."""
    packed = None if vocabulary.codec is None else vocabulary.codec.read_context(data)
    return body.decode(data, limits) if packed is None else packed


def render(
    request: Request, scores: Scores, form: ReplyFormat, *, history_used: int, timings_ms: dict[str, Any]
) -> Iterator[bytes]:
    """The JSON reply. `timings_ms` is written as it is."""
    yield orjson.dumps({"model": form.model})[:-1] + tail_of(request, history_used, timings_ms)


CONTEXTS = Wire(decode, validate.check_context, render)
