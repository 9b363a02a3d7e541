"""Request ids are 32 hex digits, and no two processes give the same."""

from __future__ import annotations

import os
import random
import re

from app.errors import NotFound
from app.http.observe import Recorder, RequestLog, new_request_id
from app.telemetry.metrics import Metrics


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
