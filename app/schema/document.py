"""The parts of the OpenAPI document that describe bodies and replies: schemas, examples, headers and errors."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
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
from weights.text_ids import IdKind

WORDS = ("favorite", "dwell", "reply")
"""Actions of the examples, where the checkpoint has them."""
Examples = dict[type[Struct], dict[str, dict[str, Any]]]


def examples_of(actions: Sequence[str], ids: IdKind) -> Examples:
    """Bodies for `/docs`, by the kind of request, which a checkpoint with these actions and ids takes."""
    named = sorted(actions, key=lambda name: WORDS.index(name) if name in WORDS else len(WORDS))[: len(WORDS)]
    first, second, third = (named[place % len(named)] for place in range(len(WORDS)))
    two = list(dict.fromkeys((first, second)))
    is_text = ids == "text"
    user: Any = "user-1" if is_text else "1868434417286410240"
    seen, other, new, newest, last = (
        ("post-17", "post-18", "post-90", "post-91", "post-92") if is_text else (17, 18, 90, 91, 92)
    )
    author, writer, third_author = ("author-5", "author-7", "author-6") if is_text else (5, 7, 6)
    item = {"post_id": seen, "author_id": author, "actions": two, "product_surface": 0, "dwell_time": 12.5}
    viewer = {"user_id": user, "history": [item]}
    objects: dict[str, Any] = viewer | {
        "candidates": [
            {"post_id": new, "author_id": writer, "product_surface": 0, "created_at": 1779990000},
            {
                "post_id": newest if is_text else "9223372036854775808",
                "author_id": str(author),
                "created_at": 1779900000,
            },
        ],
        "impression_ts": 1780000000,
        "weights": {third: 5.0} | {first: 1.0},
    }
    columns: dict[str, Any] = {
        "user_id": user,
        "history": {"post_id": [seen, other], "author_id": [author, third_author], "actions": [two, [third]]},
        "candidates": {
            "post_id": [new, newest, last],
            "author_id": [writer, author, third_author],
            "created_at": [1779990000, 1779900000, 0],
        },
        "impression_ts": 1780000000,
        "top_k": 2,
        "actions_wanted": [first],
    }
    named_by = {"uint64": "UINT64", "text": "BYTES"}[ids]

    def tensor(name: str, *data: Any) -> dict[str, Any]:
        return {"name": name, "datatype": named_by, "shape": [len(data)], "data": [*data]}

    tensors: dict[str, Any] = {
        "inputs": [
            tensor("user_id", user if is_text else int(user)),
            tensor("candidates.post_id", new, newest if is_text else 9223372036854775808),
            tensor("candidates.author_id", writer, author),
            tensor("history.post_id", seen),
            tensor("history.author_id", author),
            {"name": "history.actions", "datatype": "FP32", "shape": [1, len(two)], "data": [1.0] * len(two)},
        ],
        "outputs": [{"name": "post_id"}, {"name": "score"}],
        "parameters": {"actions": ",".join(two), "impression_ts": 1780000000},
    }
    return {
        ContextRequest: {"user and history": viewer},
        RankRequest: {"objects": objects, "columns": columns},
        BatchRequest: {"two requests": {"requests": [objects, columns]}},
        ExplainRequest: {"objects": objects | {"explain": [new]}},
        RetrieveRequest: {"posts": viewer | {"k": 20, "exclude": [str(other)], "min_score": -0.5}},
        RecommendRequest: {"posts": viewer | {"k": 50, "top_k": 5, "actions_wanted": [first]}},
        InferRequest: {"tensors": tensors},
    }


EXAMPLES = examples_of(WORDS, "uint64")
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
    "X-Request-ID": "A name for this call, echoed and logged: 1 to 128 letters, digits or `_.:@/+=-`. Otherwise the service makes one.",
    "X-Request-Timeout-Ms": "How long you wait, in whole milliseconds; after that you get 504. `x-envoy-expected-rq-timeout-ms` works too.",
    "traceparent": "W3C trace context.",
}
_HEADERS_OUT = {
    "X-Request-ID": "The name of this call in the log.",
    "X-Model-Version": "Version of the checkpoint.",
    "X-Context": "The handle of the ranking model's context, if the cache keeps it; for a batch, if it has one ranking.",
    "X-Context-Cache": "`hit` if all of the user's context came from the cache, `prefix` if its beginning did, otherwise `miss`. "
    "/rank/batch and /retrieve say `hit` or `miss` only.",
    "Server-Timing": "Milliseconds by stage, such as `read`, `parse`, `queue`, `forward` and `serialize`.",
}


def components() -> dict[str, Any]:
    """The JSON Schemas of all bodies and replies by name, for `components.schemas` of the document."""
    _, schemas = msgspec.json.schema_components([*EXAMPLES, *REPLIES], ref_template=REF)
    _type_choices(schemas)
    return schemas


def _type_choices(schema: Any) -> None:
    """Give every enum the type `string`, which client generators need."""
    if isinstance(schema, dict) and isinstance(schema.get("enum"), list):
        schema["type"] = "string"
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _type_choices(inner)


def body_of(kind: type[Struct], further: Mapping[str, str] | None = None) -> dict[str, Any]:
    """`openapi_extra` of a route that takes this request: its schema, examples and headers. `further`: more headers by name."""
    content = {"schema": {"$ref": REF.format(name=kind.__name__)}, "examples": _listed(EXAMPLES[kind])}
    headers = [
        {"name": name, "in": "header", "required": False, "schema": {"type": "string"}, "description": text}
        for name, text in (_HEADERS_IN | dict(further or {})).items()
    ]
    return {"requestBody": {"required": True, "content": {"application/json": content}}, "parameters": headers}


def with_examples(document: dict[str, Any], actions: Sequence[str], ids: IdKind) -> dict[str, Any]:
    """The document with examples that a checkpoint with these actions and ids takes, as a copy."""
    document, examples_by_kind = copy.deepcopy(document), examples_of(actions, ids)
    by_name = {REF.format(name=kind.__name__): examples for kind, examples in examples_by_kind.items()}
    for operation in (operation for path in document["paths"].values() for operation in path.values()):
        for content in operation.get("requestBody", {}).get("content", {}).values():
            if (examples := by_name.get(content["schema"].get("$ref"))) is not None:
                content["examples"] = _listed(examples)
    return document


def _listed(examples: Mapping[str, Any]) -> dict[str, Any]:
    return {name: {"summary": name.capitalize(), "value": value} for name, value in examples.items()}


def reply_of(
    kind: type[Struct], description: str, further: Mapping[str, str] | None = None, *, binary: str = ""
) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that answers 200 with this reply. `further`: more headers. `binary`: the media type of a binary form."""
    texts = _HEADERS_OUT | dict(further or {})
    headers = {name: {"schema": {"type": "string"}, "description": text} for name, text in texts.items()}
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": REF.format(name=kind.__name__)}}}
    if binary:
        content[binary] = {"schema": {"type": "string", "format": "binary"}}
    return {200: {"description": description, "content": content, "headers": headers}}


def problems_of(*kinds: type[errors.ServiceError]) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that can answer with these errors."""
    content = {PROBLEM_TYPE: {"schema": {"$ref": REF.format(name="Problem")}}}
    responses: dict[int | str, dict[str, Any]] = {}
    for kind in sorted(kinds, key=lambda kind: kind.status):
        meaning = (kind.__doc__ or "").partition("\n")[0]  # PYTHONOPTIMIZE=2 removes docstrings
        text = f"`{kind.code}`: {meaning}" if meaning else f"`{kind.code}`"
        before = responses.get(kind.status)
        responses[kind.status] = {
            "description": f"{before['description']} {text}" if before else text,
            "content": content,
        }
    return responses


PROBLEMS = problems_of(*_PROBLEM_KINDS)
"""`responses` of every route that ranks."""
