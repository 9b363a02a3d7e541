"""Action names and score weights for new checkpoints. An existing checkpoint has its own in its manifest."""

from __future__ import annotations

from collections.abc import Sequence

from weights.format.manifest import ContinuousOutput

STANDARD_ACTIONS = (
    "favorite", "reply", "repost", "photo_expand", "click", "profile_click", "vqv", "share", "share_via_dm",
    "share_via_copy_link", "dwell", "quote", "quoted_click", "follow_author", "not_interested", "block_author",
    "mute_author", "report", "dwell_time",
)  # fmt: skip
"""The nineteen actions in the output order of the source code; checkpoints trained here use it."""

RELEASED_INDICES = {1: "favorite", 4: "reply", 5: "quote", 6: "repost", 11: "dwell", 13: "vqv"}
"""The outputs that the pipeline shipped with the released checkpoint reads. The meaning of the other indices is not published."""

RELEASED_DWELL_INDEX = 1
"""The continuous output that the same pipeline reads as dwell time."""

DWELL_TIME = ContinuousOutput("dwell_time", 30.0, "s")
"""Dwell time as a continuous output: the model's 0 … 1 times 30 s."""

SCORE_WEIGHT_SETS = {
    "default": {
        "favorite": 1.0, "reply": 5.0, "repost": 2.0, "photo_expand": 0.1, "click": 0.2, "profile_click": 0.5, "vqv": 0.3,
        "share": 2.0, "share_via_dm": 3.0, "share_via_copy_link": 2.0, "dwell": 0.2, "quote": 3.0, "quoted_click": 0.2,
        "follow_author": 4.0, "not_interested": -5.0, "block_author": -15.0, "mute_author": -10.0, "report": -20.0,
    },
    "x-2026-09": {
        "favorite": 0.5, "reply": 5.0, "repost": 1.0, "photo_expand": 0.05, "video_open": 0.07, "click": 0.4,
        "open_link": 0.2, "profile_click": 0.0, "vqv": 0.0, "share": 2.0, "share_via_dm": 5.0, "share_via_copy_link": 20.0,
        "dwell": 0.05, "quote": 5.0, "quoted_click": 0.05, "quoted_vqv": 0.0, "follow_author": 4.0, "not_dwelled": -0.02,
        "not_interested": -43.2, "block_author": -31.2, "mute_author": -58.8, "report": -234.0,
    },
}  # fmt: skip
"""Weights of the combined score, by set name; complaints have negative weights. New checkpoints get `default`.

`x-2026-09` is what X published in September 2026. There, a reply between users who follow each other is worth 15 more. A weight per
action cannot express that, so it is left out.
"""

CONTINUOUS_WEIGHTS = {"x-2026-09": {"dwell_time": 0.004}}
"""Weights per unit of a continuous output (here: per second of dwell), by set name; used if a checkpoint has the output. Kept apart
from the actions' weights because checkpoints also have an action called `dwell_time`."""


def released_action_names(actions: int) -> tuple[str, ...]:
    """Output names of a published checkpoint. With the release's nineteen outputs the known ones get names; all others are `action_i`."""
    known = RELEASED_INDICES if actions == len(STANDARD_ACTIONS) else {}
    return tuple(known.get(index, f"action_{index}") for index in range(actions))


def continuous_outputs(count: int, dwell_index: int) -> tuple[ContinuousOutput, ...]:
    """Labels for `count` continuous outputs: dwell time at `dwell_index`, generic names for the others."""
    return tuple(
        DWELL_TIME if index == dwell_index else ContinuousOutput(f"continuous_{index}", 1.0, "")
        for index in range(count)
    )


def dwell_output(outputs: Sequence[ContinuousOutput]) -> int | None:
    """The place of dwell time among a checkpoint's continuous outputs; None if it has no output of that name."""
    return next((index for index, output in enumerate(outputs) if output.name == DWELL_TIME.name), None)


def default_score_weights(action_names: Sequence[str], name: str = "default") -> dict[str, float]:
    """The weights of set `name` for those of the actions that it contains. Raises KeyError for an unknown set."""
    weights = SCORE_WEIGHT_SETS[name]
    return {action: weights[action] for action in action_names if action in weights}
