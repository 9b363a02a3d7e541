"""Metrics against scikit-learn's own, hand-made cases and plain definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weights.lab.evaluate import metrics
from weights.lab.evaluate.metrics import Means, PooledAuc, Sampled


@pytest.fixture
def sklearn_metrics() -> Any:
    """Imported when a test asks for it: that takes two seconds, in every process that collects the tests."""
    return pytest.importorskip("sklearn.metrics")


def scores(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Groups, outcomes, and scores with many ties."""
    rng = np.random.default_rng(1)
    group, score = rng.integers(0, 30, count), rng.integers(0, 20, count) / 20
    return group, rng.random(count) < 0.1 + 0.6 * score, score


def test_log_loss_and_normalised_entropy_of_a_case_done_by_hand() -> None:
    happened, p = np.array([True, False]), np.array([0.8, 0.4], np.float32)
    expected = -(np.log(0.8) + np.log(0.6)) / 2
    assert metrics.log_loss(happened, p) == pytest.approx(expected)
    assert metrics.normalised_entropy(happened, p) == pytest.approx(expected / np.log(2))
    assert np.isfinite(metrics.log_loss(happened, np.array([0.0, 1.0])))
    for always in (np.ones(2, bool), np.zeros(2, bool)):
        assert np.isnan(metrics.normalised_entropy(always, p)), "nothing is left to know"
        assert np.isfinite(metrics.log_loss(always, p))


def test_calibration_error_is_small_or_equals_the_shift() -> None:
    rng = np.random.default_rng(1)
    p = rng.random(400_000) * 0.8
    happened = rng.random(len(p)) < p
    assert metrics.calibration_error(happened, p) < 0.005
    assert metrics.calibration_error(happened, p + 0.1) == pytest.approx(0.1, abs=0.005)
    assert metrics.calibration_error(happened, np.full(len(p), 0.4)) == pytest.approx(0, abs=0.005), "one bin alone"


def test_rows_of_equal_predictions_weigh_as_many_in_the_error() -> None:
    """Nine of ten rows have one prediction, which is right; the others are off by 0.4."""
    p = np.concatenate([np.full(90_000, 0.1), np.linspace(0.2, 0.4, 10_000)])
    happened = np.zeros(len(p), bool)
    happened[:9_000] = True
    happened[90_000:] = np.random.default_rng(1).random(10_000) < p[90_000:] + 0.4
    assert metrics.calibration_error(happened, p) == pytest.approx(0.04, abs=0.002)


def test_auc_is_nan_where_it_has_no_meaning() -> None:
    assert np.isnan(metrics.auc(np.zeros(3, bool), np.arange(3.0)))
    assert metrics.auc(np.array([False, True]), np.array([0.0, 1.0])) == 1


def test_auc_within_groups_is_that_of_each_group(sklearn_metrics: Any) -> None:
    group, happened, score = scores(600)
    happened[group == 3] = False
    found, values = metrics.auc_within(group, happened, score)
    assert 3 not in found
    assert len(found) > 25
    for each, value in zip(found, values, strict=True):
        assert value == pytest.approx(sklearn_metrics.roc_auc_score(happened[group == each], score[group == each]))


@pytest.mark.parametrize("k", [None, 3])
def test_ndcg_equals_an_independent_one_in_any_row_order(k: int | None, sklearn_metrics: Any) -> None:
    rng = np.random.default_rng(2)
    request = np.repeat(np.arange(50), 8)
    score, gain = rng.random(400), rng.integers(0, 3, 400) / 8
    gain[:8] = 0.25  # nothing to order
    expected = [
        sklearn_metrics.ndcg_score(gain[at : at + 8][None], score[at : at + 8][None], k=k) for at in range(8, 400, 8)
    ]
    mixed = rng.permutation(400)
    for rows in (np.arange(400), mixed):
        found, values = metrics.ndcg(request[rows], score[rows], gain[rows], k)
        assert found.tolist() == list(range(1, 50))
        assert values == pytest.approx(expected)


def test_a_pooled_auc_under_weights_is_that_of_the_repeated_rows(sklearn_metrics: Any) -> None:
    user, happened, score = scores(500)
    pooled = PooledAuc.of(happened, score, user)
    draws = np.random.default_rng(3).multinomial(30, np.full(30, 1 / 30), 5).astype(np.float64)
    for drawn, value in zip(draws, pooled.under(draws), strict=True):
        rows = np.repeat(np.arange(500), drawn[user].astype(int))
        assert value == pytest.approx(sklearn_metrics.roc_auc_score(happened[rows], score[rows]))
    assert Sampled.of(pooled, draws).value == pytest.approx(sklearn_metrics.roc_auc_score(happened, score))


def test_an_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    rng, inside = np.random.default_rng(4), 0
    for trial in range(200):
        users = Means(rng.normal(0.3, 1, 60), np.ones(60, np.int64))
        figure = Sampled.of(users, metrics.draws_of(60, trial)).figure()
        inside += figure.low <= 0.3 <= figure.high
    assert 0.88 < inside / 200 < 0.99


def test_too_few_users_have_no_interval() -> None:
    figure = Sampled.of(Means(np.arange(4.0), np.ones(4, np.int64)), metrics.draws_of(4)).figure()
    assert (figure.value, np.isnan(figure.low)) == (1.5, True)
    assert str(figure) == "1.500"


@pytest.mark.parametrize("count", [1, 9, 10])
def test_a_mean_over_fewer_than_ten_users_has_no_interval(count: int) -> None:
    """The other users have nothing to measure; the resamples without any of the few do not tell how far the mean is off."""
    counts = np.arange(60) < count
    figure = Sampled.of(Means(0.7 * counts, counts.astype(np.int64)), metrics.draws_of(60)).figure()
    assert figure.value == pytest.approx(0.7)
    assert np.isnan(figure.low) == np.isnan(figure.high) == (count < 10)


@pytest.mark.parametrize("count", [1, 9, 10])
@pytest.mark.parametrize("are_few", [True, False])
def test_an_auc_needs_ten_users_with_each_outcome(count: int, are_few: bool) -> None:
    user, happened, score = scores(600)
    some = happened & (user < count)
    outcome = some if are_few else ~some
    figure = Sampled.of(PooledAuc.of(outcome, score, user), metrics.draws_of(30)).figure()
    assert np.isnan(figure.low) == np.isnan(figure.high) == (count < 10)
    assert not np.isnan(figure.value)


def test_equal_sources_differ_by_exactly_nothing() -> None:
    user, happened, score = scores(300)
    sampled = Sampled.of(PooledAuc.of(happened, score, user), metrics.draws_of(30))
    assert (sampled - sampled).figure() == metrics.Figure(0, 0, 0)


@pytest.mark.parametrize("k", [None, 3])
def test_ndcg_of_equal_scores_ignores_the_order_of_rows(k: int | None, sklearn_metrics: Any) -> None:
    request, score = np.repeat([1, 2], 6), np.array([0.5] * 6 + [2, 1, 1, 1, 1, 0], np.float32)
    gain = np.array([1, 1, 0, 0, 0, 0] * 2, np.float64)
    wanted = [sklearn_metrics.ndcg_score([gain[:6]], [score[part]], k=k) for part in (slice(6), slice(6, 12))]
    for backwards in (False, True):
        rows = np.arange(12)[::-1] if backwards else np.arange(12)
        assert metrics.ndcg(request[rows], score[rows], gain[rows], k)[1] == pytest.approx(wanted)
