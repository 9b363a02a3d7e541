"""Serves the pages from files of the packages, and the example and the names that a checkpoint may carry, each read once."""

from __future__ import annotations

import asyncio
import hashlib
import mimetypes
import os
import stat
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Generic, TypeVar

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

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
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
WHAT_THERE_IS = {"rank": "/rank", "info": "/info", "docs": "/docs", "openapi": "/openapi.json"}
MOST_CARRIED_BYTES = 2**20  # of a file beside a manifest; those of the demo are 38 kB

Key = TypeVar("Key", bound=Hashable)


class Kept(Generic[Key]):
    """Bytes of the last key, made in a thread, with an ETag."""

    def __init__(self, make: Callable[[Key], bytes], media_type: str, headers: Mapping[str, str] | None = None) -> None:
        self._make = make
        self._headers = {"content-type": media_type, "cache-control": "no-cache", **(headers or {})}
        self._found: tuple[Key, asyncio.Future[tuple[bytes, str]]] | None = None

    async def reply(self, key: Key, request: Request) -> Response:
        """The bytes for this key, or 304 to a caller who has them. Raises what making them raises."""
        if self._found is None or self._found[0] != key or _has_failed(self._found[1]):
            self._found = key, asyncio.ensure_future(asyncio.to_thread(self._tagged, key))
        body, tag = await asyncio.shield(self._found[1])
        headers = {**self._headers, "etag": tag}
        known = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
        return Response(status_code=304, headers=headers) if tag in known else Response(body, headers=headers)

    def _tagged(self, key: Key) -> tuple[bytes, str]:
        body = self._make(key)
        return body, f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def _has_failed(made: asyncio.Future[tuple[bytes, str]]) -> bool:
    return made.done() and (made.cancelled() or made.exception() is not None)


def pages(service: Service, settings: Settings) -> APIRouter:
    """`/docs`; `/explore` where the settings have it; `/`, which leads there or lists what there is.

    Every address in the pages is relative, so that they work below a path of a proxy.
    """
    packages = [("fastapi_swagger", "resources"), (ROOM, "docs"), *([(ROOM, "assets")] if settings.explores else [])]
    kept = {path.name: _file(path) for package, folder in packages for path in _files(package, folder)}
    beside: Kept[str] = Kept(
        lambda digest: orjson.dumps(carried(settings.checkpoint, digest)), "application/json", HEADERS
    )

    async def page(name: str, request: Request) -> Response:
        if name not in kept:
            raise NotFound
        return await kept[name].reply(name, request)

    async def asset(request: Request) -> Response:
        return await page(request.path_params["name"], request)

    async def checkpoint(request: Request) -> Response:
        return await beside.reply(service.model.manifest.digest, request)

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
    """The example and the names beside a checkpoint's manifest, each None where there is none, or no file that can be read and kept.

    Both are None where the directory holds another checkpoint than the one of this digest: names of one world must not label another.
    """
    manifest = _read(directory / MANIFEST_NAME)
    is_it = isinstance(manifest, dict) and manifest.get("digest") == digest
    return {name: _read(directory / f"{name}.json") if is_it else None for name in ("example", "names")}


def _read(path: Path) -> Any:
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a FIFO would block
        with open(opened, "rb") as file:
            is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            found = file.read(MOST_CARRIED_BYTES + 1) if is_file else b""
        return orjson.loads(found) if len(found) <= MOST_CARRIED_BYTES else None
    except (OSError, ValueError):
        return None


def _files(package: str, folder: str) -> list[Path]:
    inside = Path(str(files(package))).joinpath(folder).iterdir()
    return [path for path in inside if path.is_file() and path.suffix != ".py"]


def _file(path: Path) -> Kept[str]:
    """A file with a content policy: its page loads nothing from elsewhere and runs only its own scripts."""
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return Kept(lambda name: path.read_bytes(), kind, HEADERS)
