"""Names of actions, and the score weights that are given on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from weights.actions import (
    CONTINUOUS_WEIGHTS,
    DWELL_TIME,
    FRACTION_WEIGHTS,
    SCORE_WEIGHT_SETS,
    STANDARD_ACTIONS,
    default_score_weights,
    left_out_terms,
    released_action_names,
    score_weights_of,
    score_weights_text,
)
from weights.errors import CheckpointError
from weights.format.manifest import ContinuousOutput


def test_a_set_gives_weights_to_the_actions_that_it_knows() -> None:
    assert default_score_weights(STANDARD_ACTIONS) == SCORE_WEIGHT_SETS["default"]
    assert default_score_weights(["reply", "a new one"]) == {"reply": 5.0}
    assert default_score_weights(["report", "dwell_time", "open_link"], "x-2026-09") == {
        "report": -234,
        "open_link": 0.2,
    }
    changed = {"click": 0.3, "not_interested": -47.52}
    assert SCORE_WEIGHT_SETS["x-2026-10"] == SCORE_WEIGHT_SETS["x-2026-09"] | changed
    assert set(CONTINUOUS_WEIGHTS) | set(FRACTION_WEIGHTS) <= set(SCORE_WEIGHT_SETS)
    with pytest.raises(KeyError):
        default_score_weights(["reply"], "of nobody")


def test_the_terms_of_continuous_outputs_are_told_of_a_set() -> None:
    outputs = [ContinuousOutput("click_dwell_time", 60.0, "s"), DWELL_TIME, ContinuousOutput("other", 1.0, "")]
    (line,) = left_out_terms("x-2026-10", outputs)
    assert "leaves out 0.004 · dwell_time (s) + 0.4 · click_dwell_time (0 to 1) of x-2026-10," in line
    assert left_out_terms("x-2026-10", outputs[2:]) == left_out_terms("default", outputs) == []


def test_a_release_of_another_size_has_no_known_names() -> None:
    assert released_action_names(3) == ("action_0", "action_1", "action_2")


def test_a_release_of_nineteen_outputs_has_all_their_names() -> None:
    named = {1: "favorite", 4: "reply", 5: "quote", 6: "repost", 11: "dwell", 13: "vqv"}  # what its own pipeline reads
    names = released_action_names(19)
    assert {index: names[index] for index in named} == named
    assert not any(name.startswith("action_") for name in names)


NAMES = ("favorite", "reply", "report")


def test_score_weights_are_a_set_or_written_out_or_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "weights.json").write_text('{"favorite": 1, "report": -20.5}')
    assert score_weights_of("default", NAMES) == {"favorite": 1.0, "reply": 5.0, "report": -20.0}
    assert score_weights_of("favorite=1, report=-20.5", NAMES) == {"favorite": 1.0, "report": -20.5}
    assert score_weights_of(str(tmp_path / "weights.json"), NAMES) == {"favorite": 1.0, "report": -20.5}
    assert score_weights_text({"favorite": 1.0, "report": -20.5}) == "favorite=1,report=-20.5"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("favourite=1", "no action 'favourite'; did you mean favorite?"),
        ("zzz=1", "there are favorite, reply, report"),
        ("favorite=1,favorite=2", "names favorite twice"),
        ("favorite=much", "the weight of favorite must be a number"),
        ("favorite=nan", "the weight of favorite must be a number"),
        (
            "favorite",
            "neither a file nor a set of score weights (default, x-2026-09, x-2026-10) nor weights such as favorite=1",
        ),
    ],
)
def test_score_weights_that_cannot_be_meant_are_refused(given: str, sentence: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        score_weights_of(given, NAMES)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[1]", "must hold a JSON object"),
        ("{", "cannot be read as JSON"),
        ('{"favorite": 1, "favorite": 2}', "names favorite twice"),
        ('{"favorite": null}', "the weight of favorite must be a number"),
    ],
)
def test_a_file_of_score_weights_is_named_in_its_refusal(tmp_path: Path, content: str, sentence: str) -> None:
    file = tmp_path / "weights.json"
    file.write_text(content)
    with pytest.raises(CheckpointError) as refused:
        score_weights_of(str(file), NAMES)
    assert str(refused.value).startswith(str(file))
    assert sentence in str(refused.value)
