"""The default weights are those that the page tells, and a checkpoint's are those of the names that it has."""

from __future__ import annotations

import re
from pathlib import Path

from weights.actions import SCORE_WEIGHTS, STANDARD_ACTIONS, default_score_weights, released_action_names

PAGE = Path(__file__).parents[2] / "docs/weights.md"


def test_the_page_tells_every_default_weight() -> None:
    told = re.search(r"^Default weights: (.*)\.$", PAGE.read_text(), re.MULTILINE)
    assert told
    pairs = [pair.rsplit(" ", 1) for pair in told[1].replace("`", "").replace("−", "-").split(", ")]
    assert {name: float(weight) for name, weight in pairs} == SCORE_WEIGHTS
    assert default_score_weights(STANDARD_ACTIONS) == SCORE_WEIGHTS
    assert default_score_weights(["reply", "a new one"]) == {"reply": 5.0}


def test_a_release_of_another_size_has_no_known_names() -> None:
    assert released_action_names(19)[:6] == ("action_0", "favorite", "action_2", "action_3", "reply", "quote")
    assert [name for name in released_action_names(19)[6:] if not name.startswith("action_")] == [
        "repost",
        "dwell",
        "vqv",
    ]
    assert released_action_names(3) == ("action_0", "action_1", "action_2")
