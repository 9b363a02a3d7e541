"""What a log says of another ranker: exact on a small case, covering the truth in a world of known rewards, refused without exploration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import Result

pytest.importorskip("sklearn")

from model.exploration import draw_order, gumbel_noise
from tests.support.random_models import random_model
from tests.weights.call import call
from tests.weights.lab.training.small_run import small_config
from weights.actions import DWELL_TIME
from weights.checkpoint import save_checkpoint
from weights.lab.evaluate.off_policy import Estimates, Rankings, off_policy, rankings_of
from weights.lab.training.log import Log, write_log
from weights.lab.world.simulate import World
from weights.tables import TableError

POSTS, USERS, PER_USER = 5, 100, 3
TEMPERATURE = 0.7


class Market:
    """Users whose chances to like each post are known, a ranker that logged, and another one that is to be judged."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.rankings = USERS * PER_USER
        self.user = np.repeat(np.arange(USERS), PER_USER)
        taste = rng.normal(size=(USERS, POSTS))
        self.chance = 1 / (1 + np.exp(1.5 - taste - 0.5 * rng.normal(size=(USERS, POSTS))))[self.user]
        self.logging = rng.normal(size=(self.rankings, POSTS))
        self.other = self.logging * 0.6 + taste[self.user] + 0.3 * rng.normal(size=(self.rankings, POSTS))
        self.predicted = np.clip(self.chance + 0.1 * rng.normal(size=self.chance.shape), 0, 1)
        self.rng = rng

    def truth(self, places: int) -> float:
        """The expected reward of the other ranker's first places, exactly for one, over many drawn orders for more."""
        if places == 1:
            shares = np.exp(self.other / TEMPERATURE)
            return float((shares / shares.sum(1, keepdims=True) * self.chance).sum(1).mean())
        noise = np.random.default_rng(7).gumbel(size=(200, self.rankings, POSTS))
        order = np.argsort(-(self.other / TEMPERATURE + noise), 2)[:, :, :places]
        return float(np.take_along_axis(self.chance[None].repeat(200, 0), order, 2).sum(2).mean())

    def logged(self) -> Rankings:
        ids = np.arange(1, POSTS + 1, dtype=np.uint64)
        columns: dict[str, list[np.ndarray]] = {name: [] for name in Rankings.__dataclass_fields__}
        for ranking in range(self.rankings):
            noise = gumbel_noise(f"{self.rng.integers(2**60)}", ids)
            order, propensity = draw_order(self.logging[ranking], TEMPERATURE, noise)
            position = np.empty(POSTS, np.int64)
            position[order] = np.arange(1, POSTS + 1)
            reward = (self.rng.random(POSTS) < self.chance[ranking]).astype(float)
            row = {
                "request": np.full(POSTS, ranking), "user": np.full(POSTS, self.user[ranking]), "position": position,
                "propensity": propensity, "reward": reward, "score": self.other[ranking],
                "predicted": self.predicted[ranking],
            }  # fmt: skip
            for name, values in row.items():
                columns[name].append(values)
        return Rankings(**{name: np.concatenate(parts) for name, parts in columns.items()})


@pytest.mark.slow
@pytest.mark.parametrize("places", [1, 2])
def test_the_intervals_cover_the_truth_in_most_logs(places: int) -> None:
    covered = dict.fromkeys(("ips", "snips", "doubly_robust"), 0)
    naive = 0
    for seed in range(100):
        market = Market(seed)
        estimates = off_policy(market.logged(), TEMPERATURE, places)
        truth = market.truth(places)
        for name in covered:
            figure = getattr(estimates, name)
            covered[name] += figure.low <= truth <= figure.high
        naive += estimates.logged.low <= truth <= estimates.logged.high
    assert min(covered.values()) >= 90, covered
    assert naive < 50, "what the log earned is no estimate of what the other ranker earns"


def test_the_same_ranker_earns_what_was_logged() -> None:
    market = Market(3)
    market.other = market.logging
    estimates: Estimates = off_policy(market.logged(), TEMPERATURE)
    assert estimates.ips.value == pytest.approx(estimates.logged.value)
    assert estimates.snips.value == pytest.approx(estimates.logged.value)
    assert estimates.effective_rankings == pytest.approx(estimates.rankings)


def test_a_log_without_exploration_is_refused() -> None:
    rankings = Market(1).logged()
    without = Rankings(
        **{name: getattr(rankings, name) for name in Rankings.__dataclass_fields__ if name != "propensity"},
        propensity=np.zeros(len(rankings.request)),
    )
    with pytest.raises(TableError, match="served without exploration"):
        off_policy(without, TEMPERATURE)


def test_rankings_without_exploration_are_left_out() -> None:
    rankings = Market(1).logged()
    is_explored = rankings.request % 3 > 0
    mixed = replace(rankings, propensity=np.where(is_explored, rankings.propensity, 0.0))
    estimates = off_policy(mixed, TEMPERATURE)
    alone = off_policy(rankings.take(is_explored), TEMPERATURE)
    assert (estimates.left_out, alone.left_out) == (len(np.unique(rankings.request[~is_explored])), 0)
    assert replace(estimates, left_out=0) == alone
    assert estimates.lines()[0] == (
        f"left out: {estimates.left_out:,} rankings without propensities, served without exploration or with a post of 0"
    )


@pytest.mark.parametrize("place", [1, POSTS])
def test_rankings_with_an_unknown_propensity_are_left_out(place: int) -> None:
    """Also where it is that of a place that does not count."""
    rankings = Market(1).logged()
    is_of_third = rankings.request % 3 == 0
    propensity = np.where(is_of_third & (rankings.position == place), 0.0, rankings.propensity)
    estimates = off_policy(replace(rankings, propensity=propensity), TEMPERATURE)
    assert estimates.partly_explored == 100
    assert replace(estimates, partly_explored=0) == off_policy(rankings.take(~is_of_third), TEMPERATURE)
    assert estimates.lines()[0] == "left out: 100 rankings with a post whose propensity is unknown"
    with pytest.raises(TableError, match="each ranking has a post whose propensity is 0"):
        off_policy(
            replace(rankings, propensity=np.where(rankings.position == place, 0.0, rankings.propensity)), TEMPERATURE
        )


@pytest.mark.parametrize(("users", "has_interval"), [(1, False), (9, False), (10, True)])
def test_few_users_have_no_interval(users: int, has_interval: bool) -> None:
    rankings = Market(1).logged()
    estimates = off_policy(rankings.take(rankings.user < users), TEMPERATURE)
    for figure in (estimates.logged, estimates.ips, estimates.snips, estimates.doubly_robust):
        assert np.isfinite(figure.value)
        assert np.isfinite([figure.low, figure.high]).tolist() == [has_interval] * 2
    assert ("…" in estimates.lines()[-1]) == has_interval


def test_a_rare_reward_is_told_in_significant_digits() -> None:
    rankings = Market(1).logged()
    plain = off_policy(rankings, TEMPERATURE)
    rare = off_policy(
        replace(rankings, reward=rankings.reward / 10_000, predicted=rankings.predicted / 10_000), TEMPERATURE
    )
    for common, told in zip(plain.lines()[-4:], rare.lines()[-4:], strict=True):
        value = float(common.split()[-4])
        assert float(told.split()[-4]) == pytest.approx(value / 10_000, rel=1e-3)


@pytest.mark.parametrize("place", [1, POSTS])
def test_rankings_with_an_unknown_reward_are_left_out(place: int) -> None:
    """Also where the reward is unknown of a place that does not count: else the order would decide which rankings stay."""
    rankings = Market(1).logged()
    is_of_third = rankings.request % 3 == 0
    reward = np.where(is_of_third & (rankings.position == place), np.nan, rankings.reward)
    estimates = off_policy(replace(rankings, reward=reward), TEMPERATURE)
    assert estimates.unknown == 100
    assert replace(estimates, unknown=0) == off_policy(rankings.take(~is_of_third), TEMPERATURE)
    assert estimates.lines()[0] == "left out: 100 rankings with a post whose reward is unknown"
    with pytest.raises(TableError, match="each ranking has a post of which the log does not know"):
        off_policy(replace(rankings, reward=np.where(rankings.position == place, np.nan, rankings.reward)), TEMPERATURE)


@pytest.mark.parametrize("lacking", range(1, POSTS + 1))
def test_a_log_that_lacks_ranked_posts_is_refused(lacking: int) -> None:
    rankings = Market(1).logged()
    is_there = (rankings.position != lacking) | (rankings.request % 3 > 0)
    with pytest.raises(TableError, match="100 of 300 rankings lack posts that were ranked"):
        off_policy(rankings.take(is_there), TEMPERATURE)


@pytest.mark.parametrize("place", [0, 1])
def test_a_log_that_does_not_tell_the_order_is_refused(place: int) -> None:
    """Places that are unknown, or the same for two posts."""
    rankings = Market(1).logged()
    position = np.where(rankings.position == 2, place, rankings.position)
    with pytest.raises(TableError, match="300 of 300 rankings lack posts that were ranked, or their places"):
        off_policy(replace(rankings, position=position), TEMPERATURE)


OPTIONS = ("--temperature", "0.5", "--since", "2001-01-01")


@pytest.fixture
def explored(world: World, tmp_path: Path) -> Log:
    """Forty rankings whose every order was as likely as any; `ranker` in `tmp_path` ranks for favorite and, a little, for reply."""
    log = world.log
    part = log.take(slice(0, int(np.searchsorted(log.request_id, log.request_id[0] + 40))))
    starts = np.flatnonzero(np.append(True, np.diff(part.request_id.astype(np.int64)) != 0))
    sizes = np.diff(np.append(starts, len(part)))
    position = np.concatenate([np.arange(1, size + 1) for size in sizes])
    propensity = np.concatenate([1 / np.arange(size, 0, -1) for size in sizes])
    save_checkpoint(
        tmp_path / "ranker", random_model(small_config(), 1), name="random", action_names=log.action_names,
        continuous=(DWELL_TIME,), score_weights={"favorite": 1.0, "reply": 0.1},
    )  # fmt: skip
    return replace(part, position=position, propensity=propensity)


def judged(log: Log, directory: Path) -> Result:
    """What `off-policy` says of the ranker in the directory by this log."""
    write_log(directory / "log.parquet", log)
    return call("off-policy", "--checkpoint", directory / "ranker", *OPTIONS, "--log", directory / "log.parquet")


def test_the_command_estimates_and_refuses(explored: Log, tmp_path: Path) -> None:
    estimated = judged(explored, tmp_path)
    assert estimated.exit_code == 0, estimated.output
    assert "doubly robust" in estimated.stdout
    refused = judged(replace(explored, position=None, propensity=None), tmp_path)
    assert (refused.exit_code, "served without exploration" in refused.stderr) == (1, True)


def test_an_action_that_nobody_knows_of_is_not_a_no(explored: Log, tmp_path: Path) -> None:
    """Every first place was liked. In every second ranking nobody collected that, and nowhere whether anybody replied."""
    favorite, reply = (explored.action_names.index(name) for name in ("favorite", "reply"))
    half = explored.request_id % 2 == 0
    actions, unknown = np.zeros_like(explored.actions), np.zeros_like(explored.actions)
    actions[:, favorite] = (explored.position == 1) & ~half
    unknown[:, favorite], unknown[:, reply] = half, True
    said = judged(replace(explored, actions=actions, unknown=unknown), tmp_path)
    assert said.exit_code == 0, said.output
    left_out = len(np.unique(explored.request_id[half]))
    assert f"left out: {left_out} rankings with a post whose reward is unknown" in said.stdout
    assert "as logged      1.000 (1.000 … 1.000)" in said.stdout
    assert "not counted in the reward: reply, since the log knows of no impression whether it was taken" in said.stdout


def test_what_is_predicted_leaves_out_what_nobody_knows(explored: Log) -> None:
    """Else the doubly robust estimate would add rewards that the log never counts."""
    favorite, reply = (explored.action_names.index(name) for name in ("favorite", "reply"))
    unknown, both = np.zeros_like(explored.actions), np.zeros(len(explored.action_names))
    unknown[:, reply], both[[favorite, reply]] = True, 1.0
    one, log, ranker = (
        both * (np.arange(len(both)) == favorite),
        replace(explored, unknown=unknown),
        random_model(small_config(), 1),
    )
    found, alone = (rankings_of(ranker, log, 0, weights) for weights in (both, one))
    assert np.array_equal(found.predicted, alone.predicted)
    assert not np.array_equal(found.score, alone.score)


def test_a_log_without_a_reward_that_is_known_is_refused(explored: Log, tmp_path: Path) -> None:
    said = judged(replace(explored, unknown=np.ones_like(explored.actions)), tmp_path)
    assert (said.exit_code, said.stderr.count("\n")) == (1, 1), said.output
    assert "knows of no impression from 978307200 on whether favorite or reply was taken" in said.stderr
