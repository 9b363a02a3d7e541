"""The log of what was served by real processes: what the engine was given, in parts that survive whatever happens."""

from __future__ import annotations

import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from loadtest.served import Caller, Checker, bodies, run
from loadtest.server import DEMO, Server, example, serving, wait_until
from tests.support.parts import rankings_of
from weights.checkpoint import load_checkpoint
from weights.served import PARTS, read_part
from weights.synthetic.small_checkpoint import write_small_checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ids", ["uint64", "text"])
def test_the_log_says_what_the_engine_was_given(tmp_path: Path, ids: Any, workers: int) -> None:
    checkpoint = DEMO
    if ids == "text":
        checkpoint = tmp_path / "texts"
        write_small_checkpoint(checkpoint, 0, ids="text")
    tally = run(checkpoint, 2500, workers)
    assert tally.candidates >= 2500
    assert (tally.different, tally.lacking) == (0, 0)
    assert min(tally.truncated, tally.by_handle, tally.explored) > 0


@pytest.mark.slow
def test_a_difference_would_be_seen(tmp_path: Path) -> None:
    checkpoint, body = load_checkpoint(DEMO), next(bodies("uint64", 1)) | {"weights": "default"}
    with serving(threads=1, served__directory=tmp_path) as server:
        caller = Caller(server, checkpoint, ["objects"])
        caller.send(1, body)
    (row,) = rankings_of(tmp_path)
    checker, answered = Checker(checkpoint), caller.answered["ranking-1"]
    assert checker.is_right(row, answered)
    surfaces = row.candidates.surfaces.copy()
    surfaces[0] += 1
    assert not checker.is_right(structs.replace(row, candidates=replace(row.candidates, surfaces=surfaces)), answered)
    assert not checker.is_right(structs.replace(row, context=row.context.last(3)), answered)
    assert not checker.is_right(structs.replace(row, scores=row.scores * (1 + 1e-15)), answered)
    assert not checker.is_right(structs.replace(row, ranks=row.ranks[::-1]), answered)


def load(server: Server, seconds: float, then: Any = lambda: None) -> list[int]:
    """Rank pages of many users for this long; `then` is called at the end while requests are under way. The statuses."""
    stream = bodies("uint64", 2)
    pages = [next(stream) for _ in range(64)]
    statuses: list[int] = []
    until = time.monotonic() + seconds

    def go_on(caller: int) -> None:
        number = 0
        with suppress(httpx.TransportError):  # the server was killed
            while time.monotonic() < until + 1:
                number += 1
                page = pages[(7 * caller + number) % len(pages)]
                statuses.append(server.post("/rank", page | {"request_id": f"{caller}-{number}"}).status_code)

    with ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(go_on, caller) for caller in range(4)]
        time.sleep(seconds)
        then()
        for task in tasks:
            task.result()
    return statuses


@pytest.mark.slow
def test_closed_parts_are_whole_after_kill_9(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(threads=1, served__directory=log, served__part_seconds=1) as server:
        statuses = load(server, 6, lambda: server.signal(signal.SIGKILL))
        server.wait()
    assert {*statuses} == {200}
    parts = sorted(log.glob(PARTS))
    assert len(parts) >= 2
    rows = [row for part in parts for row in read_part(part)]
    assert 0 < len(rows) <= len(statuses) + 4
    assert len({row.request_id for row in rows}) == len(rows)
    with serving(threads=1, served__directory=log, served__part_seconds=1) as server:
        assert server.post("/rank", example() | {"request_id": "after"}).status_code == 200
    assert "after" in {row.request_id for row in rankings_of(log)}


@pytest.mark.slow
def test_a_full_disk_costs_rankings_and_no_request(tmp_path: Path) -> None:
    """No file of the process may grow beyond 40,000 bytes, so each part fails where it would be written. Then the limit is lifted."""
    log = tmp_path / "log"
    with serving(threads=1, served__directory=log, served__part_seconds=1, logs__level="error") as server:
        _, most = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (40_000, most))
        statuses = load(server, 4)
        wait_until(lambda: server.metric("ranker_served_dropped_total", reason="not_written") > 0)
        assert {*statuses} == {200}
        assert [line["event"] for line in server.log_lines].count("served_not_written") == 1
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (most, most))
        wait_until(lambda: not [*log.glob("date=*/*.open")])
        assert server.post("/rank", example() | {"request_id": "after"}).status_code == 200
        wait_until(lambda: "after" in {row.request_id for row in rankings_of(log)})
        counted = server.metric("ranker_served_rankings_total") + server.metric("ranker_served_dropped_total")
        assert counted == len(statuses) + 1


@pytest.mark.slow
def test_workers_write_side_by_side_and_count_together(tmp_path: Path) -> None:
    with serving(workers=2, threads=1, served__directory=tmp_path, served__part_seconds=1) as server:
        statuses = load(server, 3)
        wait_until(lambda: server.metric("ranker_served_rankings_total") == len(statuses))
        assert {*statuses} == {200}
        text = server.get("/metrics").text
        assert {f'ranker_served_rankings_total{{worker="{number}"}}' in text for number in (1, 2)} == {True}
    rows = rankings_of(tmp_path)
    assert len({row.request_id for row in rows}) == len(rows) == len(statuses)
