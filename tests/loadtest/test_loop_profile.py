"""The table of the event loop's time has every station of a request, adds up, and leaves the code as it was."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from app.telemetry import sink
from loadtest.generate import wrk

pytest.importorskip("torch")
if not wrk.IS_INSTALLED:
    pytest.skip("wrk is not installed: apt-get install wrk", allow_module_level=True)

from loadtest.loop_profile import RANK, RECOMMEND, Stations, loop_columns

DEMO = Path(__file__).parents[2] / "weights" / "demo"
EXAMPLE = orjson.loads((DEMO / "example.json").read_bytes())
POSTS = {name: value for name, value in EXAMPLE.items() if name != "candidates"} | {"top_k": 20}
RETRIEVAL = {"checkpoint": DEMO.parent / "demo-towers", "corpus": DEMO.parent / "demo-posts"}


@pytest.mark.parametrize(
    ("path", "stations", "body", "further"),
    [("/rank", RANK, EXAMPLE, {}), ("/recommend", RECOMMEND, POSTS, {"retrieval": RETRIEVAL})],
)
def test_every_station_is_passed_and_nothing_is_left_patched(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    stations: Stations,
    body: dict[str, Any],
    further: dict[str, Any],
) -> None:
    """Nor does a server's log hide the tables, though the last lines wait a while for company."""
    monkeypatch.setattr(sink, "GATHER_SECONDS", 0.2)
    kept = {place: getattr(*place) for places in stations.values() for place in places}
    columns = loop_columns(DEMO, path, stations, {"demo": [orjson.dumps(body)]}, 1.0, **further)
    assert set(columns) == {"demo, 1 connection", "demo, 16 connections"}
    for column in columns.values():
        assert set(column) == {*stations, "sockets and the loop"}
        away = {"encode", "search"}  # all the time where a search takes more than a millisecond
        assert [station for station in stations if column[station] <= 0 and station not in away] == []
        assert 50 < sum(column.values()) < 50_000
    assert kept == {place: getattr(*place) for place in kept}
    time.sleep(2 * sink.GATHER_SECONDS)
    assert '"route"' not in capfd.readouterr().err
