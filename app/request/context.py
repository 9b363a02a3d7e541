"""A request for a context: a body → what the model reads of a user and a history."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import orjson

from app.errors import ServiceError
from app.request import features
from app.request.body import decode
from app.request.reply import ReplyFormat, tail_of
from app.request.rules import Rule, check, struct_rule
from app.request.schema import ContextRequest
from app.request.strict_json import parse
from app.request.validate import viewer_of
from app.request.vocabulary import Vocabulary
from app.settings import Limits
from model.config import ModelConfig
from model.inputs import Context


class ContextAsked(NamedTuple):
    """A valid request: `history_length` items were sent, of which `context` has the newest."""

    context: Context
    history_length: int
    request_id: str | None


class Answered(NamedTuple):
    """What the end of a reply says of a request, as `reply.Asked`."""

    history_length: int
    request_id: str | None
    handle: str | None


def read_context(body: bytes | bytearray, limits: Limits, vocabulary: Vocabulary, config: ModelConfig) -> ContextAsked:
    """By the compiled codec, or where that declines it by the plain reader. Raises MalformedJson, TooLarge or InvalidRequest."""
    codec = vocabulary.codec
    if codec is not None and (viewed := codec.read_viewer(body)) is not None:
        try:
            rest = parse(viewed.rest)
            check(rest, _rule(vocabulary, "user_id", "history"))
            return ContextAsked(viewed.context, len(viewed.posts), rest.get("request_id"))
        except ServiceError:
            pass  # the plain reader says what is wrong, in its order
    value = decode(body, limits).value
    check(value, _rule(vocabulary))
    viewer = viewer_of(value, vocabulary)
    return ContextAsked(features.context_of(viewer, config), len(viewer.history), value.get("request_id"))


def render(answered: Answered, form: ReplyFormat, *, history_used: int, timings_ms: Mapping[str, float]) -> bytes:
    """The JSON reply. `timings_ms` is written as it is."""
    return orjson.dumps({"model": form.model})[:-1] + tail_of(answered, history_used, timings_ms)


def _rule(vocabulary: Vocabulary, *without: str) -> Rule:
    return vocabulary.rule(f"context {without}", lambda: struct_rule(ContextRequest, vocabulary, *without))
