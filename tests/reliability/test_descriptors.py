"""A process that runs out of file descriptors says so, loses nobody who waits, and goes on once there is room."""

from __future__ import annotations

import sys
from contextlib import ExitStack

import pytest

from loadtest.server import example, serving, wait_until

DESCRIPTORS, CALLERS = 80, 120
PROGRAM = ("bash", "-c", f'ulimit -n {DESCRIPTORS}; exec "$0" -m app', sys.executable)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_running_out_of_descriptors_is_said_and_passes(workers: int) -> None:
    with serving(command=PROGRAM, workers=workers) as server:
        with ExitStack() as stack:
            for _ in range(CALLERS * max(1, workers)):
                stack.enter_context(server.connect())  # says nothing, so it is cut off after some seconds
            wait_until(lambda: "connections_not_taken" in server.log_text)
        wait_until(lambda: server.post("/rank", example()).status_code == 200, 30)
        lines = [line for line in server.log_lines if line["event"] == "connections_not_taken"]
        assert {(line["level"], line["reason"]) for line in lines} == {("error", "Too many open files")}
        assert len(lines) <= max(1, workers)
        assert server.metric("ranker_connections_not_taken_total") > 0
        assert server.post("/rank", example()).status_code == 200
