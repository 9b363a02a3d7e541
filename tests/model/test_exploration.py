"""Drawn orders: the Plackett–Luce probabilities, over all orders of few posts, and the frequencies of many draws."""

from __future__ import annotations

import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from model.exploration import MAX_TEMPERATURE, MIN_TEMPERATURE, draw_order, gumbel_noise

SCORES = np.array([0.3, -1.2, 0.9, 0.0, 0.5])
TEMPERATURES = (0.05, 0.7, 20.0)


def noise_for(order: tuple[int, ...], scores: np.ndarray, temperature: float) -> np.ndarray:
    """Noise with which this order is drawn."""
    noise = np.empty(len(order))
    noise[list(order)] = np.arange(len(order), 0, -1)
    return noise - scores / temperature


def probability(order: tuple[int, ...], temperature: float) -> float:
    """Of this order, by the definition: in plain Python, with a softmax over what is left at each place."""
    left, product = list(order), 1.0
    for post in order:
        product *= math.exp(SCORES[post] / temperature) / sum(math.exp(SCORES[one] / temperature) for one in left)
        left.remove(post)
    return product


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_the_probabilities_of_all_orders_sum_to_1(count: int, temperature: float) -> None:
    total = 0.0
    for order in permutations(range(count)):
        noise = noise_for(order, SCORES[:count], temperature)
        drawn, probabilities = draw_order(SCORES[:count], temperature, noise)
        assert tuple(drawn.tolist()) == order
        product = math.prod(probabilities.tolist())
        assert math.isclose(product, probability(order, temperature), rel_tol=1e-9)
        total += product
    assert math.isclose(total, 1.0, rel_tol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_orders_are_drawn_as_often_as_their_probabilities_say(count: int, temperature: float) -> None:
    draws, posts = 10_000, np.arange(100, 100 + count, dtype=np.uint64)
    drawn = Counter(
        tuple(draw_order(SCORES[:count], temperature, gumbel_noise(f"feed-{number}", posts))[0].tolist())
        for number in range(draws)
    )
    for order in permutations(range(count)):
        share = probability(order, temperature)
        deviation = math.sqrt(draws * share * (1 - share))
        assert abs(drawn[order] - draws * share) <= 5 * deviation + 1, order


def test_noise_depends_on_the_name_and_the_post_alone() -> None:
    posts = np.array([5, 9, 2**64 - 1, 0], np.uint64)
    noise = gumbel_noise("feed", posts)
    assert gumbel_noise("feed", posts).tolist() == noise.tolist()
    assert gumbel_noise("feed", posts[::-1]).tolist() == noise[::-1].tolist()
    assert gumbel_noise("feed", posts[2:]).tolist() == noise[2:].tolist()
    assert not set(gumbel_noise("other", posts).tolist()) & set(noise.tolist())


def test_a_post_that_comes_twice_has_noise_of_its_own_each_time() -> None:
    noise = gumbel_noise("feed", np.array([7, 3, 7, 7], np.uint64))
    assert len({*noise.tolist()}) == 4
    assert noise[0] == gumbel_noise("feed", np.array([7], np.uint64))[0]


def test_noise_has_the_standard_gumbel_distribution() -> None:
    noise = np.sort(gumbel_noise("feed", np.arange(200_000, dtype=np.uint64)))
    expected = np.exp(-np.exp(-noise))
    distance = np.abs(expected - (np.arange(len(noise)) + 0.5) / len(noise)).max()
    assert distance < 1.95 / math.sqrt(len(noise))  # Kolmogorov and Smirnov: exceeded by one draw in a thousand


@pytest.mark.parametrize("temperature", [MIN_TEMPERATURE, 1.0, MAX_TEMPERATURE])
@pytest.mark.parametrize("size", [0.0, 1e-9, 1e3, 2e10])
def test_extreme_scores_give_finite_probabilities(size: float, temperature: float) -> None:
    scores = np.random.default_rng(0).normal(size=300) * size
    order, probabilities = draw_order(scores, temperature, gumbel_noise("feed", np.arange(300, dtype=np.uint64)))
    assert sorted(order.tolist()) == [*range(300)]
    assert np.isfinite(probabilities).all()
    assert ((probabilities >= 0) & (probabilities <= 1)).all()
    assert probabilities[order[-1]] == 1


def test_a_low_temperature_is_the_order_of_the_scores() -> None:
    order, probabilities = draw_order(SCORES, 1e-6, gumbel_noise("feed", np.arange(5, dtype=np.uint64)))
    assert order.tolist() == np.argsort(-SCORES).tolist()
    assert probabilities.tolist() == [1.0] * 5


def test_no_posts_have_an_empty_order() -> None:
    order, probabilities = draw_order(np.zeros(0), 1.0, gumbel_noise("feed", np.zeros(0, np.uint64)))
    assert (len(order), len(probabilities)) == (0, 0)
