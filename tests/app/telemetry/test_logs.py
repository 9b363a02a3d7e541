"""Log lines: one a request, safe to print, nothing that a caller could forge."""

from __future__ import annotations

import io
import json

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from app.http.observe import RequestLog
from app.settings import Logs
from app.telemetry.exchange import Exchange
from app.telemetry.logs import configure


@pytest.fixture
def lines() -> io.StringIO:
    stream = io.StringIO()
    configure(Logs(format="json"), stream)
    yield stream
    structlog.reset_defaults()


def exchange(**fields: object) -> Exchange:
    return Exchange(**{"request_id": "r1", "started": 0.0, "method": "POST", "route": "/rank", "status": 200, **fields})


def test_a_line_says_what_happened_in_one_json_object(lines: io.StringIO) -> None:
    done = exchange(version="v1", candidates=64, history=127, cache="hit", stages={"queue": 0.00041})
    RequestLog().write(done, 0.0123, "ab" * 16)
    said = json.loads(lines.getvalue())
    assert said.pop("time").endswith("Z")
    assert said == {
        "event": "request", "level": "info", "request_id": "r1", "method": "POST", "route": "/rank", "status": 200,
        "duration_ms": 12.3, "version": "v1", "candidates": 64, "history": 127, "cache": "hit",
        "stages_ms": {"queue": 0.41}, "trace_id": "ab" * 16,
    }  # fmt: skip


@pytest.mark.parametrize("front", [None, 3])
def test_every_line_has_its_time_in_utc_and_the_number_of_its_front(lines: io.StringIO, front: int | None) -> None:
    configure(Logs(format="json"), lines, front=front)
    RequestLog().write(exchange(), 0.1)
    structlog.get_logger("app").info("planted")
    said = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [(line["time"][-1], line.get("front")) for line in said] == [("Z", front)] * 2


def test_successes_are_sampled_and_failures_are_not(lines: io.StringIO) -> None:
    draws = iter([0.05, 0.5, 0.09, 0.11])
    log = RequestLog(0.1, lambda: next(draws))
    for _ in range(4):
        log.write(exchange(), 0.001)
    for status in (429, 499, 500, 504):
        log.write(exchange(status=status), 0.001)
    said = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [line["status"] for line in said] == [200, 200, 429, 499, 500, 504]
    assert [line["level"] for line in said[2:]] == ["warning", "warning", "error", "error"]


@given(text=st.text(st.characters(codec=None, exclude_categories=()), max_size=60))
def test_whatever_a_value_holds_the_line_stays_one_line_of_plain_ascii(text: str) -> None:
    stream = io.StringIO()
    configure(Logs(format="json"), stream)
    RequestLog().write(exchange(request_id="\r\n\x1b[31m\x9b\u2028" + text), 0.001)
    written = stream.getvalue()
    assert written.count("\n") == 1
    assert all(" " <= letter < "\x7f" for letter in written[:-1])
    assert json.loads(written)["request_id"] == "\r\n\x1b[31m\x9b\u2028" + text
    structlog.reset_defaults()


def test_a_long_value_is_cut(lines: io.StringIO) -> None:
    RequestLog().write(exchange(code="x" * 65536), 0.001)
    assert len(lines.getvalue()) < 1000


def test_a_value_that_cannot_be_printed_costs_its_line_and_nothing_else(lines: io.StringIO) -> None:
    class Odd:
        def __str__(self) -> str:
            raise ValueError

    structlog.get_logger("app").info("said", value=Odd())
    said = json.loads(lines.getvalue())
    assert (said["event"], said["error"], said["level"]) == ("unprintable", "ValueError", "info")
