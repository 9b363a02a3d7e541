"""Serves the pages from files of the packages, and the example and the names that a checkpoint may carry. Not for what a page shows."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.staticfiles import StaticFiles

from app.errors import NotFound
from app.interface import Service
from app.settings import Settings
from weights.format.manifest import MANIFEST_NAME

ROOM = __package__ or ""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "cache-control": "no-cache",  # kept, and asked for again by its ETag
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
WHAT_THERE_IS = {"rank": "/rank", "info": "/info", "docs": "/docs", "openapi": "/openapi.json"}


class Files(StaticFiles):
    """Files with ETags, under a policy by which a page loads nothing from elsewhere and runs no script but its files."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        """As StaticFiles: 304 where the caller has the file."""
        response = super().file_response(*args, **options)
        response.headers.update(HEADERS)
        return response


def pages(service: Service, settings: Settings) -> APIRouter:
    """`/docs`; `/explore` where the settings have it; `/`, which leads there or lists what there is.

    Every address in the pages is relative, so that they work below a path of a proxy.
    """
    packages: list[str | tuple[str, str]] = [("fastapi_swagger", "resources"), (ROOM, "docs")]
    if settings.explores:
        packages.append((ROOM, "assets"))
    files = Files(packages=packages)

    async def asset(request: Request) -> Response:
        return await files.get_response(request.path_params["name"], request.scope)

    async def page(name: str, request: Request) -> Response:
        return await files.get_response(name, request.scope)

    async def from_checkpoint(name: str, request: Request) -> Response:
        path = await anyio.to_thread.run_sync(
            find_beside, settings.checkpoint, name, service.model.manifest.digest
        )  # a disk may be slow
        return files.file_response(path, os.stat(path), request.scope)

    async def root(request: Request) -> Response:
        if settings.explores:
            return Response(status_code=307, headers={"location": "explore"})
        return JSONResponse(WHAT_THERE_IS)

    routes: list[BaseRoute] = [
        Route("/", root),
        Route("/docs", partial(page, "docs.html")),
        Route("/assets/{name}", asset),
    ]
    if settings.explores:
        routes += [
            Route("/explore", partial(page, "explore.html")),
            *(Route(f"/explore/{name}", partial(from_checkpoint, name)) for name in ("example.json", "names.json")),
        ]
    return APIRouter(routes=routes)


def find_beside(directory: Path, name: str, digest: str) -> Path:
    """A file in a checkpoint's directory. Raises NotFound where there is none, or where the directory holds another checkpoint than
    the one of this digest: names of one world must not label another."""
    try:
        held = json.loads((directory / MANIFEST_NAME).read_bytes())["digest"]
    except (OSError, ValueError, TypeError, KeyError):
        held = None
    path = directory / name
    if held != digest or not path.is_file():
        raise NotFound("The checkpoint that serves carries no such file.")
    return path
