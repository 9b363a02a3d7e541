"""The admin interface, an application for a loopback port of its own. Not for anything that a caller of the service may use."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.errors import InternalError, InvalidRequest, NotFound, ServiceError, Unauthorized
from app.http.asgi import check_media_type, read_body
from app.http.problems import from_http_exception, problem_response
from app.interface import CheckpointNotFound, ReloadInProgress, Reloads
from app.request import strict_json
from app.settings import Admin
from model.engine import EngineError
from weights.errors import CheckpointError

MAX_BODY_BYTES = 4096
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")

Endpoint = Callable[[Request], Awaitable[Response]]


class ReloadRefused(ServiceError):
    """The checkpoint was refused; the one that served before serves on."""

    status = 422
    code = "checkpoint_refused"
    title = "Checkpoint refused"


class ReloadBusy(ServiceError):
    """Another checkpoint is being loaded."""

    status = 409
    code = "reload_in_progress"
    title = "Reload in progress"
    default_detail = "Another checkpoint is being loaded."


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


def create_admin_app(settings: Admin, reloads: Reloads) -> Starlette:
    """`POST /admin/reload` with `{"checkpoint": "name below the root"}`, or `{}` for the present one read again."""
    auth = AdminAuth(settings)

    async def reload(request: Request) -> Response:
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
        routes=[Route("/admin/reload", _guarded(auth, reload), methods=["POST"])],
        exception_handlers={HTTPException: _framework_problem},
    )


async def _requested(request: Request, reloads: Reloads) -> Any:
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


def _guarded(auth: AdminAuth, endpoint: Endpoint) -> Endpoint:
    async def guarded(request: Request) -> Response:
        try:
            auth.check(request)
            return await endpoint(request)
        except ServiceError as error:
            return problem_response(error)
        except Exception:
            return problem_response(InternalError())

    return guarded


async def _framework_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return problem_response(from_http_exception(error))
