"""The middlewares: one names, counts, logs and traces every request, and turns what an endpoint raises into a problem; one checks hosts."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable, Sequence

import orjson
import structlog
from prometheus_client import Counter, Histogram
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.caller import BEGAN_AT, CANCELS, CUT_OFF, LONG_BODY_BYTES, Bodies, CallerGone
from app.api.patience import Leavers
from app.errors import (
    BadRequest,
    Draining,
    InternalError,
    MethodNotAllowed,
    NotFound,
    NotReady,
    ServiceError,
    TargetTooLong,
    TooLarge,
    service_error_of,
)
from app.replies import timings_of
from app.schema import is_request_id
from app.telemetry.exchange import Exchange
from app.telemetry.logs import AccessLine, access, of_exception
from app.telemetry.metrics import STAGES_OF_CALLS, Metrics
from app.telemetry.tracing import RequestTracer

MEDIA_TYPE = b"application/problem+json"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
PROBES = frozenset({"/livez", "/readyz", "/health", "/startupz", "/metrics", "/v2/health/live", "/v2/health/ready"})
OTHER = "other"
UNMATCHED = "unmatched"
CLIENT_GONE = 499  # the status under which a disconnect is logged and counted
# of path and query: no endpoint reads a query, and the longest path holds a model's name and version
MOST_TARGET_BYTES = 4096
MOST_DRAINED_BYTES = 64 * 2**20
CUT_OFF_SECONDS = 5.0  # a guess of when another process listens here

log = structlog.get_logger("app.api.middleware")
# unlike uuid4 it makes no system call, during which another thread would run; ids are no secrets
_ids = random.Random(os.urandom(32))  # noqa: S311
os.register_at_fork(after_in_child=lambda: _ids.seed(os.urandom(32)))


class RequestMiddleware:
    """Pure ASGI. An endpoint finds its `Exchange` in `scope["exchange"]`; what it notes there is logged and counted at the end."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        bodies: Bodies,
        leavers: Leavers,
        root_path: str = "",
        success_sample: float = 1.0,
        tracer: RequestTracer | None = None,
        draw: Callable[[], float] = _ids.random,
    ) -> None:
        self.app = app
        self.metrics = metrics
        self.bodies = bodies
        self.leavers = leavers
        self.root_path = root_path
        self.success_sample = success_sample
        self.tracer = tracer
        self._draw = draw
        self._series: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = _begin(scope)
        is_head = scope["method"] == "HEAD"
        if is_head:
            scope = {**scope, "method": "GET"}
        scope["exchange"] = exchange
        if self.root_path:
            scope["root_path"] = self.root_path  # whether or not a proxy has taken it off the path

        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                if exchange.is_read:
                    self._note_patience(exchange, scope)
                message["headers"] = [*message["headers"], (b"x-request-id", exchange.request_id.encode())]
                if exchange.has_long_body and not exchange.is_read and scope["http_version"][0] == "1":
                    message["headers"].append((b"connection", b"close"))
            elif is_head:
                message = {"type": "http.response.body"}
            await send(message)

        try:
            try:
                _check_target(scope)
                await self.app(scope, receive, reply)
            except CallerGone:
                exchange.status = 0
            except asyncio.CancelledError as end:
                if CUT_OFF not in end.args or exchange.status:
                    raise
                exchange.code = Draining.code
                await self._reply(Draining(retry_after_seconds=CUT_OFF_SECONDS), exchange, scope, reply)
            except Exception as error:
                await self._reply_to_error(error, exchange, scope, receive, reply)
        except asyncio.CancelledError:  # also while an error waits for a client that does not read
            exchange.status = 0
            if CANCELS not in scope.get("extensions", ()):
                raise
        finally:
            exchange.route = getattr(scope.get("route"), "path", UNMATCHED)
            self._end(exchange, scope)

    async def _reply_to_error(
        self, error: Exception, exchange: Exchange, scope: Scope, receive: Receive, reply: Send
    ) -> None:
        """Reply with the problem that an exception stands for, if no reply has begun."""
        problem = error_to_reply(error)
        exchange.code = problem.code
        if problem is not error and isinstance(problem, InternalError):
            log.error("fault", request_id=exchange.request_id, **of_exception(error))
        if exchange.status:
            raise error
        if not exchange.is_read and CANCELS not in scope.get("extensions", ()) and _closes(scope):
            await drain(receive)  # our own server does so after the reply
        await self._reply(problem, exchange, scope, reply)

    async def _reply(self, problem: ServiceError, exchange: Exchange, scope: Scope, reply: Send) -> None:
        status, headers, body = problem_reply(problem, exchange.request_id, scope["path"].removeprefix(self.root_path))
        await reply({"type": "http.response.start", "status": status, "headers": headers})
        await reply({"type": "http.response.body", "body": body})

    def _end(self, exchange: Exchange, scope: Scope) -> None:
        """The reply is out, or the client has gone: `exchange.status` is 0 then."""
        seconds = time.perf_counter() - exchange.started
        self.bodies.release(exchange)
        if exchange.is_read and not exchange.status:
            self._note_patience(exchange, scope)
        if not exchange.status:
            exchange.status = CLIENT_GONE
            if exchange.is_reading:
                self.metrics.cancelled.labels("body").inc()
        trace_id = None
        if self.tracer is not None and exchange.route not in PROBES:
            trace_id = self.tracer.record(exchange, seconds, dict(scope["headers"]))
        is_taken = exchange.status != MethodNotAllowed.status
        method = exchange.method if is_taken else OTHER  # else any caller could add series of each method and route
        requests, duration = self._series_of(method, exchange.route, exchange.status)
        requests.inc()
        duration.observe(seconds)
        if exchange.version:  # it was answered with scores
            for stage, stage_seconds in exchange.stages.items():
                if stage in STAGES_OF_CALLS:
                    self.metrics.stage[stage].observe(stage_seconds)
            for names, probabilities in exchange.scored:
                self.metrics.reply_probabilities.record(names, probabilities)
        if exchange.code == TooLarge.code:
            self.metrics.rejected.labels("too_large").inc()
        self._write(exchange, seconds, trace_id)

    def _note_patience(self, exchange: Exchange, scope: Scope) -> None:
        """Learn from a caller whose request had come whole: it is answered, or has left. One that said its deadline left by that, and tells
        nothing of others."""
        now, route = time.perf_counter(), scope["route"].path
        if not exchange.status or _has_left(scope):
            if not exchange.says_deadline:
                self.leavers.of(exchange.key, route).left(now, now - exchange.came, was_read=exchange.turn_at > 0)
        elif exchange.status < 300:
            self.leavers.of(exchange.key, route).answered(now, now - exchange.turn_at)

    def _series_of(self, method: str, route: str, status: int) -> tuple[Counter, Histogram]:
        """The counter and the histogram of these labels, looked up once."""
        series = self._series.get((method, route, status))
        if series is None:
            counter = self.metrics.http_requests.labels(method, route, str(status))
            is_refused = 400 <= status < 500 and status != CLIENT_GONE
            histogram = self.metrics.http_seconds.labels(method, route, str(is_refused).lower())
            series = self._series[method, route, status] = counter, histogram
        return series

    def _write(self, exchange: Exchange, seconds: float, trace_id: str | None) -> None:
        """One line: of every failure, and of the given share of the successes. Nothing in it is what the caller sent. Those of probes and
        scrapes have an event of their own, at level debug, or at info if the process says that it is not ready."""
        succeeded, is_probe = exchange.status < 400, exchange.route in PROBES
        if not is_probe and succeeded and self.success_sample < 1 and self._draw() >= self.success_sample:
            return
        line = AccessLine(
            request_id=exchange.request_id,
            method=exchange.method,
            route=exchange.route,
            status=exchange.status,
            duration_ms=round(seconds * 1e6) / 1e3,  # less than half the time of `round(…, 3)`
            code=exchange.code,
            key=exchange.key,
            version=exchange.version,
            candidates=exchange.candidates,
            history=exchange.history,
            requests=exchange.requests,
            cache=exchange.cache,
            stages_ms=timings_of(exchange.stages),
            trace_id=trace_id,
            event="probe" if is_probe else "request",
        )
        if is_probe and (succeeded or exchange.status == NotReady.status):
            level = logging.DEBUG if succeeded else logging.INFO
        else:
            level = logging.INFO if succeeded else logging.WARNING if exchange.status < 500 else logging.ERROR
        access.write(level, line)


class HostMiddleware(TrustedHostMiddleware):
    """Starlette's, but for HTTP/1.0, which needs no Host: no browser speaks it, so no web page can misuse it.

    A host that is allowed by its name needs none of Starlette's steps, which take a fortieth of a small request.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Sequence[str]) -> None:
        super().__init__(app, allowed_hosts, www_redirect=False)
        self._names = {host.encode() for host in allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        host = None
        for name, value in scope.get("headers", ()):
            if name == b"host":
                host = value
                break
        needs_none = host is None and scope["type"] == "http" and scope["http_version"] == "1.0"
        if needs_none or (host is not None and host.partition(b":")[0] in self._names):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def new_request_id() -> str:
    """32 hex digits, unlike those of any other request or process. Not a secret."""
    return f"{_ids.getrandbits(128):032x}"


def _begin(scope: Scope) -> Exchange:
    sent, length = b"", b""
    is_chunked = False
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            sent = sent or value
        elif name == b"content-length":
            length = value
        elif name == b"transfer-encoding":
            is_chunked = True
    came = time.perf_counter()
    if (is_chunked or len(length) > 4) and (about := scope.get("extensions", {}).get(CANCELS)):
        came -= about["lag_seconds"]()  # asking the system takes a tenth of a small request
    began: float = scope.get(BEGAN_AT, came)
    own_id = sent.decode("latin-1") if sent else ""
    is_named = bool(sent) and is_request_id(own_id)
    return Exchange(
        request_id=own_id if is_named else new_request_id(),
        started=min(began, came),
        came=came,
        method=scope["method"] if scope["method"] in METHODS else OTHER,
        is_named_by_caller=is_named,
        has_long_body=is_chunked or len(length) > 5 or (length.isdigit() and int(length) > LONG_BODY_BYTES),
    )


def _check_target(scope: Scope) -> None:
    """Raise TargetTooLong; BadRequest unless there is one Host (RFC 9112, 3.2); and NotFound for an escaped slash and for a line feed at
    the end, which routes would take for another path than a proxy does."""
    raw_path: bytes = scope.get("raw_path") or b""
    if len(raw_path) + len(scope["query_string"]) > MOST_TARGET_BYTES:
        raise TargetTooLong
    hosts = sum(name == b"host" for name, _ in scope["headers"])
    if hosts > 1 or (not hosts and scope["http_version"] == "1.1"):
        raise BadRequest("A request must have one Host header.")
    if b"%" in raw_path and (b"%2f" in raw_path.lower() or scope["path"].endswith("\n")):
        raise NotFound


def _has_left(scope: Scope) -> bool:
    """Whether the caller has gone as far as the server knows: the reply is late."""
    about = scope.get("extensions", {}).get(CANCELS, {})
    return bool(about) and about["has_left"]()


def _closes(scope: Scope) -> bool:
    """Whether the connection ends with the reply. A client that is still writing then would lose the reply with it."""
    headers = dict(scope["headers"])
    is_last = scope["http_version"] == "1.0" or b"close" in headers.get(b"connection", b"").lower()
    return is_last and b"expect" not in headers


async def drain(receive: Receive) -> None:
    """Read the rest of the body and drop it, up to a bound."""
    dropped = 0
    while dropped < MOST_DRAINED_BYTES:
        message = await receive()
        dropped += len(message.get("body", b""))
        if not message.get("more_body", False):
            return


def problem_reply(error: ServiceError, request_id: str, path: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body of the reply to a request that failed."""
    problem = error.problem(request_id)
    if path.startswith("/v2"):
        problem["error"] = error.detail  # clients of the Open Inference Protocol look here
    body = orjson.dumps(problem)
    headers = [(b"content-type", MEDIA_TYPE), (b"content-length", b"%d" % len(body))]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    if (seconds := error.retry_after) is not None:
        headers.append((b"retry-after", b"%d" % seconds))
    return error.status, headers, body


def error_to_reply(error: Exception) -> ServiceError:
    """Return what to reply to an exception. The framework's own details may hold parts of the request."""
    if not isinstance(error, HTTPException):
        return service_error_of(error)
    kinds: dict[int, type[ServiceError]] = {404: NotFound, 405: MethodNotAllowed, 413: TooLarge}
    problem = kinds.get(error.status_code, BadRequest if error.status_code < 500 else InternalError)()
    if allowed := (error.headers or {}).get("Allow"):
        problem.headers = {"Allow": "GET, HEAD" if allowed == "GET" else allowed}
    return problem
