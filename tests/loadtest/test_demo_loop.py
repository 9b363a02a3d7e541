"""The demo of the loop in a short form: a running service, a nightly turn each day, tastes that change, and a poisoned night."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("duckdb")
pytest.importorskip("sklearn")

from loadtest.loop.picture import draw_picture, table_of
from loadtest.loop.run import run
from loadtest.loop.settings import LoopSettings

SHORT = LoopSettings(days=3, drift_day=1, poisoned_day=0, warm_up_days=3, users=140, authors=16, held_out=0.35)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_loop_follows_what_people_like(tmp_path: Path) -> None:
    days = run(SHORT, tmp_path, say=True)
    assert [day.failures for day in days] == [0] * SHORT.days, "no request is lost, also while a version takes over"
    poisoned, drifted, last = days
    assert (poisoned.exit_code, "is refused: labels" in poisoned.sentence) == (3, True)
    assert (drifted.exit_code, "published" in drifted.sentence) == (0, True)
    assert (poisoned.recovered, drifted.recovered) == pytest.approx((0, 0), abs=1e-6), "one model until then"
    assert poisoned.version != drifted.version
    for day in days:
        assert day.rewards["optimum"] > max(day.rewards["loop"], day.rewards["frozen"])
        assert day.rewards["loop"] - day.rewards["frozen"] >= -3 * day.lead_error
    assert poisoned.rewards["loop"] > 1.5 * poisoned.rewards["chance"]
    reached = [day.rewards["loop"] / day.rewards["optimum"] for day in days]
    assert reached[1] < reached[0] - 0.15, "the model does not know the new tastes"
    assert last.recovered > 0.1, "one night after tastes have changed"
    draw_picture(days, SHORT, tmp_path / "loop.png")
    assert (tmp_path / "loop.png").read_bytes().startswith(b"\x89PNG")
    assert table_of(days).count("\n") == SHORT.days + 1
