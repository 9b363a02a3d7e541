"""Shows in the demo's world how far a log is from the truth about rankers that did not choose its order. Trains nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadtest.loop.people import WORTH, Floats, Ints, People
from loadtest.loop.settings import LoopSettings
from loadtest.rows import markdown
from model.exploration import draw_order, gumbel_noise
from weights.lab.evaluate.metrics import Figure
from weights.lab.evaluate.off_policy import Rankings, off_policy

TEMPERATURE = 0.3
"""Of the exploration, in units of the reward, both of the log and of the rankers that are judged."""
LOGGING_NOISE = 0.3
"""Standard deviation by which the ranker that chose the order errs about the reward of a post."""
OTHERS: Mapping[str, float] = {"a better model": 0.1, "a worse model": 0.6, "a random order": np.inf}
"""The rankers that are judged, by how far they err about the reward of a post. One that errs without bound knows nothing."""


@dataclass(frozen=True, slots=True)
class Bias:
    """What a ranker earns with its first place: in truth; by putting the posts that the log showed into its order; by `off_policy`."""

    truth: float
    resorted: float
    snips: Figure
    doubly_robust: Figure


def biases(settings: LoopSettings, days: int = 4) -> dict[str, Bias]:
    """Log the visits of some days in the order of a ranker that errs, and judge the others from that log. Each visit's first
    `settings.shown` posts were shown to the user; `off_policy` also knows what the others would have been worth when they were."""
    people = People(settings)
    rng = np.random.default_rng((settings.seed, 2))
    truth, earned, ranks, chances, users = [], [], [], [], []
    for day in range(days):
        for number, visits in enumerate(people.visits(day)):
            every = np.tile(np.arange(visits.posts.shape[1]), (len(visits.who), 1))
            earned.append(people.act(visits, every).actions @ WORTH)
            truth.append(visits.reward)
            users.append(visits.who)
            scores = visits.reward + LOGGING_NOISE * rng.standard_normal(visits.reward.shape)
            for row, of_row in enumerate(scores):
                noise = gumbel_noise(f"{day}-{number}-{row}", people.world.posts.ids[visits.posts[row]])
                order, propensities = draw_order(of_row, TEMPERATURE, noise)
                ranks.append(np.argsort(order) + 1)
                chances.append(propensities)
    reward, seen = np.concatenate(truth), np.concatenate(earned)
    position, propensity, user = np.array(ranks), np.array(chances), np.concatenate(users)
    return {
        name: _bias(settings, error, rng, reward, seen, position, propensity, user) for name, error in OTHERS.items()
    }


def _bias(
    settings: LoopSettings,
    error: float,
    rng: np.random.Generator,
    reward: Floats,
    seen: Floats,
    position: Ints,
    propensity: Floats,
    user: Ints,
) -> Bias:
    """Judge one ranker. All `[R, C]`, but `user` `[R]`: the expected and the observed reward, the place, and its probability."""
    score = reward + error * rng.standard_normal(reward.shape)
    if error >= 1e3:  # a random order: any post may come first
        score = rng.standard_normal(reward.shape) * 1e-9
    count, width = reward.shape

    def first_place(values: Floats, allowed: NDArray[np.bool_]) -> float:
        """The mean of the values of the first place, drawn among the posts that are allowed."""
        shares = np.where(allowed, np.exp((score - score.max(1, keepdims=True)) / TEMPERATURE), 0)
        return float(((shares / shares.sum(1, keepdims=True)) * values).sum(1).mean())

    estimates = off_policy(
        Rankings(
            request=np.repeat(np.arange(count), width),
            user=np.repeat(np.unique(user, return_inverse=True)[1], width),
            position=position.ravel(),
            propensity=propensity.ravel(),
            reward=seen.ravel(),
            score=score.ravel(),
            predicted=score.ravel(),
        ),
        TEMPERATURE,
    )
    return Bias(
        first_place(reward, np.ones_like(reward, bool)),
        first_place(seen, position <= settings.shown),
        estimates.snips,
        estimates.doubly_robust,
    )


def measure(seed: int = 1) -> None:
    """Print what a log says about rankers that did not choose its order, beside what they would have earned."""
    head = ["ranker", "what it would have earned", "its order of what was shown", "SNIPS", "doubly robust"]
    rows = [
        [name, f"{bias.truth:.3f}", f"{bias.resorted:.3f}", str(bias.snips), str(bias.doubly_robust)]
        for name, bias in biases(LoopSettings(seed=seed)).items()
    ]
    print(markdown(head, rows))
