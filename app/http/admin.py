"""The admin interface, an application for a loopback port of its own. Not for anything that a caller of the service may use."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import orjson
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.errors import InvalidRequest, NotFound, ReloadBusy, ReloadRefused, Unauthorized, UnsupportedMediaType
from app.http.asgi import Headers, read_body
from app.http.negotiation import BATCH, is_compressed, wire_of
from app.http.observe import Observe, Recorder
from app.http.problems import HANDLERS
from app.interface import Changed, CheckpointNotFound, ReloadInProgress, Reloads, Service, served_identity
from app.request import strict_json
from app.request.posts import read_change
from app.settings import LOOPBACK, Admin
from app.telemetry.logs import RequestLog
from model.engine import EngineError
from weights.corpus.manifest import CorpusManifest
from weights.errors import CheckpointError
from weights.format.manifest import Manifest

WANTED = 'must be {"checkpoint": "name"}, {"second": "name"}, {"retrieval": "name", "corpus": "name"} or {}'
RELOAD, POSTS, COMPACT = "/admin/reload", "/admin/posts", "/admin/posts/compact"
MAX_BODY_BYTES = 4096
NOT_BELOW_ROOT = "No checkpoint or corpus of that name lies below the configured root."
MAX_CHANGE_BYTES = 4 * 2**20


class AdminAuth:
    """Bearer token and local Host name; to anybody else this port shows nothing."""

    def __init__(self, settings: Admin) -> None:
        assert settings.token_sha256 is not None  # the settings insist on it
        self._digest = bytes.fromhex(settings.token_sha256.get_secret_value())
        self._hosts = {*LOOPBACK, settings.host, f"[{settings.host}]"}

    def check(self, request: Request) -> None:
        """Raises NotFound for a forged Host, which a browser on a hostile page would send, and Unauthorized."""
        host = request.headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if name.lower() not in self._hosts:
            raise NotFound
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(token.strip().encode("latin-1", "replace")).digest()
        if not hmac.compare_digest(digest, self._digest) or scheme.lower() != "bearer":
            raise Unauthorized("A valid admin token is required: Authorization: Bearer TOKEN.")


def create_admin_app(settings: Admin, reloads: Reloads, service: Service) -> Starlette:
    """`POST /admin/reload` with `{"checkpoint": "name below the root"}`, or `{}` for the present one read again; with
    `{"second": name}` the second checkpoint;
    with `{"retrieval": name, "corpus": name}` the retrieval checkpoint and the corpus as one, of which either may be left out.

    `POST /admin/posts` with `{"upsert": [{"post_id", "author_id", "created_at", "topic"}], "delete": [ids]}` changes the corpus,
    `POST /admin/posts/compact` without a body writes it anew with its changes.
    """
    auth = AdminAuth(settings)

    def described(before: object, **manifests: Manifest | CorpusManifest) -> Response:
        content: dict[str, object] = {
            what: {"name": manifest.name, "version": manifest.version, "digest": manifest.digest}
            for what, manifest in manifests.items()
        }
        content["result"] = "unchanged" if served_identity(service) == before else "reloaded"
        return Response(orjson.dumps(content), media_type="application/json")

    async def reload(request: Request) -> Response:
        auth.check(request)
        wanted, before = await _requested(request, reloads), served_identity(service)
        try:
            if wanted.keys() & {"retrieval", "corpus"}:
                served = await reloads.reload_retrieval(wanted.get("retrieval"), wanted.get("corpus"))
                return described(before, retrieval=served.manifest, corpus=served.corpus)
            if "second" in wanted:
                return described(before, second=(await reloads.reload(wanted["second"], second=True)).manifest)
            model = await reloads.reload(wanted.get("checkpoint"))
        except CheckpointNotFound:
            if wanted:  # a front's name is looked up by the engine process
                raise NotFound(NOT_BELOW_ROOT) from None
            raise ReloadRefused("The checkpoint that serves lies no longer below the configured root.") from None
        except ReloadInProgress:
            raise ReloadBusy(retry_after_seconds=5.0) from None
        except (CheckpointError, EngineError) as error:
            raise ReloadRefused(str(error)) from error
        return described(before, model=model.manifest)

    async def posts(request: Request) -> Response:
        auth.check(request)
        headers = dict(request.scope["headers"])
        _check_coding(headers)
        wanted = read_change(await read_body(headers, request.receive, MAX_CHANGE_BYTES))
        try:
            changed = await service.retrieval.change(wanted)
        except CheckpointError as error:
            raise ReloadRefused(str(error)) from error
        return _changed(changed, upserted=len(wanted.upsert.post_ids), deleted=changed.deleted)

    async def compact(request: Request) -> Response:
        auth.check(request)
        if await read_body(dict(request.scope["headers"]), request.receive, MAX_BODY_BYTES):
            raise InvalidRequest([("", "must be empty")])
        try:
            return _changed(await service.retrieval.compact())
        except ReloadInProgress:
            raise ReloadBusy(retry_after_seconds=5.0) from None
        except (CheckpointError, EngineError) as error:
            raise ReloadRefused(str(error)) from error

    calls = {RELOAD: reload, POSTS: posts, COMPACT: compact}
    return Starlette(
        routes=[Route(path, call, methods=["POST"]) for path, call in calls.items()],
        exception_handlers=HANDLERS,
        middleware=[Middleware(Observe, recorder=Recorder(service.metrics, calls, RequestLog()))],
    )


def _changed(state: Changed, **counts: int) -> Response:
    names = {"name": state.corpus.name, "version": state.corpus.version}
    corpus = names | {"posts": state.posts, "changes": state.changes}
    return Response(orjson.dumps({"corpus": corpus, **counts}), media_type="application/json")


def _check_coding(headers: Headers) -> None:
    wire_of(headers, BATCH)
    if is_compressed(headers):
        raise UnsupportedMediaType("The body must not be compressed.")


async def _requested(request: Request, reloads: Reloads) -> dict[str, Path]:
    """What the body names, found below the root."""
    headers = dict(request.scope["headers"])
    body = await read_body(headers, request.receive, MAX_BODY_BYTES)
    if not body:
        return {}
    _check_coding(headers)
    wanted = strict_json.parse(bytes(body))
    if (
        type(wanted) is not dict
        or not (
            wanted.keys() <= {"checkpoint"} or wanted.keys() == {"second"} or wanted.keys() <= {"retrieval", "corpus"}
        )
        or any(type(name) is not str for name in wanted.values())
    ):
        raise InvalidRequest([("", WANTED)])
    try:
        return {what: reloads.resolve(name) for what, name in wanted.items()}
    except CheckpointNotFound:
        raise NotFound(NOT_BELOW_ROOT) from None
