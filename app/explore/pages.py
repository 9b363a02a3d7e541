"""Serves the pages from files of the packages, and the example and the names that a checkpoint may carry. Not for what a page shows."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import anyio
import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.staticfiles import StaticFiles

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

    async def checkpoint(request: Request) -> Response:
        digest = service.model.manifest.digest
        found = await anyio.to_thread.run_sync(carried, settings.checkpoint, digest)  # a disk may be slow
        return Response(orjson.dumps(found), headers=HEADERS, media_type="application/json")

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
            Route("/explore/checkpoint.json", checkpoint),
        ]
    return APIRouter(routes=routes)


def carried(directory: Path, digest: str) -> dict[str, Any]:
    """The example and the names beside a checkpoint's manifest, each None where there is none that can be read.

    Both are None where the directory holds another checkpoint than the one of this digest: names of one world must not label another.
    """
    manifest = _read(directory / MANIFEST_NAME)
    is_it = isinstance(manifest, dict) and manifest.get("digest") == digest
    return {name: _read(directory / f"{name}.json") if is_it else None for name in ("example", "names")}


def _read(path: Path) -> Any:
    try:
        return orjson.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
