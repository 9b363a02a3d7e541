"""Draws an order from scores instead of sorting by them, so that a log can say how another order would have done. Needs only numpy.

The order is a Plackett–Luce draw: each place goes to one of the posts that are left, with probabilities proportional to exp(score / τ).
Adding Gumbel noise to score / τ and sorting draws exactly that (Yellott 1977; Kool, van Hoof and Welling 2019, arXiv:1903.06059).
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from model.inputs import Ids

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-9, 1e9
"""With the largest weights, scores ÷ temperature and their sums stay finite."""
STEP = np.uint64(0x9E3779B97F4A7C15)
"""Between two states of SplitMix64."""


def gumbel_noise(name: str, post_ids: Ids) -> NDArray[np.float64]:
    """Standard Gumbel noise for each post, float64 `[C]`, from the name of the ranking and the post's id alone: the same on every machine,
    whatever the order of the posts. Where an id comes twice, the second gets noise of its own."""
    seed = np.uint64(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))
    mixed = _mix(_mix(post_ids ^ seed) + STEP * _repeats(post_ids))
    uniform = ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # between 0 and 1, and neither of them
    return -np.log(-np.log(uniform))


def draw_order(
    scores: NDArray[np.float64], temperature: float, noise: NDArray[np.float64]
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return an order, best first, and each post's probability of its place given those above it, float64 `[C]` in the order of `scores`.

    `temperature`: τ, between the bounds above, in units of the scores; the smaller it is, the closer the order is to that of the scores.
    """
    values = scores / temperature
    order = np.argsort(-(values + noise), kind="stable")
    placed = values[order]
    sums = np.logaddexp.accumulate(placed[::-1])[::-1]  # of exp(score / τ), from each place to the last
    probabilities = np.empty(len(scores))
    probabilities[order] = np.exp(np.minimum(placed - sums, 0.0))
    return order, probabilities


def _mix(values: Ids) -> Ids:
    return finalised(values + STEP)


def finalised(states: Ids) -> Ids:
    """The output of SplitMix64 for each of its states, uint64 `[n]`: a bijection whose bits look random (Steele, Lea and Flood 2014)."""
    states = (states ^ (states >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    states = (states ^ (states >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    outputs: Ids = states ^ (states >> np.uint64(31))
    return outputs


def _repeats(post_ids: Ids) -> Ids:
    """For each post, how many before it have the same id."""
    order = np.argsort(post_ids, kind="stable")
    sorted_ids = post_ids[order]
    places = np.arange(len(post_ids))
    is_first = np.concatenate(([True], sorted_ids[1:] != sorted_ids[:-1]))[: len(post_ids)]
    repeats = np.empty(len(post_ids), np.uint64)
    repeats[order] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    return repeats
