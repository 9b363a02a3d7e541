"""The outermost layer: names every request, counts and logs it, and turns our own faults into a problem reply. Pure ASGI."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Collection
from typing import Any

import orjson
import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import InternalError
from app.exchange import EXCHANGE, Exchange, reply, request_id_of
from app.metrics import Metrics
from app.problems import MEDIA_TYPE, problem

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
UNMATCHED = "unmatched"
OTHER = "other"
CLIENT_GONE = 499

log = structlog.get_logger("app.access")


class Observe:
    """`routes` are the known paths: any other is one label, so that no caller can make a metric series."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        routes: Collection[str],
        record: Callable[[Exchange, float], None] | None = None,
    ) -> None:
        self.app = app
        self.metrics = metrics
        self.routes = frozenset(routes)
        self.record = record or log_exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = self._begin(scope)
        name = (b"x-request-id", exchange.request_id.encode())

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message.get("headers", ()), name]
            await send(message)

        try:
            await self.app(scope, receive, send_named)
        except Exception as error:
            started = exchange.status != 0
            exchange.status, exchange.code = InternalError.status, InternalError.code
            _log_fault(error, exchange)
            if started:
                raise  # half a reply cannot be mended: the connection must end
            content = orjson.dumps(problem(InternalError(), exchange.request_id))
            await reply(send_named, InternalError.status, content, [(b"content-type", MEDIA_TYPE.encode())])
        finally:
            self._end(exchange)

    def _begin(self, scope: Scope) -> Exchange:
        method, path = scope["method"], scope["path"]
        exchange = Exchange(
            request_id=request_id_of(dict(scope["headers"])),
            started=time.perf_counter(),
            method=method if method in METHODS else OTHER,
            route=path if path in self.routes else UNMATCHED,
        )
        scope.setdefault("state", {})[EXCHANGE] = exchange
        return exchange

    def _end(self, exchange: Exchange) -> None:
        seconds = time.perf_counter() - exchange.started
        exchange.status = exchange.status or CLIENT_GONE
        self.metrics.http_requests.labels(exchange.method, exchange.route, str(exchange.status)).inc()
        self.metrics.http_seconds.labels(exchange.method, exchange.route).observe(seconds)
        self.record(exchange, seconds)


def log_exchange(exchange: Exchange, seconds: float) -> None:
    """One line a request: what it was and how it ended, nothing of what it asked."""
    level = log.error if exchange.status >= 500 and exchange.code in ("internal", "non_finite_scores") else log.info
    fields: dict[str, Any] = {
        "request_id": exchange.request_id,
        "method": exchange.method,
        "route": exchange.route,
        "status": exchange.status,
        "ms": round(seconds * 1000, 3),
    }
    optional = {
        "code": exchange.code,
        "key": exchange.key,
        "version": exchange.version,
        "requests": exchange.requests,
        "candidates": exchange.candidates,
        "history": exchange.history,
        "cache": exchange.cache,
    }
    fields.update({name: value for name, value in optional.items() if value})
    fields.update({f"{stage}_ms": round(spent * 1000, 3) for stage, spent in exchange.stages.items()})
    level("request", **fields)


def _log_fault(error: Exception, exchange: Exchange) -> None:
    """Where it happened, without the message: that may hold what the caller sent."""
    frames = traceback.extract_tb(error.__traceback__)
    trace = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-12:]]
    log.error("fault", request_id=exchange.request_id, error=type(error).__name__, trace=trace)
