"""Judges two checkpoints on held-out requests by what was really shown: quality of the probabilities, and order by the score."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weights.lab.evaluate import metrics
from weights.lab.evaluate.evaluation import Judge, known_worth
from weights.lab.evaluate.metrics import Figure, Means, Sampled, auc_within
from weights.lab.evaluate.predict import rows_of
from weights.lab.loop.night import is_positive
from weights.lab.training.examples import Examples

Floats = NDArray[np.float32]
MIN_ACTION_POSITIVES = 50
"""Of an action with fewer positives among the held-out impressions, nothing is said."""
CHANCE_DEVIATIONS = 2.0
NO_FIGURE = Figure(math.nan, math.nan, math.nan)


@dataclass(frozen=True, slots=True)
class ActionQuality:
    """One action of the serving and of the new model: `entropy`, the normalised cross-entropy; `ratio`, predicted ÷ observed."""

    positives: int
    entropy: tuple[float, float]
    ratio: tuple[float, float]

    @property
    def entropy_loss(self) -> float:
        """How much worse the new model's cross-entropy is."""
        return self.entropy[1] - self.entropy[0]

    @property
    def calibration_loss(self) -> float:
        """How much further from 1 the new model's ratio is. A distance that chance explains counts as none."""
        by_chance = CHANCE_DEVIATIONS / math.sqrt(self.positives)
        serving, new = (max(abs(ratio - 1), by_chance) for ratio in self.ratio)
        return new - serving


@dataclass(frozen=True, slots=True)
class Unseen:
    """The held-out impressions whose user, post or author was in no request that the new model was trained on: their share of all, and
    the AUC within users of the serving model's score, first, and of the new one's, over them and over the others. Impressions of nobody,
    or of an unknown author, are in neither. The value is NaN where no user has both outcomes."""

    share: float
    order: tuple[Figure, Figure]
    order_of_others: tuple[Figure, Figure]


@dataclass(frozen=True, slots=True)
class Judgement:
    """The serving model, first, and the new one on the same impressions. `order`: the AUC within users of the score, where the positives
    are the impressions whose actions are worth more than nothing; `lead`: the difference. `users_with_both`: those of the users who have
    positives and other impressions. Intervals are of 95 %, by resampling users; over fewer than ten of them there is none.
    `actions`: those with MIN_ACTION_POSITIVES positives or more. `unseen`: by `user`, `post` and `author`."""

    requests: int
    impressions: int
    users: int
    users_with_both: int
    order: tuple[Figure, Figure]
    lead: Figure
    actions: Mapping[str, ActionQuality]
    unseen: Mapping[str, Unseen]


def judge(
    examples: Examples, requests: NDArray[np.int64], pair: tuple[Floats, Floats], weights: Floats, until_ts: int
) -> Judgement:
    """Judge on these requests. `pair`: the probabilities of the rows of the requests by the serving and by the new model, float32
    `[n, A]`; `weights` of the score, float32 `[A]`; the new model was trained on what was shown before `until_ts`, Unix seconds."""
    rows = rows_of(examples, requests)
    shown = examples.log.take(rows)
    worthy, is_known = is_positive(shown, weights), known_worth(shown, weights)
    scores = pair[0] @ weights, pair[1] @ weights
    by_user = Judge.of(shown)
    everybody = np.arange(by_user.draws.shape[1])

    def within(score: Floats, some: NDArray[np.bool_]) -> Means:
        groups = auc_within(by_user.user[some], worthy[some], score[some])
        return by_user.means(*groups, everybody)

    def order(some: NDArray[np.bool_]) -> tuple[Figure, Figure]:
        figures = [
            Sampled.of(within(score, some), by_user.draws).figure() if some.any() else NO_FIGURE for score in scores
        ]
        return figures[0], figures[1]

    aucs = [within(score, is_known) for score in scores]
    serving, new = (Sampled.of(auc, by_user.draws) for auc in aucs)
    actions = {}
    for place, name in enumerate(shown.action_names):
        known_outcomes = shown.known_rows(place)
        happened = shown.actions[known_outcomes, place]
        positives = int(happened.sum())
        if MIN_ACTION_POSITIVES <= positives < len(happened):
            both = pair[0][known_outcomes, place], pair[1][known_outcomes, place]
            entropies = [metrics.normalised_entropy(happened, probabilities) for probabilities in both]
            ratios = [float(probabilities.sum(dtype=np.float64)) / positives for probabilities in both]
            actions[name] = ActionQuality(positives, (entropies[0], entropies[1]), (ratios[0], ratios[1]))
    trained = examples.log.before(until_ts)
    unseen = {}
    for kind in ("user", "post", "author"):
        ids = getattr(shown, f"{kind}_id")
        has_id, is_seen = ids != 0, np.isin(ids, getattr(trained, f"{kind}_id"))
        is_unseen = has_id & ~is_seen
        unseen[kind] = Unseen(float(is_unseen.mean()), order(is_known & is_unseen), order(is_known & has_id & is_seen))
    return Judgement(
        len(requests),
        len(rows),
        len(everybody),
        int(np.count_nonzero(aucs[0].counts)),
        (serving.figure(), new.figure()),
        (new - serving).figure(),
        actions,
        unseen,
    )
