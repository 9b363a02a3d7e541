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

from app.errors import InvalidRequest, NotFound, ReloadBusy, ReloadRefused, Unauthorized
from app.http.asgi import check_media_type, read_body
from app.http.observe import Observe, Recorder
from app.http.problems import HANDLERS
from app.interface import CheckpointNotFound, ReloadInProgress, Reloads
from app.request import strict_json
from app.settings import Admin
from app.telemetry.logs import RequestLog
from app.telemetry.metrics import Metrics
from model.engine import EngineError
from weights.errors import CheckpointError

PATH = "/admin/reload"
MAX_BODY_BYTES = 4096
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


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


def create_admin_app(settings: Admin, reloads: Reloads, metrics: Metrics) -> Starlette:
    """`POST /admin/reload` with `{"checkpoint": "name below the root"}`, or `{}` for the present one read again."""
    auth = AdminAuth(settings)

    async def reload(request: Request) -> Response:
        auth.check(request)
        path = await _requested(request, reloads)
        try:
            model = await reloads.reload(path)
        except ReloadInProgress:
            raise ReloadBusy(retry_after_seconds=5.0) from None
        except (CheckpointError, EngineError) as error:
            raise ReloadRefused(str(error)) from error
        manifest = model.manifest
        content = {"name": manifest.name, "version": manifest.version, "digest": manifest.digest}
        return Response(orjson.dumps({"model": content}), media_type="application/json")

    return Starlette(
        routes=[Route(PATH, reload, methods=["POST"])],
        exception_handlers=HANDLERS,
        middleware=[Middleware(Observe, recorder=Recorder(metrics, {PATH}, RequestLog()))],
    )


async def _requested(request: Request, reloads: Reloads) -> Path | None:
    headers = dict(request.scope["headers"])
    body = await read_body(headers, request.receive, MAX_BODY_BYTES)
    if not body:
        return None
    check_media_type(headers)
    wanted = strict_json.parse(bytes(body))
    if type(wanted) is not dict or wanted.keys() - {"checkpoint"} or type(wanted.get("checkpoint", "")) is not str:
        raise InvalidRequest([("", 'must be {"checkpoint": "name"} or {}')])
    if "checkpoint" not in wanted:
        return None
    try:
        return reloads.resolve(wanted["checkpoint"])
    except CheckpointNotFound:
        raise NotFound("No checkpoint of that name lies below the configured root.") from None
