"""Decodes replies of the API strictly by the types that their routes declare, so that the document cannot say what is not so."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
from starlette.routing import Match
from starlette.testclient import TestClient

from app.api import explain, infer, rank, retrieve
from app.schema import replies, tensors

ROUTES = [*rank.router.routes, *retrieve.router.routes, *infer.router.routes, *explain.router.routes]
PROBLEM = "application/problem+json"


class CheckedClient(TestClient):
    """Starlette's client; a reply that is not what its route declares raises msgspec.ValidationError or AssertionError."""

    def request(self, method: str, url: Any, **options: Any) -> Any:
        """Send a request, and check the reply."""
        reply = super().request(method, url, **options)
        check_reply(reply)
        return reply


def check_reply(reply: httpx.Response) -> None:
    """Raise msgspec.ValidationError for a JSON reply that is not of the type that its route declares for this status.

    Replies of routes without a declared type, and tensors in binary form, are not looked at.
    """
    media_type = reply.headers.get("content-type", "").partition(";")[0]
    if not reply.content:
        return
    if media_type == PROBLEM:
        problem = msgspec.json.decode(reply.content, type=replies.Problem)
        assert problem.status == reply.status_code
        return
    declared = declared_type(reply.request.method, reply.request.url.path)
    if declared is None or reply.status_code != 200 or media_type != "application/json":
        return
    if declared is replies.BatchReply:
        results = msgspec.json.decode(reply.content)
        entries = results if isinstance(results, list) else msgspec.convert(results, replies.BatchReply).results
        for entry in entries:
            msgspec.convert(entry, replies.Failed if "error" in entry else replies.RankReply)
    else:
        msgspec.json.decode(reply.content, type=declared)


def declared_type(method: str, path: str) -> type[msgspec.Struct] | None:
    """The type of a route's reply with status 200; None where the route is not one of the API's or declares none."""
    scope = {"type": "http", "method": method, "path": path, "root_path": ""}
    for route in ROUTES:
        if route.matches(scope)[0] is Match.FULL:
            content = route.responses.get(200, {}).get("content", {}).get("application/json", {})
            name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
            found: type[msgspec.Struct] | None = getattr(replies, name, None) or getattr(tensors, name, None)
            return found
    return None
