"""Defines a world's probabilities: how long a user dwells on a post, and which of the nineteen actions follow.

    appeal  = interest in the topic + follow + taste for the surface + author quality + post quality + regard for the author
    recency = freshness of the user · 2.8 · (exp(−age in hours / 16) − 0.43)
    log(dwell seconds) = log 3 + 0.45·appeal + 0.5·recency + 0.25·activity + dwell[surface] + 0.8·ε,   ε ~ N(0, 1)
    logit(action | ε)  = base + appeal·a + recency·r + activity·u + follow·f + surface[s] + ε·d

`dwell` and `dwell_time` are set when the dwell reaches 3 and 15 seconds. Before the post is shown, only
the mean over ε can be known (by Gauss–Hermite quadrature): no ranking can do better than that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from weights.lab.world.settings import SURFACES

Floats = NDArray[np.float32]

MEDIAN_DWELL_SECONDS = 3.0
DWELL_SPREAD = 0.8
DWELL_THRESHOLDS_SECONDS = {"dwell": 3.0, "dwell_time": 15.0}
DWELL_SURFACE = {"video": 0.35, "search": -0.15, "explore": -0.1}
QUADRATURE_NODES = 12


@dataclass(frozen=True, slots=True)
class Effect:
    """How the logit of one action depends on the other quantities."""

    base: float
    appeal: float = 1.0
    recency: float = 1.0
    activity: float = 0.5
    dwell: float = 0.5
    follow: float = 0.0
    surface: dict[str, float] = field(default_factory=dict)


EFFECTS: dict[str, Effect] = {
    "favorite": Effect(-2.8, 1.15, 1.3, surface={"following": 0.3, "search": -0.4}),
    "reply": Effect(-4.6, 1.0, 1.6, 0.65, 0.8, surface={"following": 0.7, "search": -0.5}),
    "repost": Effect(-4.2, 1.1, 1.5, 0.55, surface={"following": 0.3, "explore": 0.3}),
    "photo_expand": Effect(-3.3, 0.9, 0.8, 0.45, surface={"explore": 0.9, "video": -1.2}),
    "click": Effect(-2.4, 0.9, 0.9, 0.45, surface={"search": 1.0, "video": -0.6}),
    "profile_click": Effect(-4.1, 0.9, 0.6, 0.45, follow=-0.6, surface={"search": 0.8, "explore": 0.6}),
    "vqv": Effect(-3.4, 1.0, 0.8, 0.45, 1.0, surface={"video": 1.6, "search": -0.4}),
    "share": Effect(-5.0, 1.0, 1.4, 0.55, surface={"explore": 0.4}),
    "share_via_dm": Effect(-5.4, 1.0, 1.4, 0.65, surface={"video": 0.6}),
    "share_via_copy_link": Effect(-5.8, 1.0, 1.2, 0.55, surface={"search": 0.5}),
    "dwell": Effect(0.0),
    "quote": Effect(-5.7, 1.0, 1.6, 0.65, surface={"following": 0.4}),
    "quoted_click": Effect(-5.0, 0.9, 0.9, 0.45, surface={"search": 0.4}),
    "follow_author": Effect(-5.6, 1.2, 0.4, 0.45, follow=-3.0, surface={"explore": 0.9, "search": 0.6}),
    "not_interested": Effect(-3.8, -0.7, -0.3, 0.45, -0.4, surface={"explore": 0.4}),
    "block_author": Effect(-5.3, -0.5, 0.0, 0.45, 0.0),
    "mute_author": Effect(-5.1, -0.5, 0.0, 0.45, 0.0),
    "report": Effect(-5.0, -0.5, 0.0, 0.45, 0.0),
    "dwell_time": Effect(0.0),
}
ACTION_NAMES = tuple(EFFECTS)
NEGATIVE_ACTIONS = ("not_interested", "block_author", "mute_author", "report")
ATTACHMENTS = ("reply", "repost", "quote", "profile_click", "follow_author")
REJECTIONS = ("block_author", "mute_author", "report")


@dataclass(frozen=True, slots=True)
class Circumstances:
    """The inputs of the probabilities, each float32 `[n]` except `surface`, int64 `[n]`."""

    appeal: Floats
    recency: Floats
    activity: Floats
    follow: Floats  # 1 if the user follows the author
    surface: NDArray[np.int64]


def recency(age_seconds: NDArray[np.int64]) -> Floats:
    """The appeal of a post's youth: 1.6 for a new post, −1.2 for an old one, 0 on average, spread equally to both sides.

    So an engaged event does not reveal whether its user likes new posts or old ones.
    """
    return (2.8 * (np.exp(-age_seconds / (16 * 3600)) - 0.43)).astype(np.float32)


def log_dwell(circumstances: Circumstances) -> Floats:
    """The mean of log(dwell seconds), `[n]`; its standard deviation is `DWELL_SPREAD`."""
    surface = np.array([DWELL_SURFACE.get(name, 0.0) for name in SURFACES], np.float32)[circumstances.surface]
    terms = 0.45 * circumstances.appeal + 0.5 * circumstances.recency + 0.25 * circumstances.activity + surface
    return np.asarray(np.log(MEDIAN_DWELL_SECONDS) + terms, np.float32)


def draw(circumstances: Circumstances, rng: np.random.Generator) -> tuple[NDArray[np.bool_], Floats]:
    """Actions bool `[n, A]` and dwell seconds float32 `[n]`."""
    noise = rng.standard_normal(len(circumstances.appeal), np.float32)
    seconds = np.exp(log_dwell(circumstances) + DWELL_SPREAD * noise)
    happens = rng.random((len(circumstances.appeal), len(ACTION_NAMES)), np.float32) < _sigmoid(
        _logits(circumstances, noise)
    )
    for name, threshold in DWELL_THRESHOLDS_SECONDS.items():
        happens[:, ACTION_NAMES.index(name)] = seconds >= threshold
    return happens, seconds


def true_probabilities(circumstances: Circumstances) -> Floats:
    """The probability of every action before the post is shown, float32 `[n, A]`: the mean over ε."""
    nodes, masses = np.polynomial.hermite_e.hermegauss(QUADRATURE_NODES)
    masses = masses / masses.sum()
    probabilities = np.zeros((len(circumstances.appeal), len(ACTION_NAMES)), np.float32)
    for node, mass in zip(nodes, masses, strict=True):
        probabilities += np.float32(mass) * _sigmoid(
            _logits(circumstances, np.full(len(probabilities), node, np.float32))
        )
    mean = log_dwell(circumstances)
    for name, threshold in DWELL_THRESHOLDS_SECONDS.items():
        z = torch.from_numpy((np.log(threshold) - mean) / DWELL_SPREAD)
        above = 0.5 * torch.erfc(z / 2**0.5)  # P(N(0, 1) ≥ z); numpy has no erfc
        probabilities[:, ACTION_NAMES.index(name)] = above.numpy()
    return probabilities


def _logits(circumstances: Circumstances, noise: Floats) -> Floats:
    effects = EFFECTS.values()
    inputs = np.stack(
        (circumstances.appeal, circumstances.recency, circumstances.activity, circumstances.follow, noise), 1
    )
    slopes = np.array([(e.appeal, e.recency, e.activity, e.follow, e.dwell) for e in effects], np.float32)
    surfaces = np.array([[e.surface.get(name, 0.0) for e in effects] for name in SURFACES], np.float32)
    bases = np.array([e.base for e in effects], np.float32)
    return np.asarray(inputs @ slopes.T + bases + surfaces[circumstances.surface], np.float32)


def _sigmoid(logits: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-logits)), np.float32)
