"""Decides whether a night may train a model, and whether the model trained on it may serve. Computes no figures of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, get_args, get_type_hints

import numpy as np

from weights.lab.evaluate.metrics import CHANCE, LEAST_USERS
from weights.lab.loop.judge import MIN_ACTION_POSITIVES, Judgement
from weights.lab.loop.night import Night

CLOCK, HISTORIES, EVENTS, ENOUGH = "clock", "histories", "events", "enough"
LABELS, QUALITY, ORDER = "labels", "quality", "order"
ABOUT_THE_NIGHT = (CLOCK, HISTORIES, EVENTS, ENOUGH, LABELS)
"""Checks of the night. One that fails keeps the night out of training, also of later nights; if it is ENOUGH alone, the night waits."""
COMPARED_NIGHTS = 7


@dataclass(frozen=True, slots=True)
class GateSettings:
    """The bounds of the checks. Each field says what it bounds."""

    min_rankings: Annotated[int, "enough: rankings that joined, at least"] = 200
    min_positives: Annotated[int, "enough: impressions that were worth more than nothing to the score, at least"] = 50
    max_empty_histories: Annotated[
        float, "histories: share of empty histories of users who did something before, at most"
    ] = 0.5
    max_early_events: Annotated[float, "clock: share of events before their ranking, at most"] = 0.05
    max_first_delay_seconds: Annotated[
        float, "clock: how long after their ranking the earliest twentieth of the events ends, at most"
    ] = 1800.0
    min_activity: Annotated[
        float,
        "events: actions per impression, as a share of the usual ones or of what the serving model expects, at least",
    ] = 0.7
    min_order: Annotated[
        float,
        "labels: how far the AUC within users of one of the two models is from 0.5, as a share of what is usual, at least",
    ] = 0.3
    max_entropy_loss: Annotated[
        float, "quality: how much worse the normalised cross-entropy of an action may become"
    ] = 0.01
    max_calibration_loss: Annotated[
        float, "quality: how much further from 1 predicted ÷ observed of an action may be"
    ] = 0.1
    min_lead: Annotated[
        float, "order: the lower end of the interval of the new model's lead in AUC within users, at least"
    ] = -0.005


def bounds_table() -> list[tuple[str, float, str]]:
    """Name, default and meaning of every bound."""
    hints = get_type_hints(GateSettings, include_extras=True)
    defaults = asdict(GateSettings())
    return [(name, defaults[name], get_args(hint)[1]) for name, hint in hints.items()]


@dataclass(frozen=True, slots=True)
class Check:
    """A check by name: whether it passed, and what was measured, in a sentence."""

    name: str
    passed: bool
    sentence: str


@dataclass(frozen=True, slots=True)
class Usual:
    """What nights that passed their checks were like, the newest last: actions per impression, and how far the AUC within
    users of one of the models was from 0.5."""

    activities: Sequence[float] = field(default_factory=tuple)
    orders: Sequence[float] = field(default_factory=tuple)

    @property
    def activity(self) -> float | None:
        """The median of the last COMPARED_NIGHTS; None before there are any."""
        return float(np.median(self.activities[-COMPARED_NIGHTS:])) if len(self.activities) else None

    @property
    def order(self) -> float | None:
        """The median of the last COMPARED_NIGHTS; None before there are any."""
        return float(np.median(self.orders[-COMPARED_NIGHTS:])) if len(self.orders) else None


def check_night(night: Night, usual: Usual, bounds: GateSettings) -> list[Check]:
    """The checks that need no new model. Of too few rankings, or where nothing was shown, the others would say nothing, so they are left
    out."""
    if night.rankings < bounds.min_rankings or not night.impressions:
        return [_enough(night, bounds)]
    return [_clock(night, bounds), _histories(night, bounds), _events(night, usual, bounds), _enough(night, bounds)]


def _enough(night: Night, bounds: GateSettings) -> Check:
    if not night.impressions:
        return Check(ENOUGH, False, f"{night.rankings:,} rankings are new, and none of their posts was shown")
    return Check(
        ENOUGH,
        night.rankings >= bounds.min_rankings and night.positives >= bounds.min_positives,
        f"{night.rankings:,} rankings joined (at least {bounds.min_rankings:,}), with {night.positives:,} impressions worth more than "
        f"nothing (at least {bounds.min_positives:,})",
    )


def _clock(night: Night, bounds: GateSettings) -> Check:
    early = night.early_events / max(night.timed_events, 1)
    return Check(
        CLOCK,
        early <= bounds.max_early_events and night.delay_seconds[0] <= bounds.max_first_delay_seconds,
        f"{early:.1%} of the events happened before their ranking (at most {bounds.max_early_events:.1%}); the 5th percentile of the delay "
        f"is {night.delay_seconds[0]:,.0f} s (at most {bounds.max_first_delay_seconds:,.0f} s), the median {night.delay_seconds[1]:,.0f} s",
    )


def _histories(night: Night, bounds: GateSettings) -> Check:
    empty = night.empty_histories / max(night.returning_requests, 1)
    return Check(
        HISTORIES,
        empty <= bounds.max_empty_histories,
        f"{empty:.1%} of {night.returning_requests:,} histories of users who did something before are empty "
        f"(at most {bounds.max_empty_histories:.1%})",
    )


def _events(night: Night, usual: Usual, bounds: GateSettings) -> Check:
    if usual.activity is None:
        expected, source = night.expected_activity, "the serving model expects"
    else:
        expected, source = usual.activity, "is usual"
    return Check(
        EVENTS,
        night.activity >= bounds.min_activity * expected,
        f"{night.activity:.3f} actions per impression; {expected:.3f} {source} (at least {bounds.min_activity:.0%} of that)",
    )


def check_labels(judged: Judgement, usual: Usual, bounds: GateSettings) -> Check:
    """Whether what users did depends on what they were shown: if not, no model's order differs from chance, not even that of the one
    trained on this night. An order that is surely worse than chance counts: tastes have turned, and nothing was shuffled."""
    clearest = max(judged.order, key=lambda figure: distance_from_chance(figure.value))
    is_sure = clearest.low > CHANCE or clearest.high < CHANCE
    least = bounds.min_order * (usual.order or 0.0)
    passed = bounds.min_order <= 0 or (is_sure and distance_from_chance(clearest.value) >= least)
    if np.isnan(clearest.low):
        return Check(LABELS, passed, _too_few_users(judged))
    return Check(
        LABELS,
        passed,
        f"of the two models, the one whose order differs more from chance has an AUC within users of {clearest}; it must surely "
        f"differ from 0.5, by {least:.3f} or more",
    )


def _too_few_users(judged: Judgement) -> str:
    return (
        f"of {judged.users:,} held-out users, {judged.users_with_both:,} have impressions worth more than nothing and others: "
        f"too few to tell, a turn needs {LEAST_USERS} or more"
    )


def distance_from_chance(auc: float) -> float:
    """How far an AUC is from that of a random order; below 0 if there is none."""
    return -1.0 if np.isnan(auc) else abs(auc - CHANCE)


def check_model(judged: Judgement, bounds: GateSettings) -> list[Check]:
    """The checks of the new model against the serving one."""
    worse = [
        f"{name} (cross-entropy {action.entropy[0]:.3f} → {action.entropy[1]:.3f}, predicted ÷ observed {action.ratio[0]:.2f} → "
        f"{action.ratio[1]:.2f})"
        for name, action in judged.actions.items()
        if action.entropy_loss > bounds.max_entropy_loss or action.calibration_loss > bounds.max_calibration_loss
    ]
    count = f"{len(judged.actions)} actions with {MIN_ACTION_POSITIVES} positives or more"
    quality = f"worse for {', '.join(worse)}" if worse else f"none of the {count} is worse"
    lead = judged.lead
    order = (
        f"AUC within users {judged.order[0].value:.4f} → {judged.order[1].value:.4f}, a lead of {lead.value:+.4f} "
        f"({lead.low:+.4f} … {lead.high:+.4f}); its lower end must be at least {bounds.min_lead:+.4f}"
    )
    return [
        Check(QUALITY, not worse, quality),
        Check(ORDER, lead.low >= bounds.min_lead, _too_few_users(judged) if np.isnan(lead.low) else order),
    ]
