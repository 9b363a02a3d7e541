"""`/openapi.json`: the ranking endpoints described by `schema` and `replies`, with examples that work against this checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from msgspec import Struct

from app.errors import CorpusNotLoaded, NotFound, ServiceError, general
from app.http.open_inference import MODEL, VERSION, path_parameters
from app.http.problems import MEDIA_TYPE
from app.request.replies import (
    SCHEMAS,
    BatchReply,
    ContextReply,
    ExplainReply,
    Failed,
    Health,
    Info,
    Problem,
    RankReply,
    RecommendReply,
    RetrieveReply,
)
from app.request.schema import (
    ContextRequest,
    ExplainRequest,
    RankBatch,
    RankRequest,
    RecommendRequest,
    RetrieveRequest,
    published,
)
from app.request.tensor_schema import InferReply, InferRequest
from weights.text_ids import IdKind

REF = f"{SCHEMAS}/{{name}}"
Refs = Mapping[type[Struct], dict[str, Any]]
DESCRIBED: dict[str, type[Struct]] = {"/livez": Health, "/readyz": Health, "/startupz": Health, "/info": Info}
PREFERRED = ("favorite", "dwell", "reply", "repost")
ID_FIELDS = ("user_id", "post_id", "author_id", "exclude", "explain")
RANK_MODEL = "/rank/{name}"
TIMEOUT = "X-Request-Timeout-Ms"
HEADERS_IN = {
    "X-Request-ID": "A name for this call, echoed; made when it is missing or may not go into a header.",
    TIMEOUT: "How long the caller waits, in whole milliseconds; then 504. `x-envoy-expected-rq-timeout-ms` is read too.",
    "traceparent": "W3C trace context.",
}
HEADERS_OUT = {
    "X-Request-ID": "The call's name.",
    "X-Model-Version": "Version of the checkpoint.",
    "X-Context": "The handle of the context in the cache, where one was ranked for.",
    "X-Context-Cache": "`hit` when the user's context came whole from the cache, else `miss`.",
    "Server-Timing": "Milliseconds of parse, queue, forward and serialize.",
}


def _header(name: str, text: str) -> dict[str, Any]:
    schema = {"type": "string"} | ({"pattern": "^[1-9][0-9]{0,11}$"} if name == TIMEOUT else {})
    return {"name": name, "in": "header", "required": False, "schema": schema, "description": text}


NAMED = _header(
    "X-Model-Version",
    "Version of the checkpoint that shall answer, of those that the process holds; 404 for any other.",
)


def describe_app(
    app: FastAPI, action_names: Sequence[str], *, explores: bool, ids: IdKind = "uint64"
) -> dict[str, Any]:
    """The whole document. The examples use these action names and ids of this kind; `explores`: /explain is there."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    models: list[type[Struct]] = [
        RankRequest, RankBatch, RankReply, BatchReply, InferRequest, InferReply, RetrieveRequest, RetrieveReply,
        RecommendRequest, RecommendReply, ContextRequest, ContextReply, Problem, Failed, *DESCRIBED.values(),
        *((ExplainRequest, ExplainReply) if explores else ()),
    ]  # fmt: skip
    refs, definitions = published(models, REF)
    document.setdefault("components", {}).setdefault("schemas", {}).update(definitions)
    ref = dict(zip(models, refs, strict=True))
    examples = example_requests(action_names)
    paths = _rankings(ref, examples, definitions["BatchReply"]["properties"]["results"]["items"])
    paths |= _tensors(ref) | _posts(ref, action_names) | (_explanations(ref, examples) if explores else {})
    if ids == "text":
        paths = _spelled(paths)
    document["paths"] = {path: {"post": operation} for path, operation in paths.items()} | document["paths"]
    for path in DESCRIBED.keys() & document["paths"].keys():
        answer = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]
        answer["schema"] = ref[DESCRIBED[path]]
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _rankings(ref: Refs, examples: dict[str, dict[str, Any]], result: dict[str, Any]) -> dict[str, Any]:
    """`result`: one of those of a batch."""
    batch = {"requests": [example["value"] for example in examples.values()]}
    body = _body(ref[RankRequest], examples)
    contexts = {
        name: {**example, "value": {key: example["value"][key] for key in ("user_id", "history")}}
        for name, example in examples.items()
    }
    return {
        "/rank": _operation(
            "Rank one user's candidates",
            "Scores every candidate as if it were alone: its numbers depend on the user, the history and itself. "
            "The tensors of the Open Inference Protocol are taken as well, as `application/octet-stream`; any body may be gzip.",
            body,
            ref[RankReply],
        ),
        RANK_MODEL: _operation(
            "Rank one user's candidates with one model",
            "As `/rank`, with the model of this name, or of this name and version: `name@version`. A model that is named batch is asked "
            "for as `batch@version`.",
            body,
            ref[RankReply],
            path_parameters(RANK_MODEL),
        ),
        "/rank/batch": _operation(
            "Rank several requests",
            "Each request on its own terms: one that fails carries its own problem, the others their scores. "
            "A bare array of requests is taken as well, and answered by a bare array.",
            _body(
                {"anyOf": [ref[RankBatch], {"type": "array", "minItems": 1, "items": ref[RankRequest]}]},
                {"two requests": {"value": batch}},
            ),
            {"anyOf": [ref[BatchReply], {"type": "array", "items": result}]},
        ),
        "/context": _operation(
            "Compute a user's context ahead",
            "What a ranking computes of user and history, kept in the cache that rankings use. The reply's `context` is a handle: requests "
            "of the same API key may send it in place of `user_id` and `history`. It names what is in a cache: where that is gone, they "
            "get 412 `context_unknown`, and are to be sent whole.",
            _body(ref[ContextRequest], contexts),
            ref[ContextReply],
        ),
    }


def _tensors(ref: Refs) -> dict[str, Any]:
    return {
        path: _operation(
            "Rank one user's candidates, as tensors" + (" of one version" if path.startswith(VERSION) else ""),
            "The Open Inference Protocol with its binary tensor extension: JSON, and behind it the binary data of those tensors "
            "that say so. The same tensors are taken by `/rank` as `application/octet-stream`, and over gRPC.",
            _body(ref[InferRequest], {"tensors": {"value": example_tensors()}}),
            ref[InferReply],
            path_parameters(path),
        )
        for path in (f"{MODEL}/infer", f"{VERSION}/infer")
    }


def _posts(ref: Refs, action_names: Sequence[str]) -> dict[str, Any]:
    posts, scores = retrieval_examples(action_names)
    return {
        "/retrieve": _operation(
            "Retrieve posts for a user",
            "The best posts of the corpus by the cosine of two vectors, exactly: filters come first, equal scores go by row.",
            _body(ref[RetrieveRequest], posts),
            ref[RetrieveReply],
            (),
            [CorpusNotLoaded],
        ),
        "/recommend": _operation(
            "Retrieve posts and rank them",
            "What /rank says of what /retrieve returns, within one deadline.",
            _body(ref[RecommendRequest], scores),
            ref[RecommendReply],
            more_failures=[CorpusNotLoaded],
        ),
    }


def _explanations(ref: Refs, examples: dict[str, dict[str, Any]]) -> dict[str, Any]:
    asked = {
        name: {"summary": example["summary"], "value": example["value"] | {"explain": [90]}}
        for name, example in examples.items()
    }
    explained = _operation(
        "Explain why candidates stand where they stand",
        "What each event, the user and all of it together change in the scores, as /rank says it of the request without them; and what "
        "the model attends to, in float32 by the plain definition. Attention is not an explanation, so both stand side by side.",
        _body(ref[ExplainRequest], asked),
        ref[ExplainReply],
    )
    return {"/explain": explained}


def example_requests(action_names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """One request in both shapes, in words that the checkpoint knows."""
    known = [name for name in PREFERRED if name in action_names] or list(action_names[:2])
    weights = {known[0]: 1.0} | ({"report": -20.0} if "report" in action_names else {})
    objects = {
        "user_id": "1868434417286410240",
        "history": [
            {"post_id": 17, "author_id": 5, "actions": known[:2], "product_surface": 0, "dwell_time": 12.5},
            {"post_id": 18, "author_id": 6, "actions": {known[-1]: 1.0}, "product_surface": 1},
        ],
        "candidates": [
            {"post_id": 90, "author_id": 7, "product_surface": 0, "created_at": 1779990000},
            {"post_id": "9223372036854775808", "author_id": "5", "created_at": 1779900000},
        ],
        "impression_ts": 1780000000,
        "weights": weights,
    }
    arrays = {
        "user_id": "1868434417286410240",
        "history": {
            "post_id": [17, 18],
            "author_id": [5, 6],
            "actions": [known[:2], known[-1:]],
            "dwell_time": [12.5, 0],
        },
        "candidates": {"post_id": [90, 91, 92], "author_id": [7, 5, 6], "created_at": [1779990000, 1779900000, 0]},
        "impression_ts": 1780000000,
        "top_k": 2,
        "actions_wanted": known[:1],
    }
    return {
        "lists of objects": {"summary": "Lists of objects", "value": objects},
        "arrays": {"summary": "Arrays: the fast form", "value": arrays},
    }


def _spelled(value: Any, *, is_id: bool = False) -> Any:
    """The same with texts for the ids in examples, and for the tensors that hold them."""
    if isinstance(value, dict):
        has_ids = value.get("datatype") == "UINT64"
        told = {
            name: _spelled(inner, is_id=name in ID_FIELDS or (has_ids and name == "data"))
            for name, inner in value.items()
        }
        return told | ({"datatype": "BYTES"} if has_ids else {})
    if isinstance(value, list):
        return [_spelled(each, is_id=is_id) for each in value]
    return f"id-{value}" if is_id and isinstance(value, int | str) else value


def example_tensors() -> dict[str, Any]:
    """A small request as tensors, which any checkpoint takes."""
    ids = {"user_id": [7], "candidates.post_id": [90, 91], "candidates.author_id": [7, 5]}
    ids |= {"history.post_id": [17], "history.author_id": [5]}
    inputs = [
        {"name": name, "datatype": "UINT64", "shape": [len(values)], "data": values} for name, values in ids.items()
    ]
    return {"inputs": inputs, "outputs": [{"name": "post_id"}, {"name": "score"}]}


def retrieval_examples(action_names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """One request for /retrieve and one for /recommend, in words that the checkpoints know."""
    known = [name for name in PREFERRED if name in action_names] or list(action_names[:1])
    viewer = {
        "user_id": "1868434417286410240",
        "history": [{"post_id": 17, "author_id": 5, "actions": known[:1], "dwell_time": 12.5}],
    }
    posts = viewer | {"k": 20, "exclude": ["18"], "min_score": -0.5}
    scores = viewer | {"k": 50, "top_k": 5, "weights": {known[0]: 1.0}, "actions_wanted": known[:1]}
    return {"posts": {"summary": "Posts", "value": posts}}, {"posts": {"summary": "Posts with scores", "value": scores}}


def _body(schema: dict[str, Any], examples: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": schema, "examples": examples}}}


def _operation(
    summary: str,
    description: str,
    body: dict[str, Any],
    reply: dict[str, Any],
    more_parameters: Sequence[dict[str, Any]] = (NAMED,),
    more_failures: Sequence[type[ServiceError]] = (),
) -> dict[str, Any]:
    inward = [_header(name, text) for name, text in HEADERS_IN.items()]
    outward = {name: {"schema": {"type": "string"}, "description": text} for name, text in HEADERS_OUT.items()}
    answers: dict[str, Any] = {
        "200": {"description": "The ranking.", "content": {"application/json": {"schema": reply}}, "headers": outward}
    }
    failures: list[type[ServiceError]] = [*general(), NotFound, *more_failures]
    for status in sorted({failure.status for failure in failures}):
        kinds = [failure for failure in failures if failure.status == status]
        text = " ".join(f"`{kind.code}`: {(kind.__doc__ or '').splitlines()[0]}" for kind in kinds)
        schema = {"$ref": REF.format(name="Problem")}
        answers[str(status)] = {"description": text, "content": {MEDIA_TYPE: {"schema": schema}}}
    return {
        "tags": ["ranking"],
        "summary": summary,
        "description": description,
        "operationId": summary.lower().replace(" ", "_").replace("'", "").replace(",", ""),
        "parameters": [*more_parameters, *inward],
        "requestBody": body,
        "responses": answers,
        "security": [{}, {"key": []}],
    }
