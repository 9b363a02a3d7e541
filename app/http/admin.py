"""The admin interface, an application for a loopback port of its own. Not for anything that a caller of the service may use."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path

import orjson

from app import errors
from app.errors import (
    ChangeNotStored,
    InvalidRequest,
    NotFound,
    ReloadBusy,
    ReloadRefused,
    ServiceError,
    Unauthorized,
    UnsupportedMediaType,
)
from app.http.application import Application, create_pages
from app.http.call import Answer, Call, Endpoint, Fields, Reply, TaskCall
from app.http.headers import BATCH, Headers, check_length, is_compressed, wire_of
from app.http.observe import Recorder, RequestLog
from app.http.rank_batch import JSON_HEADER
from app.interface import Changed, CheckpointNotFound, ReloadInProgress, Reloads, Service, served_identity
from app.request import strict_json
from app.request.posts import read_change
from app.settings import LOOPBACK, Admin
from model.engine import EngineError
from weights.corpus.manifest import CorpusManifest
from weights.errors import CheckpointError, LogLost, NotStored, StorageFull
from weights.format.manifest import Manifest

WANTED = 'must be {"checkpoint": "name"}, {"second": "name"}, {"retrieval": "name", "corpus": "name"} or {}'
RELOAD, POSTS, COMPACT = "/admin/reload", "/admin/posts", "/admin/posts/compact"
MAX_BODY_BYTES = 4096
NOT_STORED: dict[
    type[Exception], tuple[type[ServiceError], float]
] = {  # and its Retry-After: somebody has to look at a full disk
    StorageFull: (errors.StorageFull, 30.0),
    LogLost: (errors.LogLost, 30.0),
}
NOT_BELOW_ROOT = "No checkpoint or corpus of that name lies below the configured root."
MAX_CHANGE_BYTES = 4 * 2**20


class AdminAuth:
    """Checks the bearer token and a local host name; anybody else sees nothing of this port."""

    def __init__(self, settings: Admin) -> None:
        assert settings.token_sha256 is not None  # the settings require it
        self._digest = bytes.fromhex(settings.token_sha256.get_secret_value())
        self._hosts = set(LOOPBACK)

    def check(self, headers: Headers) -> None:
        """Raises NotFound for a forged Host, which a browser on a hostile page would send, and Unauthorized."""
        host = headers.get(b"host", b"").decode("latin-1")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if name.lower() not in self._hosts:
            raise NotFound
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        if not hmac.compare_digest(digest, self._digest) or scheme.lower() != b"bearer":
            raise Unauthorized("A valid admin token is required: Authorization: Bearer TOKEN.")


Work = Callable[[bytes], Awaitable[bytes]]


class AdminEndpoint(Endpoint):
    """Runs `work` for callers with the token: it takes the body and returns that of the reply."""

    def __init__(self, recorder: Recorder, path: str, auth: AdminAuth, max_body_bytes: int, work: Work) -> None:
        super().__init__(recorder, path, max_body_bytes)
        self.auth = auth
        self.work = work

    def begin(self, headers: Fields, reply: Reply) -> Call:
        """As `Endpoint.begin`."""
        return AdminCall(self, dict(headers), reply)


class AdminCall(TaskCall):
    """One request for a change."""

    __slots__ = ()
    _endpoint: AdminEndpoint

    def open(self) -> None:
        """As `TaskCall.open`."""
        self._endpoint.auth.check(self.headers)
        check_length(self.headers, self.max_body_bytes)

    async def reply_to(self, body: bytes | bytearray) -> Answer:
        """As `TaskCall.reply_to`."""
        if body:
            _check_coding(self.headers)
        try:
            return 200, [JSON_HEADER], await self._endpoint.work(bytes(body))
        except ReloadInProgress:
            raise ReloadBusy(retry_after_seconds=5.0) from None
        except NotStored as error:
            kind, seconds = NOT_STORED.get(type(error), (ChangeNotStored, 5.0))
            raise kind(str(error), retry_after_seconds=seconds) from error
        except (CheckpointError, EngineError) as error:
            raise ReloadRefused(str(error)) from error


def create_admin_app(settings: Admin, reloads: Reloads, service: Service) -> Application:
    """`POST /admin/reload` with `{"checkpoint": "name below the root"}`, or `{}` for the present one read again; with
    `{"second": name}` the second checkpoint;
    with `{"retrieval": name, "corpus": name}` the retrieval checkpoint and the corpus as one, of which either may be left out.

    `POST /admin/posts` with `{"upsert": [{"post_id", "author_id", "created_at", "topic"}], "delete": [ids]}` changes the corpus,
    `POST /admin/posts/compact` without a body writes it anew with its changes.
    """

    async def described(before: object, **manifests: Manifest | CorpusManifest) -> bytes:
        content: dict[str, object] = {
            what: {"name": manifest.name, "version": manifest.version, "digest": manifest.digest}
            for what, manifest in manifests.items()
        }
        is_same = before == await served_identity(service, next(iter(manifests)))
        content["result"] = "unchanged" if is_same else "reloaded"
        return orjson.dumps(content)

    async def reload(body: bytes) -> bytes:
        wanted = _requested(body, reloads)
        retrieves = wanted.keys() & {"retrieval", "corpus"}
        before = await served_identity(service, "retrieval" if retrieves else next(iter(wanted), ""))
        try:
            if retrieves:
                served = await reloads.reload_retrieval(wanted.get("retrieval"), wanted.get("corpus"))
                return await described(before, retrieval=served.manifest, corpus=served.corpus)
            if "second" in wanted:
                return await described(before, second=(await reloads.reload(wanted["second"], second=True)).manifest)
            return await described(before, model=(await reloads.reload(wanted.get("checkpoint"))).manifest)
        except CheckpointNotFound:
            if wanted:  # a front's name is looked up by the engine process
                raise NotFound(NOT_BELOW_ROOT) from None
            raise ReloadRefused("The checkpoint that serves lies no longer below the configured root.") from None

    async def posts(body: bytes) -> bytes:
        wanted = read_change(body, service.retrieval.served.corpus.ids)
        changed = await service.retrieval.change(wanted)
        return _changed(changed, upserted=len(wanted.upsert.post_ids), deleted=changed.deleted)

    async def compact(body: bytes) -> bytes:
        if body:
            raise InvalidRequest([("", "must be empty")])
        return _changed(await service.retrieval.compact())

    auth = AdminAuth(settings)
    calls: dict[str, tuple[Work, int]] = {
        RELOAD: (reload, MAX_BODY_BYTES), POSTS: (posts, MAX_CHANGE_BYTES), COMPACT: (compact, MAX_BODY_BYTES),
    }  # fmt: skip
    recorder = Recorder(service.metrics, calls, RequestLog())
    endpoints = {path: AdminEndpoint(recorder, path, auth, most, work) for path, (work, most) in calls.items()}
    return Application(service, recorder, create_pages(ranking_paths=[*calls]), endpoints=endpoints)


def _changed(state: Changed, **counts: int) -> bytes:
    names = {"name": state.corpus.name, "version": state.corpus.version}
    corpus = names | {"posts": state.posts, "changes": state.changes, "sequence": state.mark.sequence}
    return orjson.dumps({"corpus": corpus, **counts})


def _check_coding(headers: Headers) -> None:
    wire_of(headers, BATCH)
    if is_compressed(headers):
        raise UnsupportedMediaType("The body must not be compressed.")


def _requested(body: bytes, reloads: Reloads) -> dict[str, Path]:
    """The checkpoints and corpus that the body names, resolved below the root."""
    if not body:
        return {}
    wanted = strict_json.parse(body)
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
