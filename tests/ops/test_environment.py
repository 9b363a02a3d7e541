"""Variables of the environment that other programs' libraries read: none of them stops the service from starting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.server import DEMO, Server, example, serving


def counted_rankings(server: Server) -> float:
    """How many rankings the metrics count; the order of labels is free."""
    lines = server.get("/metrics").text.splitlines()
    counted = [line for line in lines if line.startswith("ranker_http_requests_total{") and 'route="/rank"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in counted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_PROPAGATORS": "b3multi"},
        {"PROMETHEUS_MULTIPROC_DIR": "/nowhere/metrics"},
        {"PYTHONOPTIMIZE": "2"},
    ],
    ids=lambda variables: next(iter(variables)),
)
def test_a_librarys_variable_stops_no_start(variables: dict[str, str]) -> None:
    with serving(threads=1, env=variables) as server:
        assert server.post("/rank", example(1)).status_code == 200
        assert counted_rankings(server) == 1
        assert server.get("/openapi.json").status_code == 200
        assert "Traceback" not in server.log_text


@pytest.mark.slow
def test_with_several_workers_every_variable_may_be_set(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk.trace", reason="the tracing extra is not installed")
    variables = {
        "OTEL_PROPAGATORS": "b3multi",
        "OTEL_SDK_DISABLED": "true",
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
        "PYTHONOPTIMIZE": "2",
    }
    with serving(threads=1, workers=2, tracing__enabled=True, env=variables) as server:
        assert server.post("/rank", example(1)).status_code == 200
        assert counted_rankings(server) == 1
        assert "Traceback" not in server.log_text
        requests = [line for line in server.log_lines if line.get("event") == "request"]
        assert requests
        assert not any("trace_id" in line for line in requests), "a disabled SDK has no trace to name"
    assert not list(tmp_path.iterdir()), "the processes add up their metrics without these files"


@pytest.mark.slow
@pytest.mark.parametrize("command", [["--help"], ["info", str(DEMO)], ["serve", "--help"]], ids=" ".join)
def test_commands_run_without_docstrings(command: list[str]) -> None:
    words = [sys.executable, "-c", "from app.cli import main; main()", *command]
    done = subprocess.run(words, env=os.environ | {"PYTHONOPTIMIZE": "2"}, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
