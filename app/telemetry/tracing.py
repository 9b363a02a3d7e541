"""OpenTelemetry spans of a request, made when it is over from what its log line says. Not loaded unless it is turned on."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from app.settings import SettingsProblem, Tracing
from app.telemetry.exchange import Exchange

SERVICE_NAME = "phoenix-ranking-server"
EXPORT_SECONDS = 2.0  # a collector that is down delays the end of the process by no more


def create_tracer(settings: Tracing) -> RequestTracer | None:
    """A tracer that exports to the collector in OpenTelemetry's own variables, or None where tracing is off, also by
    `OTEL_SDK_DISABLED`. Raises SettingsProblem without the `tracing` extra, and for variables that OpenTelemetry cannot use."""
    if not settings.enabled or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    try:
        return RequestTracer()
    except ImportError as error:
        raise SettingsProblem(f"RANKER_TRACING__ENABLED needs the `tracing` extra: {error}") from error
    except Exception as error:
        raise SettingsProblem(f"OpenTelemetry refuses its variables (OTEL_…): {error}") from error


class RequestTracer:
    """Turns a finished exchange into a span with one child per stage of its log line.

    A child reaches from when its stage first began to when it last ended, as far as the HTTP side knows: it takes a forward pass to end
    when its scores arrive. The children overlap where a stage was passed several times: those of a batch, in /recommend the `queue` of
    search and ranking, `parse` around a wait for the `corpus`, and in /explain `queue` around `parse`. The log line has the time in each
    stage.
    """

    def __init__(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come last: they win.
        resource = Resource.create({"service.name": SERVICE_NAME}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=EXPORT_SECONDS)))
        self._tracer = self._provider.get_tracer(SERVICE_NAME)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, exchange: Exchange, seconds: float, headers: Mapping[bytes, bytes]) -> str:
        """Make the spans of a request that ended now and took `seconds`; returns its trace id, 32 hex digits.

        A valid `traceparent` makes them children of the caller's span, and its sampling decision holds.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        carrier = {
            name: headers[name.encode()].decode("latin-1")
            for name in ("traceparent", "tracestate")
            if name.encode() in headers
        }
        end = time.time_ns()
        start = end - round(seconds * 1e9)
        span = self._tracer.start_span(
            f"{exchange.method} {exchange.route}",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=start,
            attributes={
                "http.request.method": exchange.method,
                "http.route": exchange.route,
                "http.response.status_code": exchange.status,
                "ranker.request_id": exchange.request_id,
                "ranker.model_version": exchange.version,
                "ranker.candidates": exchange.candidates,
                "ranker.history": exchange.history,
                "ranker.context_cache": exchange.cache,
            },
        )
        inside = set_span_in_context(span)
        for stage, (began, ended) in exchange.spans.items():
            child = self._tracer.start_span(
                stage, context=inside, start_time=start + round((began - exchange.started) * 1e9)
            )
            child.end(start + round((ended - exchange.started) * 1e9))
        if exchange.status >= 500:
            span.set_status(Status(StatusCode.ERROR, exchange.code))
        span.end(end)
        return format(span.get_span_context().trace_id, "032x")

    def close(self) -> None:
        """Export the remaining spans, and stop."""
        self._provider.shutdown()
