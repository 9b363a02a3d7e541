"""A collector of OpenTelemetry spans, over HTTP as in production. Needs the tracing extra. Not a test itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest


@contextmanager
def collecting(services: set[str] | None = None) -> Iterator[dict[str, Any]]:
    """The collector that OpenTelemetry's variables name within the block; yields the spans that it has got, by their names. The names of
    the services that sent them are added to `services`."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: dict[str, Any] = {}

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            if services is not None:
                attributes = (each for sender in sent.resource_spans for each in sender.resource.attributes)
                services.update(each.value.string_value for each in attributes if each.key == "service.name")
            scopes = (scope for resource in sent.resource_spans for scope in resource.scope_spans)
            spans.update({span.name: span for scope in scopes for span in scope.spans})
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as server, pytest.MonkeyPatch.context() as environment:
        endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
        environment.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", endpoint)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield spans
        finally:
            server.shutdown()
            thread.join(10)
