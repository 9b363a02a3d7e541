"""Contexts: a request names one by its handle, or asks for one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from app.request import codec, features, inference, retrieval, tensors
from app.request.body import decode
from app.request.codec import Packed
from app.request.context import CONTEXTS
from app.request.validate import Request, check, check_explain
from app.request.vocabulary import Vocabulary
from model.inputs import Context
from tests.app.request.test_codec import CODEC, LIMITS, MANIFEST, problems
from tests.app.serving import VOCABULARY, good

HANDLE = "0123456789abcdef" * 2
SPOKEN = replace(VOCABULARY, codec=CODEC)
ILL_FORMED = ("", "0" * 31, "0" * 33, "A" * 32, "g" * 32, HANDLE + "\n", "\u0660" * 32, 0, None, [HANDLE])
MODELS = [retrieval.Reading(SPOKEN, MANIFEST.config)] * 2


def by_handle(**changes: Any) -> dict[str, Any]:
    return good(**{"user_id": ..., "history": ..., "context": HANDLE} | changes)


def test_a_handle_stands_for_user_and_history() -> None:
    raw = orjson.dumps(by_handle())
    packed = CODEC.read(raw)
    assert isinstance(packed, Packed)
    for typed in (packed, decode(raw, LIMITS)):
        assert (typed.handle, typed.user_id, typed.count("history"), typed.count("candidates")) == (HANDLE, 0, 0, 3)
    request, context, _ = packed.unpack(MANIFEST.config)
    plain = check(decode(raw, LIMITS), VOCABULARY)
    for each in (request, plain, check_explain(decode(orjson.dumps(by_handle(explain=[90])), LIMITS), VOCABULARY)[0]):
        assert (each.handle, each.user_id, each.history_length) == (HANDLE, 0, 0)
    assert (context.user_id, len(context)) == (0, 0)
    whole = CODEC.read(orjson.dumps(good()))
    assert isinstance(whole, Packed)
    assert whole.handle is None


@pytest.mark.parametrize("changes", [{"user_id": 1}, {"history": []}, {"user_id": 1, "history": []}])
def test_a_handle_beside_what_it_stands_for_is_refused(changes: dict[str, Any]) -> None:
    raw = orjson.dumps(by_handle(**changes))
    assert CODEC.read(raw) is None
    told = problems(lambda: check(decode(raw, LIMITS), VOCABULARY))
    assert told == [("context", "stands in place of user_id and history, which must not be there as well")]
    wishes = orjson.dumps({"context": HANDLE, "k": 2} | changes)
    assert problems(lambda: read_posts(wishes)) == told


def test_neither_is_refused() -> None:
    raw = orjson.dumps(by_handle(context=...))
    assert CODEC.read(raw) is None
    told = problems(lambda: check(decode(raw, LIMITS), VOCABULARY))
    assert told == problems(lambda: read_posts(b"{}")) == [("user_id", "is required, or context in its place")]


@pytest.mark.parametrize("handle", ILL_FORMED)
def test_what_is_no_handle_is_refused(handle: Any) -> None:
    raw = orjson.dumps(by_handle(context=handle))
    assert CODEC.read(raw) is None
    ((field, sentence),) = problems(lambda: check(decode(raw, LIMITS), VOCABULARY))
    assert field == "context"
    assert "32 lower-case hexadecimal" in sentence


def read_posts(raw: bytes) -> retrieval.PostsRequest:
    return retrieval.check_posts(retrieval.read_posts(raw, LIMITS, MODELS), MODELS)


@pytest.mark.parametrize("compiled", [True, False])
def test_posts_for_a_handle(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = orjson.dumps({"context": HANDLE, "k": 2, "exclude": [5]})
    if not compiled:
        monkeypatch.setattr(codec.Codec, "read_viewer", lambda *_: None)
    asked = read_posts(raw)
    assert (asked.handle, asked.excludes_history, asked.query.filters.exclude.tolist()) == (HANDLE, True, [5])
    assert asked.context is not None
    assert (len(asked.query.context), len(asked.context)) == (0, 0)
    assert not read_posts(orjson.dumps({"context": HANDLE, "exclude_history": False})).excludes_history
    whole = read_posts(orjson.dumps({"user_id": 1}))
    assert (whole.handle, whole.excludes_history) == (None, False)


def infer(parameters: dict[str, Any], *more: str) -> Any:
    columns = {"candidates.post_id": [90, 91], "candidates.author_id": [7, 5]} | {name: [3] for name in more}
    inputs = [{"name": name, "datatype": "UINT64", "shape": [len(ids)], "data": ids} for name, ids in columns.items()]
    body = orjson.dumps({"inputs": inputs, "parameters": parameters})
    typed = inference.decode(body, LIMITS, None)
    assert typed.handle == parameters.get("context")
    return tensors.check(typed, VOCABULARY)


def test_a_handle_beside_tensors() -> None:
    request = infer({"context": HANDLE})
    assert (request.handle, request.user_id, request.history_length) == (HANDLE, 0, 0)
    assert infer({}, "user_id").handle is None
    both = [("parameters.context", "stands in place of user_id and history, which must not be there as well")]
    assert problems(lambda: infer({"context": HANDLE}, "user_id")) == both
    assert problems(lambda: infer({"context": HANDLE}, "history.post_id", "history.author_id")) == both
    assert problems(lambda: infer({})) == [("user_id", "is required, or context in its place")]
    assert problems(lambda: infer({"context": "x"}))[0][0] == "parameters.context"


def read_context(asked: Any, words: Vocabulary) -> tuple[Request, Context]:
    typed = CONTEXTS.decode(orjson.dumps(asked), {}, LIMITS, words)
    assert isinstance(typed, Packed) == (words.codec is not None)
    if isinstance(typed, Packed):
        request, context, candidates = typed.unpack(MANIFEST.config)
        assert len(candidates) == 0
        return request, context
    request = CONTEXTS.check(typed, words)
    return request, features.context_of(request, MANIFEST.config)


@pytest.mark.parametrize("history", [..., good()["history"], good()["history"] * 40])
def test_a_request_for_a_context_reads_what_a_ranking_reads(history: Any) -> None:
    asked = {
        name: value for name, value in good(history=history).items() if name in ("user_id", "history", "request_id")
    }
    packed = CODEC.read(orjson.dumps(good(history=history)))
    assert isinstance(packed, Packed)
    request, context, _ = packed.unpack(MANIFEST.config)
    for words in (SPOKEN, replace(SPOKEN, codec=None)):
        found, read = read_context(asked, words)
        assert (found.history_length, found.request_id) == (request.history_length, "page-7")
        assert (len(found.candidates), read.dropped) == (0, context.dropped)
        for name in ("user_id", "post_ids", "author_ids", "actions", "surfaces", "dwell_seconds"):
            assert np.array_equal(getattr(read, name), getattr(context, name))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"context": HANDLE}, ""),
        ({"user_id": 1, "top_k": 1}, ""),
        ({"user_id": "x"}, "user_id"),
        ({"user_id": 1, "request_id": None}, "request_id"),
        ({"user_id": 1, "request_id": " "}, "request_id"),
        ({"user_id": 1, "candidates": []}, ""),
    ],
)
def test_a_request_for_a_context_takes_nothing_else(body: Any, field: str) -> None:
    for words in (SPOKEN, replace(SPOKEN, codec=None)):
        typed = CONTEXTS.decode(orjson.dumps(body), {}, LIMITS, words)
        assert not isinstance(typed, Packed)
        assert problems(lambda: CONTEXTS.check(typed, words))[0][0] == field  # noqa: B023
