"""Action names and score weights for new checkpoints. An existing checkpoint has its own in its manifest."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weights.errors import CheckpointError, reason_of
from weights.format.manifest import ContinuousOutput
from weights.values import score_weight_problem

STANDARD_ACTIONS = (
    "favorite", "reply", "repost", "photo_expand", "click", "profile_click", "vqv", "share", "share_via_dm",
    "share_via_copy_link", "dwell", "quote", "quoted_click", "follow_author", "not_interested", "block_author",
    "mute_author", "report", "dwell_time",
)  # fmt: skip
"""The nineteen actions in the output order of the source code; checkpoints trained here use it."""

RELEASED_ACTIONS = (
    "invalid", "favorite", "unfavorite", "create", "reply", "quote", "repost", "unreply", "unquote", "unrepost",
    "server_report", "dwell", "not_dwelled", "vqv", "photo_expand", "mention_click", "report", "not_interested",
    "undo_not_interested",
)  # fmt: skip
"""The outputs of the released checkpoint of May 2026, by index: the enum `ActionName` of X's protocol, which its README names as the order.

The enum was published in August 2026, after the checkpoint. The six indices that the checkpoint's own pipeline reads (1, 4, 5, 6, 11 and
13) agree with it. `report` is CLIENT_TWEET_REPORT, which X's scorer weighs; SERVER_TWEET_REPORT is `server_report`.
"""

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

`x-2026-09` and `x-2026-10` are what X published in September and October 2026. There, a reply between users who follow each other is
worth 15 more. A weight per action cannot express that, so it is left out.
"""
SCORE_WEIGHT_SETS["x-2026-10"] = SCORE_WEIGHT_SETS["x-2026-09"] | {"click": 0.3, "not_interested": -47.52}

CONTINUOUS_WEIGHTS = {"x-2026-09": {"dwell_time": 0.004}, "x-2026-10": {"dwell_time": 0.004}}
"""Weights per unit of a continuous output (here: per second of dwell), by set name; used if a checkpoint has the output. Kept apart
from the actions' weights because checkpoints also have an action called `dwell_time`."""

FRACTION_WEIGHTS = {"x-2026-10": {"click_dwell_time": 0.4}}
"""As `CONTINUOUS_WEIGHTS`, but of the output as the model gives it, 0 … 1, whatever its unit."""


def released_action_names(actions: int) -> tuple[str, ...]:
    """Output names of a published checkpoint: `RELEASED_ACTIONS` for the release's nineteen outputs; any other number gets `action_i`."""
    if actions == len(RELEASED_ACTIONS):
        return RELEASED_ACTIONS
    return tuple(f"action_{index}" for index in range(actions))


def continuous_outputs(count: int, dwell_index: int) -> tuple[ContinuousOutput, ...]:
    """Labels for `count` continuous outputs: dwell time at `dwell_index`, generic names for the others."""
    return tuple(
        DWELL_TIME if index == dwell_index else ContinuousOutput(f"continuous_{index}", 1.0, "")
        for index in range(count)
    )


def dwell_output(outputs: Sequence[ContinuousOutput]) -> int | None:
    """The place of dwell time among a checkpoint's continuous outputs; None if it has no output of that name."""
    return next((index for index, output in enumerate(outputs) if output.name == DWELL_TIME.name), None)


def continuous_weights(name: str, outputs: Sequence[ContinuousOutput]) -> tuple[float, ...]:
    """The weights of set `name` per unit of each continuous output, 0 for those that it does not weigh."""
    by_unit, by_fraction = CONTINUOUS_WEIGHTS.get(name, {}), FRACTION_WEIGHTS.get(name, {})
    return tuple(by_unit.get(output.name, 0.0) + by_fraction.get(output.name, 0.0) / output.scale for output in outputs)


def left_out_terms(option: str, outputs: Sequence[ContinuousOutput]) -> list[str]:
    """What `score_weights_of` leaves out of a set for a checkpoint with these continuous outputs, as a sentence; of other options nothing.
    A manifest has weights of actions alone."""
    by_unit, by_fraction = CONTINUOUS_WEIGHTS.get(option, {}), FRACTION_WEIGHTS.get(option, {})
    terms = [f"{by_unit[one.name]:g} · {one.name} ({one.unit})" for one in outputs if one.name in by_unit]
    terms += [f"{by_fraction[one.name]:g} · {one.name} (0 to 1)" for one in outputs if one.name in by_fraction]
    if not terms:
        return []
    return [
        f"The checkpoint's score leaves out {' + '.join(terms)} of {option}, because a manifest has weights of actions alone; "
        f"a request that names {option} has it."
    ]


def default_score_weights(action_names: Sequence[str], name: str = "default") -> dict[str, float]:
    """The weights of set `name` for those of the actions that it contains. Raises KeyError for an unknown set."""
    weights = SCORE_WEIGHT_SETS[name]
    return {action: weights[action] for action in action_names if action in weights}


def weight_vector(weights: Mapping[str, float], action_names: Sequence[str]) -> NDArray[np.float64]:
    """The weight of each action, float64 `[A]`; 0 for an action without one."""
    return np.array([weights.get(name, 0.0) for name in action_names], np.float64)


def score_weights_of(option: str, action_names: Sequence[str]) -> dict[str, float]:
    """The score weights that `--score-weights` asks for, by action.

    `option` is one of: the name of a set in SCORE_WEIGHT_SETS, of which the known actions are taken; the weights themselves, as in
    `favorite=1,report=-20`; a JSON file with an object of action → weight. An action that is not named has the weight 0.
    Raises CheckpointError for an unknown action, an action named twice, or a value that is not a number within ±1e9.
    """
    if option in SCORE_WEIGHT_SETS:
        return default_score_weights(action_names, option)
    path = Path(option)
    entries, where = (
        (_inline(option), "--score-weights") if "=" in option and not path.exists() else (_of(path), option)
    )
    weights: dict[str, float] = {}
    for action, weight in entries:
        if action not in action_names:
            near = difflib.get_close_matches(action, action_names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(action_names)}"
            raise CheckpointError(f"{where}: there is no action {action[:64]!r}; {hint}")
        if action in weights:
            raise CheckpointError(f"{where} names {action} twice.")
        if problem := score_weight_problem(weight):
            raise CheckpointError(f"{where}: the weight of {action} {problem}.")
        weights[action] = float(weight)
    return weights


def score_weights_text(weights: Mapping[str, float]) -> str:
    """Score weights as `--score-weights` takes them: `favorite=1,report=-20`."""
    return ",".join(f"{action}={weight:.15g}" for action, weight in weights.items())


def _inline(option: str) -> list[tuple[str, Any]]:
    """The entries of `favorite=1,report=-20`; what is no number stays a text, which is no weight."""
    entries: list[tuple[str, Any]] = []
    for entry in filter(None, map(str.strip, option.split(","))):
        action, _, text = entry.partition("=")
        try:
            entries.append((action.strip(), float(text)))
        except ValueError:
            entries.append((action.strip(), text))
    return entries


def _of(path: Path) -> list[tuple[str, Any]]:
    """The entries of a JSON object in a file, repeated keys included."""
    try:
        entries = json.loads(path.read_bytes(), object_pairs_hook=_Pairs)
    except FileNotFoundError as error:
        sets = ", ".join(SCORE_WEIGHT_SETS)
        raise CheckpointError(
            f"{path} is neither a file nor a set of score weights ({sets}) nor weights such as favorite=1,report=-20."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason_of(error)}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(entries, _Pairs):
        raise CheckpointError(f"{path} must hold a JSON object of action → weight.")
    return entries


class _Pairs(list[tuple[str, Any]]):
    """The entries of a JSON object, in their order."""
