"""The table of the event loop's time has every station of a request, adds up, and leaves the code as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.generate import wrk

pytest.importorskip("torch")
if not wrk.IS_INSTALLED:
    pytest.skip("wrk is not installed: apt-get install wrk", allow_module_level=True)

from loadtest.loop_profile import STATIONS, loop_columns

DEMO = Path(__file__).parents[2] / "weights" / "demo"


def test_every_station_is_passed_and_nothing_is_left_patched() -> None:
    kept = {place: getattr(*place) for places in STATIONS.values() for place in places}
    columns = loop_columns(DEMO, {"demo": [(DEMO / "example.json").read_bytes().replace(b"\n", b" ")]}, 1.0)
    assert set(columns) == {"demo, 1 connection", "demo, 16 connections"}
    for column in columns.values():
        assert set(column) == {*STATIONS, "sockets and the loop"}
        assert all(column[station] > 0 for station in STATIONS)
        assert 50 < sum(column.values()) < 50_000
    assert kept == {place: getattr(*place) for place in kept}
