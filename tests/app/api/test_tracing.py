"""Spans: children of the caller's, one a stage, none when off."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from typing import Any

import pytest

from app.settings import SettingsProblem, Tracing
from app.telemetry.exchange import Exchange
from app.telemetry.tracing import create_tracer
from tests.app.api.collector import collecting

pytestmark = pytest.mark.one_process("it is about the HTTP side alone")

pytest.importorskip("opentelemetry.sdk.trace", reason="the tracing extra is not installed")
PARENT = {b"traceparent": b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


def traced(headers: dict[bytes, bytes], services: set[str] | None = None) -> tuple[str, dict[str, Any]]:
    """The trace id and the spans of a request with these headers. `services`: as in `collecting`."""
    with collecting(services) as spans:
        tracer = create_tracer(Tracing(enabled=True))
        assert tracer is not None
        trace = tracer.record(Exchange("r1", 0.0, "POST", "/rank", 200, candidates=64), 0.008, headers)
        tracer.close()
    return trace, spans


def test_without_a_parent_a_trace_begins_and_the_ratio_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, spans = traced({})
    assert int(trace, 16)
    assert spans["POST /rank"].trace_id.hex() == trace
    assert not spans["POST /rank"].parent_span_id
    assert traced({b"traceparent": b"garbage\r\n"})[0] != trace
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    assert traced({})[1] == {}


def test_the_callers_decision_not_to_sample_holds() -> None:
    assert traced({b"traceparent": PARENT[b"traceparent"][:-2] + b"00"})[1] == {}


def test_a_collector_that_is_silent_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", endpoint)
        tracer = create_tracer(Tracing(enabled=True))
        assert tracer is not None
        tracer.record(Exchange("r1", 0.0, "POST", "/rank", 200), 0.008, {})
        started = time.monotonic()
        tracer.close()
        assert time.monotonic() - started < 8  # OpenTelemetry's own patience is 10 s


@pytest.mark.parametrize(
    ("variables", "service"),
    [
        ({}, "phoenix-ranking-server"),
        ({"OTEL_SERVICE_NAME": "feed"}, "feed"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=feed,team=a"}, "feed"),
    ],
)
def test_the_name_of_the_service_is_opentelemetrys(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], service: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    services: set[str] = set()
    traced({}, services)
    assert services == {service}


@pytest.mark.parametrize("value", ["true", "TRUE "])
def test_a_disabled_sdk_makes_no_tracer(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", value)
    assert create_tracer(Tracing(enabled=True)) is None


def test_a_variable_that_cannot_be_used_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "0")
    with pytest.raises(SettingsProblem, match="OTEL_"):
        create_tracer(Tracing(enabled=True))


def test_off_costs_nothing() -> None:
    assert create_tracer(Tracing()) is None
    code = "import sys, app.telemetry.tracing; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
