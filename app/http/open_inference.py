"""The endpoints of the Open Inference Protocol besides inference: health and metadata. gRPC says the same."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import version as version_of
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from app.http.arms import described, named
from app.http.operations import NOT_NOW, PROBLEM, check_ready
from app.interface import Service

MODEL = "/v2/models/{name}"
VERSION = MODEL + "/versions/{version}"
NAME = "phoenix-ranking-server"
NO_MODEL: dict[int | str, dict[str, Any]] = {
    404: PROBLEM | {"description": "No such model serves here."},
    **NOT_NOW,
}


@cache
def describe_server() -> dict[str, Any]:
    """The protocol's metadata of the server."""
    return {"name": NAME, "version": version_of(NAME), "extensions": ["binary_tensor_data"]}


def open_inference(service: Service) -> APIRouter:
    """Health and metadata under `/v2`."""
    router = APIRouter(tags=["open inference protocol"])

    @router.get("/v2", summary="The server's name and extensions", response_model=dict[str, Any])
    async def server() -> dict[str, Any]:
        """Metadata of the Open Inference Protocol."""
        return describe_server()

    @router.get("/v2/health/live", summary="The process is alive")
    async def live() -> dict[str, bool]:
        """As `/livez`."""
        return {"live": True}

    @router.get("/v2/health/ready", summary="Requests may be sent here", responses=NOT_NOW)
    async def ready() -> dict[str, bool]:
        """As `/readyz`."""
        check_ready(service)
        return {"ready": True}

    @router.get(MODEL, summary="The tensors of the model", **_about(MODEL))
    @router.get(VERSION, summary="The tensors of a version of the model", **_about(VERSION))
    async def model(request: Request) -> dict[str, Any]:
        """Names, datatypes and shapes; -1 where a size is the request's. `parameters` name the columns of actions and quantities."""
        return described(service, **request.path_params)

    @router.get(f"{MODEL}/ready", summary="Requests for this model may be sent here", **_about(MODEL))
    @router.get(f"{VERSION}/ready", summary="Requests for this version may be sent here", **_about(VERSION))
    async def model_ready(request: Request) -> dict[str, str | bool]:
        """As `/readyz`, and 404 where another model or version serves."""
        check_ready(service)
        return {"name": named(service, **request.path_params).manifest.name, "ready": True}

    return router


def _about(path: str) -> dict[str, Any]:
    return {
        "responses": NO_MODEL,
        "response_model": dict[str, Any],
        "openapi_extra": {"parameters": path_parameters(path)},
    }


def path_parameters(path: str) -> list[dict[str, Any]]:
    """How `/openapi.json` describes the parameters in a path."""
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string"},
            "description": f"The model's {name}.",
        }
        for name in re.findall(r"{(\w+)}", path)
    ]
