"""Names, counts and logs every request, and turns our faults into problems. A log line holds nothing that a caller sent."""

from __future__ import annotations

import os
import random
import time
import traceback
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any

import structlog
from prometheus_client import Counter
from starlette.routing import compile_path

from app.errors import ServiceError, TooLarge, told
from app.http.headers import Headers, request_id_of
from app.telemetry.exchange import Exchange
from app.telemetry.logs import LEVELS, Output, shorten
from app.telemetry.metrics import Metrics, Series
from app.telemetry.sink import Sink
from app.telemetry.tracing import RequestTracer

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
UNMATCHED = "unmatched"
OTHER = "other"
LONG_LINE = 2048  # of a request: a value may be too long
CLIENT_GONE = 499  # the status under which a disconnect is logged and counted

log = structlog.get_logger("app.http.observe")
_ids = random.Random(
    os.urandom(32)
)  # unlike uuid4 it makes no system call, during which another thread would take the interpreter lock
os.register_at_fork(after_in_child=lambda: _ids.seed(os.urandom(32)))


def new_request_id() -> str:
    """32 hex digits, unlike those of any other request or process. Not a secret."""
    return f"{_ids.getrandbits(128):032x}"


class RequestLog:
    """Writes the line of a request: all failures, and the given share of the successes."""

    def __init__(self, success_sample: float = 1.0, draw: Callable[[], float] = random.random) -> None:
        self.success_sample = success_sample
        self._draw = draw
        self._log = structlog.get_logger("app.request")

    def write(self, exchange: Exchange, seconds: float, trace_id: str | None = None) -> None:
        """One line for a request that took that long. Server errors are errors, refusals and odd clients are warnings."""
        succeeded = exchange.status < 400
        if succeeded and self.success_sample < 1 and self._draw() >= self.success_sample:
            return
        level = "info" if succeeded else "warning" if exchange.status < 500 else "error"
        output = structlog.get_config()["logger_factory"]
        is_ours = isinstance(output, Output)
        if is_ours and LEVELS[level] < output.level:
            return
        fields: dict[str, Any] = {
            "request_id": exchange.request_id,
            "method": exchange.method,
            "route": exchange.route,
            "status": exchange.status,
            "duration_ms": round(seconds * 1e6) / 1e3,
        }
        for name in ("code", "key", "version", "candidates", "history", "requests", "cache"):
            if value := getattr(exchange, name):
                fields[name] = value
        if exchange.stages:
            fields["stages_ms"] = {stage: round(value * 1e6) / 1e3 for stage, value in exchange.stages.items()}
        if trace_id is not None:
            fields["trace_id"] = trace_id
        if not is_ours:
            getattr(self._log, level)("request", **fields)
            return
        fields["event"], fields["level"], fields["time"] = "request", level, _now()
        fields.update(output.process)
        line = output.render(None, level, fields) + "\n"
        if len(line) > LONG_LINE:
            line = output.render(None, level, shorten(None, level, fields)) + "\n"
        if succeeded and isinstance(output.stream, Sink):
            output.stream.write_droppable(line)
        else:
            output.stream.write(line)


@lru_cache(maxsize=1)
def _second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def _now() -> str:
    """The time as structlog's stamp has it; its date and its second are written once a second."""
    second, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
    return f"{_second(second)}.{nanoseconds // 1000:06d}Z"


class Recorder:
    """`routes` are the known paths: any other is one label, so that no caller can make a metric series."""

    def __init__(
        self,
        metrics: Metrics,
        routes: Collection[str],
        request_log: RequestLog,
        tracer: RequestTracer | None = None,
    ) -> None:
        self.metrics = metrics
        self.routes = frozenset(routes)
        self._templates = [(compile_path(route)[0], route) for route in sorted(routes) if "{" in route]
        self.request_log = request_log
        self.tracer = tracer
        self._series: dict[tuple[str, str, int], tuple[Counter, Series]] = {}

    def begin(self, method: str, path: str, headers: Headers) -> Exchange:
        """A request's headers have arrived."""
        sent = request_id_of(headers)
        return Exchange(
            request_id=sent or new_request_id(),
            is_named_by_caller=sent is not None,
            started=time.perf_counter(),
            method=method if method in METHODS else OTHER,
            route=path if path in self.routes else self._template(path),
        )

    def _template(self, path: str) -> str:
        """The route with parameters that a path fits: one label for all of them."""
        return next((route for pattern, route in self._templates if pattern.match(path)), UNMATCHED)

    def problem(self, error: Exception, exchange: Exchange) -> ServiceError:
        """What the caller is told of an error. Any but ServiceError is a fault of ours, which is logged."""
        problem = told(error)
        exchange.code = problem.code
        if problem is not error:
            _log_fault(error, exchange)
        return problem

    def end(self, exchange: Exchange, headers: Headers) -> None:
        """The reply is out, or the client has disconnected: `exchange.status` is 0 then."""
        seconds = time.perf_counter() - exchange.started
        exchange.status = exchange.status or CLIENT_GONE
        trace_id = None if self.tracer is None else self.tracer.record(exchange, seconds, headers)
        self.request_log.write(exchange, seconds, trace_id)
        requests, duration = self._series_of(exchange.method, exchange.route, exchange.status)
        requests.inc()
        duration.observe(seconds)
        if exchange.version:  # it was answered with scores
            for stage in ("parse", "serialize"):
                self.metrics.stage[stage].observe(exchange.stages.get(stage, 0.0))
            for names, probabilities in exchange.scored:
                self.metrics.reply_probabilities.record(names, probabilities)
        if exchange.code == TooLarge.code:
            self.metrics.rejected.labels("too_large").inc()

    def _series_of(self, method: str, route: str, status: int) -> tuple[Counter, Series]:
        """The counter and the histogram of these labels, looked up once."""
        found = self._series.get((method, route, status))
        if found is None:
            counter = self.metrics.http_requests.labels(method, route, str(status))
            found = self._series[method, route, status] = counter, self.metrics.http_seconds.labels(method, route)
        return found


def _log_fault(error: Exception, exchange: Exchange) -> None:
    """Where it happened, without the message: that may hold what the caller sent."""
    frames = traceback.extract_tb(error.__traceback__)
    trace = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-12:]]
    log.error("fault", request_id=exchange.request_id, error=type(error).__name__, trace=trace)
