"""The demo is made whole, in a world small enough for a test."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from tests.weights.call import call
from tests.weights.lab.training.small_run import TRAINING, WORLD
from weights.actions import STANDARD_ACTIONS
from weights.lab.training.demo import make_demo
from weights.lab.training.towers import TowerSettings

SMALL = replace(WORLD, users=10, new_users=1, days=6)
TOWERS = TowerSettings(steps=20, batch_requests=16, warmup_steps=5)


@pytest.mark.slow
def test_one_call_makes_the_whole_demo(tmp_path: Path) -> None:
    told: set[str] = set()
    manifest, summary = make_demo(
        tmp_path / "demo", tmp_path / "work", replace(TRAINING, epochs=0.2),
        lambda what, done, total: told.add(what.partition(",")[0]), lambda status: None, SMALL, TOWERS,
    )  # fmt: skip
    assert {"sessions", "scoring", "baselines", "towers"} <= told
    assert (manifest.name, manifest.action_names) == ("demo", STANDARD_ACTIONS)
    assert call("verify", tmp_path / "demo").exit_code == 0
    assert call("verify", tmp_path / "demo-towers").exit_code == 0
    names = json.loads((tmp_path / "demo/names.json").read_text())
    example = json.loads((tmp_path / "demo/example.json").read_text())
    assert {post["author_id"] for post in example["candidates"]} <= set(names["authors"])
    assert set(names["example"]) == {"user", "likes", "reported", "history", "candidates"}
    world, again = tmp_path / "work/world", tmp_path / "again"
    judged = call("eval", "--checkpoint", tmp_path / "demo", "--world", world, "--out", again)
    assert judged.exit_code == 0, judged.output
    figures = json.loads((again / "figures.json").read_text())
    assert figures == json.loads((tmp_path / "demo/report/figures.json").read_text())
    assert summary["way_to_optimum"] == figures["way_to_optimum"]
