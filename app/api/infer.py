"""The Open Inference Protocol over HTTP: health, metadata, and rankings as tensors. `app.tensors` says what the tensors are."""

from __future__ import annotations

import time
from dataclasses import replace
from importlib.metadata import version as version_of
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app import DISTRIBUTION, replies, schema, tensors
from app.api.caller import CallerInfo, TensorCaller, deadline_of
from app.api.operations import NOT_NOW, Described, answers, check_ready, json_reply
from app.api.rank import note_timings
from app.api.route import JsonReply, Route
from app.api.state import state_of
from app.errors import InvalidRequest, ModelNotFound
from app.interface import RankingService, ServedModel
from app.schema import PROBLEMS, InferReply, InferRequest
from app.tensors import LENGTH_HEADER

BINARY = "application/octet-stream"
MODEL = "/models/{name}"
VERSION = MODEL + "/versions/{version}"
NO_MODEL = NOT_NOW | schema.problems_of(ModelNotFound)

router = APIRouter(prefix="/v2", tags=["open inference protocol"], route_class=Route)


class ServerMetadata(Described):
    """The server and what it supports."""

    name: str
    """Name of the distribution."""
    version: str
    """Version of the distribution."""
    extensions: list[str]
    """Extensions of the protocol that it supports."""


class TensorMetadata(Described):
    """One tensor; a size of -1 depends on the request."""

    name: str
    """Name of the tensor."""
    datatype: str
    """The protocol's name for the type of its elements."""
    shape: list[int]
    """Its sizes."""


class ModelMetadata(Described):
    """The model's inputs and outputs."""

    name: str
    """Name of the checkpoint."""
    versions: list[str]
    """The version that serves."""
    platform: str
    """Name of the software that serves it."""
    inputs: list[TensorMetadata]
    """Tensors that a request may hold."""
    outputs: list[TensorMetadata]
    """Tensors that a reply may hold."""
    parameters: dict[str, str]
    """Names of the columns of actions and of continuous outputs."""


class Live(Described):
    """The process is alive."""

    live: bool
    """Always true: a process that is not alive does not answer."""


class Ready(Described):
    """Requests may be sent here."""

    ready: bool
    """Always true: otherwise the reply is an error."""


class ModelReady(Ready):
    """Requests for this model may be sent here."""

    name: str
    """Name of the checkpoint."""


@router.get("", responses=answers(ServerMetadata), response_class=Response)
async def server() -> Response:
    """The server's name and version, and the extensions of the protocol that it supports."""
    return json_reply({"name": DISTRIBUTION, "version": version_of(DISTRIBUTION), "extensions": ["binary_tensor_data"]})


@router.get("/health/live", responses=answers(Live), response_class=Response)
async def live() -> Response:
    """The process is alive, as in `/livez`."""
    return json_reply({"live": True})


@router.get("/health/ready", responses=answers(Ready) | NOT_NOW, response_class=Response)
async def ready(request: Request) -> Response:
    """Requests may be sent here, as in `/readyz`."""
    check_ready(state_of(request).ranker)
    return json_reply({"ready": True})


@router.get(MODEL, responses=answers(ModelMetadata) | NO_MODEL, response_class=Response)
async def metadata(request: Request, name: str) -> Response:
    """The tensors of the model: names, datatypes and shapes."""
    return json_reply(tensors.describe(_model(state_of(request).ranker, name, "").manifest))


@router.get(VERSION, responses=answers(ModelMetadata) | NO_MODEL, response_class=Response)
async def version_metadata(request: Request, name: str, version: str) -> Response:
    """The tensors of this version of the model: names, datatypes and shapes."""
    return json_reply(tensors.describe(_model(state_of(request).ranker, name, version).manifest))


@router.get(f"{MODEL}/ready", responses=answers(ModelReady) | NO_MODEL, response_class=Response)
async def model_ready(request: Request, name: str) -> Response:
    """Requests for this model may be sent here, as in `/readyz`; 404 if another model serves."""
    return _model_ready(state_of(request).ranker, name, "")


@router.get(f"{VERSION}/ready", responses=answers(ModelReady) | NO_MODEL, response_class=Response)
async def version_ready(request: Request, name: str, version: str) -> Response:
    """Requests for this version of the model may be sent here, as in `/readyz`; 404 if another one serves."""
    return _model_ready(state_of(request).ranker, name, version)


def _model_ready(ranker: RankingService, name: str, version: str) -> Response:
    check_ready(ranker)
    return json_reply({"name": _model(ranker, name, version).manifest.name, "ready": True})


LENGTH = "How many bytes of the body are JSON. Binary data follows them, in the order of `inputs`."
LENGTH_OUT = "How many bytes of a reply with binary data are JSON. The data follows them, in the order of `outputs`."
INFERRED: dict[str, Any] = {
    "openapi_extra": schema.body_of(InferRequest, {LENGTH_HEADER: LENGTH}),
    "responses": schema.reply_of(InferReply, "The ranking as tensors.", {LENGTH_HEADER: LENGTH_OUT}, binary=BINARY)
    | PROBLEMS,
    "response_class": Response,
}
INFERRED["openapi_extra"]["requestBody"]["content"][BINARY] = {"schema": {"type": "string", "format": "binary"}}


@router.post(f"{MODEL}/infer", **INFERRED)
async def infer(request: Request, caller: TensorCaller, name: str) -> Response:
    """Rank one user's candidates as `/rank` does, with tensors in and out: in JSON, or as binary data after the JSON."""
    return await _infer(request, caller, name, "")


@router.post(f"{VERSION}/infer", **INFERRED)
async def version_infer(request: Request, caller: TensorCaller, name: str, version: str) -> Response:
    """Rank with this version of the model, as `/rank` does, with tensors in and out: in JSON, or as binary data after the JSON."""
    return await _infer(request, caller, name, version)


async def _infer(request: Request, caller: CallerInfo, name: str, version: str) -> Response:
    state, exchange = caller.state, caller.exchange
    model = _model(state.ranker, name, version)
    with exchange.measured("parse"):
        tensor_request = tensors.read(caller.body, request.headers.get(LENGTH_HEADER), state.settings.limits)
        if tensor_request.model_name not in (None, model.manifest.name):
            raise InvalidRequest("model_name", "must be the name in the path, or left out")
    caller = _in_time(caller, tensor_request.timeout_seconds)
    sizes = {"candidates": tensor_request.candidates, "history": tensor_request.history}
    caller.note(tensor_request.request_id, model.manifest.config, **sizes)
    place_request = caller.place_request(**sizes)
    with state.ranker.admit(model, place_request) as job:
        with exchange.measured("parse", since=exchange.spans["parse"][1]):
            checked = tensors.check(tensor_request, model.vocabulary, model.manifest.config, exchange.request_id)
        asked_at = time.perf_counter()
        ranked = await state.ranker.rank(job, checked.context, checked.candidates)
    timings = note_timings(exchange, exchange.stages["parse"], ranked, asked_at)
    with exchange.measured("serialize"):
        placement = replies.placement_of(checked, ranked.scores)
        text, binary = tensors.render(tensor_request, checked, ranked, placement, timings)
        caller.note_served(checked, ranked, placement)
    fields = replies.headers_of(model, ranked, exchange)
    if not any(tensor_request.outputs.values()):
        return JsonReply(text, fields)
    return Response(text + binary, media_type=BINARY, headers=fields | {LENGTH_HEADER: str(len(text))})


def _model(ranker: RankingService, name: str, version: str) -> ServedModel:
    """The model of this name and version, any version where it is empty. Raises NotReady or ModelNotFound."""
    return ranker.model(f"{name}@{version}" if version else name)


def _in_time(caller: CallerInfo, timeout_seconds: float | None) -> CallerInfo:
    """The caller, who waits no longer than the body says."""
    if timeout_seconds is None:
        return caller
    return replace(caller, deadline=min(deadline_of(caller.state, caller.exchange, timeout_seconds), caller.deadline))
