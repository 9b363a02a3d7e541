"""The admin interface, an application for a loopback port of its own: reloads, and changes of posts. Not for callers of the service."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, cast

import msgspec
from fastapi import APIRouter, Depends
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from app import errors, schema
from app.api.caller import JSON_ALONE, Headers, bearer_of, check_length, check_type, read_body
from app.api.operations import json_reply
from app.api.route import Route
from app.api.state import state_of
from app.corpus.posts import read_change
from app.errors import InvalidRequest, NotFound, ReloadBusy, ReloadRefused, Unauthorized, UnsupportedMediaType
from app.interface import CheckpointNotFound, ReloadableService, ReloadInProgress
from app.settings import Admin
from model.engine import EngineError
from weights.errors import CheckpointError, LogLost, NotStored, StorageFull

RELOAD_RULE = 'must be {"checkpoint": "name"}, {"retrieval": "name", "corpus": "name"} or {}'
NOT_BELOW_ROOT = "There is no checkpoint or corpus of that name below the configured root."
MAX_BODY_BYTES = 4 * 2**20
FULL_SECONDS, RETRY_SECONDS = 30.0, 5.0  # somebody has to look at a full disk

router = APIRouter(tags=["admin"], route_class=Route)


class ReloadRequest(msgspec.Struct, forbid_unknown_fields=True):
    """What to serve from now on, by names below the root; what is not named is read again."""

    checkpoint: str | UnsetType = UNSET
    retrieval: str | UnsetType = UNSET
    corpus: str | UnsetType = UNSET


RELOAD = msgspec.json.Decoder(ReloadRequest)


class Operator:
    """Knows the SHA-256 of the token, never the token itself."""

    def __init__(self, settings: Admin) -> None:
        assert settings.token_sha256 is not None  # the settings require it
        self._digest = bytes.fromhex(settings.token_sha256.get_secret_value())

    def check(self, headers: Headers) -> None:
        """Raise Unauthorized unless the request has the token."""
        token = bearer_of(headers)
        digest = hashlib.sha256(token or b"").digest()
        if not hmac.compare_digest(digest, self._digest) or token is None:
            raise Unauthorized("A valid admin token is required: Authorization: Bearer TOKEN.")


async def read_operator(request: Request) -> bytes:
    """The body of a request with the token. Raises Unauthorized, TooLarge, UnsupportedMediaType."""
    headers: Headers = dict(request.scope["headers"])
    state = state_of(request)
    assert state.operator is not None
    state.operator.check(headers)
    check_length(headers, MAX_BODY_BYTES)
    body = await read_body(request.receive, request.scope["exchange"], state.bodies, MAX_BODY_BYTES, None)
    if body:
        check_type(headers, JSON_ALONE)
        if b"content-encoding" in headers:
            raise UnsupportedMediaType("The body must not be compressed.")
    return body


Body = Annotated[bytes, Depends(read_operator)]


@router.post("/admin/reload", response_class=Response)
async def reload(request: Request, body: Body) -> Response:
    """Serve another checkpoint, or read the current one again. Or do so for the retrieval checkpoint and the corpus, both in one step."""
    ranker = _ranker_of(request)
    reload_request = schema.decode(RELOAD, body or b"{}")
    names = [
        None if name is UNSET else name
        for name in (reload_request.checkpoint, reload_request.retrieval, reload_request.corpus)
    ]
    checkpoint, retrieval, corpus = names
    is_of_corpus = retrieval is not None or corpus is not None
    if checkpoint is not None and is_of_corpus:
        raise InvalidRequest("", RELOAD_RULE)
    with _problems():
        try:
            if is_of_corpus:
                served, is_changed = await ranker.reloads.reload_corpus(retrieval, corpus)
                now_served = {"retrieval": _named(served.manifest), "corpus": _named(served.corpus)}
            else:
                model, is_changed = await ranker.reloads.reload(checkpoint)
                now_served = {"model": _named(model.manifest)}
        except CheckpointNotFound:
            if names != [None, None, None]:
                raise NotFound(NOT_BELOW_ROOT) from None
            raise ReloadRefused("The current checkpoint is no longer below the configured root.") from None
    return json_reply({**now_served, "result": "reloaded" if is_changed else "unchanged"})


@router.post("/admin/posts", response_class=Response)
async def posts(request: Request, body: Body) -> Response:
    """Change the posts of the corpus: `{"upsert": [{"post_id", "author_id", "created_at", "topic", "codes"}], "delete": [ids]}`. When the
    reply is sent, the change is on disk, and every search that begins after that sees it."""
    corpus = _ranker_of(request).corpus
    change = read_change(body, corpus.served.corpus.ids)
    with _problems():
        state = await corpus.change(change)
    now = {"posts": state.posts, "changes": state.changes, "sequence": state.mark.sequence}
    corpus_reply = {"name": state.corpus.name, "version": state.corpus.version} | now
    return json_reply({"corpus": corpus_reply, "upserted": len(change.upsert.post_ids), "deleted": state.deleted})


def _ranker_of(request: Request) -> ReloadableService:
    return cast(ReloadableService, state_of(request).ranker)  # `create_admin_app` is given one


@contextmanager
def _problems() -> Iterator[None]:
    """Tell the operator, who may know paths, why a change failed."""
    try:
        yield
    except ReloadInProgress:
        raise ReloadBusy(retry_after_seconds=RETRY_SECONDS) from None
    except StorageFull as error:
        raise errors.StorageFull(str(error), retry_after_seconds=FULL_SECONDS) from error
    except LogLost as error:
        raise errors.LogLost(str(error), retry_after_seconds=FULL_SECONDS) from error
    except NotStored as error:
        raise errors.ChangeNotStored(str(error), retry_after_seconds=RETRY_SECONDS) from error
    except (CheckpointError, EngineError) as error:
        raise ReloadRefused(str(error)) from error


def _named(manifest: Any) -> dict[str, str]:
    return {"name": manifest.name, "version": manifest.version, "digest": manifest.digest}
