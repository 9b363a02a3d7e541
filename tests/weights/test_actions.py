"""The default weights are those that the page tells, and a checkpoint's are those of the names that it has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weights.actions import (
    CONTINUOUS_WEIGHTS,
    SCORE_WEIGHT_SETS,
    STANDARD_ACTIONS,
    default_score_weights,
    released_action_names,
)

PAGE = Path(__file__).parents[2] / "docs/weights.md"


@pytest.mark.parametrize(("begin", "name"), [("Default weights", "default"), ("Weights `x-2026-09`", "x-2026-09")])
def test_the_page_tells_every_weight(begin: str, name: str) -> None:
    told = re.search(rf"^{begin}: (.*?)\.( |$)", PAGE.read_text(), re.MULTILINE)
    assert told
    pairs = [pair.rsplit(" ", 1) for pair in told[1].replace("`", "").replace("−", "-").split(", ")]
    assert {name: float(weight) for name, weight in pairs} == SCORE_WEIGHT_SETS[name]


def test_a_set_gives_weights_to_the_actions_that_it_knows() -> None:
    assert default_score_weights(STANDARD_ACTIONS) == SCORE_WEIGHT_SETS["default"]
    assert default_score_weights(["reply", "a new one"]) == {"reply": 5.0}
    assert default_score_weights(["report", "dwell_time", "open_link"], "x-2026-09") == {
        "report": -234,
        "open_link": 0.2,
    }
    assert set(CONTINUOUS_WEIGHTS) <= set(SCORE_WEIGHT_SETS)
    with pytest.raises(KeyError):
        default_score_weights(["reply"], "of nobody")


def test_a_release_of_another_size_has_no_known_names() -> None:
    assert released_action_names(19)[:6] == ("action_0", "favorite", "action_2", "action_3", "reply", "quote")
    assert [name for name in released_action_names(19)[6:] if not name.startswith("action_")] == [
        "repost",
        "dwell",
        "vqv",
    ]
    assert released_action_names(3) == ("action_0", "action_1", "action_2")
