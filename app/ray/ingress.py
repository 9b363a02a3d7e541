"""Where requests enter under Ray Serve: bytes and the time that is left go to the replica of their routing key. Imports nothing of Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any, NamedTuple
from urllib.parse import quote

import structlog
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from app.errors import DeadlineExceeded, EngineDown, InvalidRequest, TooLarge
from app.http.headers import Headers, check_length, is_count, timeout_seconds_of
from app.http.observe import Recorder, RequestLog
from app.http.open_inference import MODEL, VERSION
from app.http.openapi import RANK_MODEL
from app.http.problems import problem_reply
from app.settings import Settings
from app.telemetry import logs
from app.telemetry.exposition import CONTENT_TYPE, write
from app.telemetry.metrics import Metrics

ROUTING_KEY = b"x-routing-key"
TIMEOUT = b"x-request-timeout-ms"
ENDPOINTS = ("/context", "/rank", "/rank/batch", "/retrieve", "/recommend", "/explain", "/metrics")
ROUTES = (*ENDPOINTS, RANK_MODEL, f"{MODEL}/infer", f"{VERSION}/infer")  # in log lines
GRACE_SECONDS = 0.25  # the replica's own 504 says more than ours
RETRY_AFTER_LOST_SECONDS = 1.0

Fields = list[tuple[bytes, bytes]]

log = structlog.get_logger("app.ray.ingress")


class Asked(NamedTuple):
    """One request as it goes to a replica."""

    method: str
    path: str
    query: bytes
    headers: Fields
    body: bytes

    def scope(self) -> Scope:
        """The ASGI scope of the request."""
        return {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": "", "method": self.method,
            "path": self.path, "raw_path": quote(self.path).encode(), "query_string": self.query, "headers": self.headers,
            "client": None, "server": None,
        }  # fmt: skip


class Reply(NamedTuple):
    """A replica's reply to one request."""

    status: int
    headers: Fields
    body: bytes


class Ingress:
    """A deployment's class. It parses nothing: what is wrong with a request is said, logged and counted by a replica."""

    def __init__(self, ranker: Any, settings: Settings, lost: tuple[type[Exception], ...], attempts: int = 2) -> None:
        """`ranker`: the handle of the replicas. `lost`: what asking raises where a replica is gone, so that another one is asked, as a
        ranking changes nothing: `attempts` in all."""
        logs.configure(settings.logs)
        self.ranker = ranker
        self.settings = settings
        self.lost = lost
        self.attempts = attempts
        self.recorder = Recorder(Metrics(), ROUTES, RequestLog(settings.logs.success_sample))

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        began = time.monotonic()
        fields, path = list(request.headers.raw), request.scope["path"]
        headers = dict(fields)
        exchange = self.recorder.begin(request.method, path, headers)
        try:
            if (request.method, path) == ("GET", "/metrics"):
                return Response(await self._metrics(), headers={"content-type": CONTENT_TYPE})
            query = request.scope["query_string"]
            asked = Asked(request.method, path, query, fields, await self._body(request, headers))
            status, fields, body = await self._ask(asked, headers, began)
        except Exception as error:
            status, fields, body = problem_reply(self.recorder.problem(error, exchange), exchange)
            fields.append((b"content-length", b"%d" % len(body)))
            exchange.status = status
            self.recorder.end(exchange, headers)
        response = Response(body, status)
        response.raw_headers = [each for each in fields if each[0] != b"x-request-id"]  # Ray Serve's proxy adds it
        return response

    async def _body(self, request: Request, headers: Headers) -> bytes:
        """The body, or as much of it as shows that it is too long."""
        limit, body = self.settings.limits.max_body_bytes, bytearray()
        try:
            check_length(headers, limit)
        except TooLarge:
            return b""  # the replica sees it from the headers
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                break
        return bytes(body[: limit + 1])

    async def _ask(self, asked: Asked, headers: Headers, began: float) -> Reply:
        """Ask the replica of the request's key, or the one that takes its place if it dies."""
        deadline = began + self._seconds(headers)
        handle = self.ranker.options(session_id=headers.get(ROUTING_KEY, b"").decode("latin-1")).answer
        for _ in range(self.attempts):
            left = max(0.0, deadline - time.monotonic())  # with no time left, a replica refuses it
            try:
                return Reply(*await asyncio.wait_for(handle.remote(with_time(asked, left)), left + GRACE_SECONDS))
            except TimeoutError:
                raise DeadlineExceeded from None
            except self.lost as error:
                log.warning("replica_lost", error=type(error).__name__)
        raise EngineDown("The replicas that were asked are gone.", retry_after_seconds=RETRY_AFTER_LOST_SECONDS)

    def _seconds(self, headers: Headers) -> float:
        """How long the request may take in all."""
        limits = self.settings.deadline
        try:
            asked = timeout_seconds_of(headers)
        except InvalidRequest:
            asked = None  # a replica refuses it
        return limits.default_seconds if asked is None else min(asked, limits.max_seconds)

    async def _metrics(self) -> bytes:
        """Those of every replica, with a label of its own. Raises EngineDown where there is none, as while the only one is replaced."""
        seconds = self.settings.deadline.default_seconds
        try:
            found = await self.ranker.broadcast("exposition").results_async(timeout_s=seconds, return_exceptions=True)
        except self.lost:
            raise EngineDown("No replica is there.", retry_after_seconds=RETRY_AFTER_LOST_SECONDS) from None
        return await asyncio.to_thread(labelled, [each for each in found if not isinstance(each, Exception)])


def with_time(asked: Asked, seconds: float) -> Asked:
    """The same request with the time that is left, where its caller has set any."""
    if not any(name == TIMEOUT and is_count(value) for name, value in asked.headers):
        return asked
    left = (TIMEOUT, b"%d" % int(seconds * 1000))
    return asked._replace(headers=[field for field in asked.headers if field[0] != TIMEOUT] + [left])


def labelled(expositions: Iterable[tuple[str, bytes]]) -> bytes:
    """Several processes' metrics as one exposition, each sample with its process under `replica`."""
    families: dict[str, Metric] = {}
    for replica, text in expositions:
        for family in text_string_to_metric_families(text.decode()):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            merged.samples += [each._replace(labels={**each.labels, "replica": replica}) for each in family.samples]
    return write(families.values())
