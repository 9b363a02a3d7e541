"""The pages: `/docs`, `/explore`, what they load, and `/openapi.json`. All is read or made once, and nothing comes from elsewhere."""

from __future__ import annotations

import asyncio
import hashlib
import mimetypes
import os
import stat
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app import schema
from app.api.route import Route
from app.api.state import state_of
from app.errors import NotFound, ServiceError
from app.interface import RankingService
from app.replies import JSON
from app.settings import Settings
from weights.format.manifest import MANIFEST_NAME

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
WHAT_THERE_IS = {"rank": "rank", "info": "info", "docs": "docs", "openapi": "openapi.json"}
FOLDERS = (("fastapi_swagger", "resources"), ("app.explore", "docs"), ("app.explore", "assets"))
CARRIED = ("example", "names")
MOST_CARRIED_BYTES = 2**20  # of a file beside a manifest; those of the demo are 38 kB


class CachedReply:
    """The bytes of the last key, made in a thread, with an ETag."""

    def __init__(self, make: Callable[[str], bytes], media_type: str) -> None:
        self._make = make
        self._headers = HEADERS | {"content-type": media_type, "cache-control": "no-cache"}
        self._key: str | None = None
        self._body_and_tag: asyncio.Future[tuple[bytes, str]] | None = None

    async def reply(self, request: Request, key: str = "") -> Response:
        """The bytes for this key, or 304 to a caller who has them. Raises what making them raises."""
        if (
            self._body_and_tag is None
            or self._key != key
            or (self._body_and_tag.done() and self._body_and_tag.exception() is not None)
        ):
            self._key, self._body_and_tag = key, asyncio.ensure_future(asyncio.to_thread(self._tagged, key))
        body, tag = await asyncio.shield(self._body_and_tag)
        headers = self._headers | {"etag": tag}
        # no other tag contains this one with its quotes, so that the list, which may be long, need not be split
        has_it = tag in request.headers.get("if-none-match", "")
        return Response(status_code=304, headers=headers) if has_it else Response(body, 200, headers)

    def _tagged(self, key: str) -> tuple[bytes, str]:
        body = self._make(key)
        return body, f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def pages(settings: Settings, document: Callable[[], dict[str, Any]]) -> APIRouter:
    """`/docs` and `/openapi.json`, which is made of `document`; `/explore` where the settings have it; `/`, which leads there or lists
    what there is. Every address in the pages is relative, so that they work below a path of a proxy."""
    router = APIRouter(include_in_schema=False, route_class=Route)
    folders = FOLDERS if settings.explores else FOLDERS[:2]
    files = {path.name: _file(path) for folder in folders for path in _files(*folder)}
    described = CachedReply(lambda key: orjson.dumps(_with_examples(document(), key)), JSON)
    beside = CachedReply(lambda key: orjson.dumps(carried(settings.checkpoint, key.split()[0])), JSON)

    @router.get("/openapi.json")
    async def openapi(request: Request) -> Response:
        return await described.reply(request, _example_key(state_of(request).ranker))

    @router.get("/docs")
    async def docs(request: Request) -> Response:
        return await files["docs.html"].reply(request)

    @router.get("/assets/{name}")
    async def asset(name: str, request: Request) -> Response:
        if name not in files:
            raise NotFound
        return await files[name].reply(request)

    @router.get("/")
    async def root() -> Response:
        if settings.explores:
            return Response(status_code=307, headers={"location": "explore"})
        return JSONResponse(WHAT_THERE_IS)

    if settings.explores:

        @router.get("/explore")
        async def explore(request: Request) -> Response:
            return await files["explore.html"].reply(request)

        @router.get("/explore/checkpoint.json")
        async def checkpoint(request: Request) -> Response:
            digest = state_of(request).ranker.model().manifest.digest
            return await beside.reply(request, f"{digest} {_written(settings.checkpoint)}")

    return router


def _example_key(ranker: RankingService) -> str:
    """The actions of the checkpoint that serves and its kind of ids, with blanks between; X's before one does."""
    try:
        manifest = ranker.model().manifest
    except ServiceError:
        return " ".join((*schema.WORDS, "uint64"))
    return " ".join((*manifest.action_names, manifest.ids))


def _with_examples(document: dict[str, Any], key: str) -> dict[str, Any]:
    """The document with examples of the actions and the kind of ids in a key of `_example_key`."""
    *actions, ids = key.split()
    return schema.with_examples(document, actions, "text" if ids == "text" else "uint64")


def carried(directory: Path, digest: str) -> dict[str, Any]:
    """The example and the names beside a checkpoint's manifest, each None where there is none, or no file that can be read and kept.

    Both are None where the directory holds another checkpoint than the one of this digest: names of one world must not label another.
    """
    manifest = _read(directory / MANIFEST_NAME)
    is_it = isinstance(manifest, dict) and manifest.get("digest") == digest
    return {name: _read(directory / f"{name}.json") if is_it else None for name in CARRIED}


def _written(directory: Path) -> list[tuple[int, ...]]:
    """Which files these are and when they changed, so that the page shows what was made while the service runs; () where there is none."""
    identities: list[tuple[int, ...]] = []
    for name in CARRIED:
        try:
            now = (directory / f"{name}.json").stat()
            identities.append((now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns))
        except OSError:
            identities.append(())
    return identities


def _read(path: Path) -> Any:
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a FIFO would block
        with open(opened, "rb") as file:
            is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            content = file.read(MOST_CARRIED_BYTES + 1) if is_file else b""
        return orjson.loads(content) if len(content) <= MOST_CARRIED_BYTES else None
    except (OSError, ValueError):
        return None


def _files(package: str, folder: str) -> list[Path]:
    inside = Path(str(files(package))).joinpath(folder).iterdir()
    return [path for path in inside if path.is_file() and path.suffix != ".py"]


def _file(path: Path) -> CachedReply:
    """A file with a content policy: its page loads nothing from elsewhere and runs only its own scripts."""
    return CachedReply(lambda key: path.read_bytes(), mimetypes.guess_type(path.name)[0] or "application/octet-stream")
