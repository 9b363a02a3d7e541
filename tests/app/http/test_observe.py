"""Request ids are 32 hex digits, and no two processes give the same."""

from __future__ import annotations

import asyncio
import os
import random
import re

import pytest
import structlog
from starlette.types import Receive, Scope, Send

from app.errors import Overloaded
from app.http.observe import Observe, Recorder, new_request_id
from app.telemetry.logs import RequestLog
from app.telemetry.metrics import Metrics
from tests.app.serving import ask, value_of


def test_ids_differ_and_are_well_formed() -> None:
    ids = {new_request_id() for _ in range(10_000)}
    assert len(ids) == 10_000
    assert all(re.fullmatch(r"[0-9a-f]{32}", found) for found in ids)


def test_a_reply_that_breaks_off_is_counted_as_a_fault() -> None:
    """Half a reply cannot be mended: the connection ends, and the metrics and the log say 500, not what was begun."""

    async def breaks(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise Overloaded

    metrics = Metrics()
    observed = Observe(breaks, Recorder(metrics, ["/rank"], RequestLog()))
    with structlog.testing.capture_logs() as lines, pytest.raises(Overloaded):
        asyncio.run(ask(observed, []))
    exposition = metrics.render().decode()
    assert value_of(exposition, 'ranker_http_requests_total{code="500",method="POST",route="/rank"}') == 1
    assert [line["event"] for line in lines][:1] == ["fault"]


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
