"""Request ids are 32 hex digits, and no two processes give the same."""

from __future__ import annotations

import json
import os
import random
import re
from datetime import UTC, datetime

import pytest
import structlog

from app.errors import NotFound
from app.http.observe import Recorder, RequestLog, new_request_id
from app.settings import Logs
from app.telemetry.exchange import Exchange
from app.telemetry.logs import configure
from app.telemetry.metrics import Metrics
from app.telemetry.sink import Sink


def test_ids_differ_and_are_well_formed() -> None:
    ids = {new_request_id() for _ in range(10_000)}
    assert len(ids) == 10_000
    assert all(re.fullmatch(r"[0-9a-f]{32}", found) for found in ids)


def test_a_forked_process_gives_other_ids() -> None:
    plain = random.Random(1)  # the control: without a new seed both processes go on alike
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, f"{new_request_id()} {plain.getrandbits(128)}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    theirs, control = os.read(reader, 1000).decode().split()
    os.close(reader)
    os.close(writer)
    assert int(control) == plain.getrandbits(128)
    assert theirs != new_request_id()


def test_the_code_of_a_problem_is_noted_for_the_log() -> None:
    recorder = Recorder(Metrics(), ["/rank"], RequestLog())
    exchange = recorder.begin("POST", "/rank", {})
    assert recorder.problem(NotFound(), exchange).status == 404
    assert exchange.code == "not_found"
    assert recorder.problem(KeyError("what the caller sent"), exchange).status == 500
    assert exchange.code == "internal"


def test_the_sink_of_the_process_gets_the_lines_from_its_level_on(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    sink, began = Sink(writer), datetime.now(UTC)
    monkeypatch.setattr("app.telemetry.logs.process_sink", lambda: sink)
    for level in ("info", "warning"):
        configure(Logs(format="json", level=level))
        for status in (200, 503):
            RequestLog().write(Exchange("r1", 0.0, method="POST", route="/rank", status=status), 0.001)
    structlog.reset_defaults()
    sink.drain()
    said = [json.loads(line) for line in os.read(reader, 10_000).splitlines()]
    assert [(line["level"], line["status"]) for line in said] == [("info", 200), ("error", 503), ("error", 503)]
    assert all(began <= datetime.fromisoformat(line["time"]) <= datetime.now(UTC) for line in said)
