"""What FastAPI's document says of bodies and replies: their schemas, examples, headers and problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from app import errors
from app.schema.fields import REF
from app.schema.replies import (
    BatchReply,
    ContextReply,
    ExplainReply,
    Failed,
    Problem,
    RankReply,
    RecommendReply,
    RetrieveReply,
)
from app.schema.requests import (
    BatchRequest,
    ContextRequest,
    ExplainRequest,
    RankRequest,
    RecommendRequest,
    RetrieveRequest,
)
from app.schema.tensors import InferReply, InferRequest

_ITEM = {"post_id": 17, "author_id": 5, "actions": ["favorite", "dwell"], "product_surface": 0, "dwell_time": 12.5}
_USER = {"user_id": "1868434417286410240", "history": [_ITEM]}
_OBJECTS: dict[str, Any] = _USER | {
    "candidates": [
        {"post_id": 90, "author_id": 7, "product_surface": 0, "created_at": 1779990000},
        {"post_id": "9223372036854775808", "author_id": "5", "created_at": 1779900000},
    ],
    "impression_ts": 1780000000,
    "weights": {"favorite": 1.0, "reply": 5.0},
}
_COLUMNS: dict[str, Any] = {
    "user_id": "1868434417286410240",
    "history": {"post_id": [17, 18], "author_id": [5, 6], "actions": [["favorite", "dwell"], ["reply"]]},
    "candidates": {"post_id": [90, 91, 92], "author_id": [7, 5, 6], "created_at": [1779990000, 1779900000, 0]},
    "impression_ts": 1780000000,
    "top_k": 2,
    "actions_wanted": ["favorite"],
}
_TENSORS: dict[str, Any] = {
    "inputs": [
        {"name": "user_id", "datatype": "UINT64", "shape": [1], "data": [1868434417286410240]},
        {"name": "candidates.post_id", "datatype": "UINT64", "shape": [2], "data": [90, 9223372036854775808]},
        {"name": "candidates.author_id", "datatype": "UINT64", "shape": [2], "data": [7, 5]},
        {"name": "history.post_id", "datatype": "UINT64", "shape": [1], "data": [17]},
        {"name": "history.author_id", "datatype": "UINT64", "shape": [1], "data": [5]},
        {"name": "history.actions", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 1.0]},
    ],
    "outputs": [{"name": "post_id"}, {"name": "score"}],
    "parameters": {"actions": "favorite,dwell", "impression_ts": 1780000000},
}
EXAMPLES: dict[type[Struct], dict[str, dict[str, Any]]] = {
    ContextRequest: {"user and history": _USER},
    RankRequest: {"objects": _OBJECTS, "columns": _COLUMNS},
    BatchRequest: {"two requests": {"requests": [_OBJECTS, _COLUMNS]}},
    ExplainRequest: {"objects": _OBJECTS | {"explain": [90]}},
    RetrieveRequest: {"posts": _USER | {"k": 20, "exclude": ["18"], "min_score": -0.5}},
    RecommendRequest: {"posts": _USER | {"k": 50, "top_k": 5, "actions_wanted": ["favorite"]}},
    InferRequest: {"tensors": _TENSORS},
}
"""Bodies for `/docs`, by the kind of request; the demo checkpoint takes all of them."""

REPLIES = (
    RankReply, ContextReply, BatchReply, ExplainReply, RetrieveReply, RecommendReply, InferReply, Problem, Failed,
)  # fmt: skip
PROBLEM_TYPE = "application/problem+json"
_PROBLEM_KINDS: tuple[type[errors.ServiceError], ...] = (
    errors.MalformedJson,
    errors.BadRequest,
    errors.Unauthorized,
    errors.NotFound,
    errors.ContextUnknown,
    errors.TooLarge,
    errors.UnsupportedMediaType,
    errors.InvalidRequest,
    errors.Overloaded,
    errors.NonFiniteScores,
    errors.NotReady,
    errors.Draining,
    errors.EngineDown,
    errors.DeadlineExceeded,
)
_HEADERS_IN = {
    "X-Request-ID": "A name for this call, echoed; made when it is missing or may not go into a header.",
    "X-Request-Timeout-Ms": "How long the caller waits, in whole milliseconds; then 504. `x-envoy-expected-rq-timeout-ms` is read too.",
    "traceparent": "W3C trace context.",
}
_HEADERS_OUT = {
    "X-Request-ID": "The call's name.",
    "X-Model-Version": "Version of the checkpoint.",
    "X-Context": "The handle of the context in the cache, where one was ranked for.",
    "X-Context-Cache": "`hit` when the user's context came whole from the cache, else `miss`.",
    "Server-Timing": "Milliseconds of parse, queue, forward and serialize.",
}


def components() -> dict[str, Any]:
    """The JSON Schemas of all bodies and replies by name, for `components.schemas` of the document."""
    _, found = msgspec.json.schema_components([*EXAMPLES, *REPLIES], ref_template=REF)
    _type_choices(found)
    return found


def _type_choices(schema: Any) -> None:
    """Say of every choice that it is a string; generators of clients want to know."""
    if isinstance(schema, dict) and isinstance(schema.get("enum"), list):
        schema["type"] = "string"
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _type_choices(inner)


def body_of(kind: type[Struct], further: Mapping[str, str] | None = None) -> dict[str, Any]:
    """`openapi_extra` of a route that takes this request: its schema, examples and headers. `further`: headers with their descriptions."""
    examples = {name: {"summary": name.capitalize(), "value": value} for name, value in EXAMPLES[kind].items()}
    content = {"schema": {"$ref": REF.format(name=kind.__name__)}, "examples": examples}
    headers = [
        {"name": name, "in": "header", "required": False, "schema": {"type": "string"}, "description": text}
        for name, text in (_HEADERS_IN | dict(further or {})).items()
    ]
    return {"requestBody": {"required": True, "content": {"application/json": content}}, "parameters": headers}


def reply_of(kind: type[Struct], description: str) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that answers 200 with this reply."""
    headers = {name: {"schema": {"type": "string"}, "description": text} for name, text in _HEADERS_OUT.items()}
    content = {"application/json": {"schema": {"$ref": REF.format(name=kind.__name__)}}}
    return {200: {"description": description, "content": content, "headers": headers}}


def problems_of(*kinds: type[errors.ServiceError]) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that answers with these problems."""
    content = {PROBLEM_TYPE: {"schema": {"$ref": REF.format(name="Problem")}}}
    found: dict[int | str, dict[str, Any]] = {}
    for kind in sorted(kinds, key=lambda kind: kind.status):
        text = f"`{kind.code}`: {(kind.__doc__ or '').splitlines()[0]}"
        before = found.get(kind.status)
        found[kind.status] = {"description": f"{before['description']} {text}" if before else text, "content": content}
    return found


PROBLEMS = problems_of(*_PROBLEM_KINDS)
"""`responses` of every route that ranks."""
