"""Estimates from a log what another ranker would have earned, had it chosen the order. Needs the propensities that exploration logs.

The log's order was drawn place by place: place j got post a_j with probability p_j, given the posts above it. The other ranker would draw
it with probability π_j: Plackett–Luce on its own scores, with a temperature. Let ρ_j = Π_{i ≤ j} π_i ÷ p_i, r_j be the reward of place j,
and q the other ranker's own prediction of a post's reward:

    IPS    mean over rankings of Σ_j ρ_j r_j
    SNIPS  Σ_j of Σ ρ_j r_j ÷ Σ ρ_j, the sums over rankings: a little bias, less variance
    DR     mean of Σ_j [ρ_{j−1} Σ_b π(b | above) q_b + ρ_j (r_j − q_j)]: as true as the better of weights and q

Sources: Horvitz and Thompson 1952; Swaminathan and Joachims 2015; McInerney et al. 2020 (the weights of a cascade); Kiyohara et al. 2022
(doubly robust in a cascade).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from model.ranker import Ranker
from model.ranking import Calibration
from weights.lab.evaluate.evaluation import known_worth
from weights.lab.evaluate.metrics import INTERVAL, LEAST_USERS, Figure
from weights.lab.evaluate.predict import predict
from weights.lab.training.examples import Examples
from weights.lab.training.log import Log
from weights.tables import TableError

Floats = NDArray[np.float64]
RESAMPLES, SEED = 300, 1
WHOLE = 0.999  # propensity of the last place of a whole ranking, but for rounding
NO_PROPENSITIES = (
    "the log has no propensities: it was served without exploration, or each ranking held a post of 0, so it cannot say what another order "
    "would have earned"
)


@dataclass(frozen=True, slots=True, eq=False)
class Rankings:
    """Logged rankings, row by row, in any order of rows. All `[n]`: `request` and `user` number rankings and users from 0; `position`
    int64, from 1; `propensity` float64, the probability of the post's place given those above it; `reward` float64, what followed, NaN
    where that is not known; `score` float64, of the other ranker; `predicted` float64, the reward that the other ranker predicts."""

    request: NDArray[np.int64]
    user: NDArray[np.int64]
    position: NDArray[np.int64]
    propensity: Floats
    reward: Floats
    score: Floats
    predicted: Floats

    def take(self, rows: NDArray[np.bool_]) -> Rankings:
        """These rows, with rankings and users numbered anew."""
        columns = {one.name: getattr(self, one.name)[rows] for one in fields(self)}
        for name in ("request", "user"):
            columns[name] = np.unique(columns[name], return_inverse=True)[1]
        return Rankings(**columns)


def rankings_of(
    ranker: Ranker, log: Log, since_ts: int, weights: NDArray[np.float64], corrections: Calibration | None = None
) -> Rankings:
    """The rankings of a log from a time on, Unix seconds, as this ranker scores them.

    `weights` of the actions, float64 `[A]`: rewards are the sums of the weights of what was done, and unknown where one of these actions
    is. An action that is known of no row counts in no reward (`Log.known_actions`). `corrections`: the checkpoint's calibration.
    Raises TableError for a log without the columns position and propensity, and for one that knows no action with a weight.
    """
    if log.position is None or log.propensity is None:
        raise TableError(NO_PROPENSITIES)
    examples = Examples(log, ranker.config)
    requests = np.arange(int(np.searchsorted(examples.times, since_ts)), len(examples))
    if not len(requests):
        raise TableError(f"no ranking of the log is from {since_ts} or later")
    shown = log.take(slice(int(examples.starts[requests[0]]), len(log)))
    counted = weights * shown.known_actions
    if weights.any() and not counted.any():
        names = " or ".join(np.array(log.action_names)[weights != 0])
        raise TableError(
            f"the log knows of no impression from {since_ts} on whether {names} was taken, so there is no reward to estimate: give a log "
            "that tells, or a checkpoint whose score is for actions that this log knows"
        )
    probabilities = predict(ranker, examples, requests, corrections=corrections).probabilities.astype(np.float64)
    return Rankings(
        request=np.unique(shown.request_id, return_inverse=True)[1],
        user=shown.people,
        position=np.asarray(shown.position),
        propensity=np.asarray(shown.propensity, np.float64),
        reward=np.where(known_worth(shown, weights), shown.actions @ counted, np.nan),
        score=probabilities @ weights,
        predicted=probabilities @ counted,
    )


@dataclass(frozen=True, slots=True)
class Estimates:
    """The reward of the first `places` of a ranking: as logged, and as the other ranker would have earned by three estimators, each with
    its 95 % interval by resampling users; of fewer than ten users, none. `left_out`: rankings without propensities;
    `partly_explored`: those of which the propensity of some post, but not of all, is 0, which is unknown; `unknown`: others that are left
    out, since the reward of one of their posts is not known. `effective_rankings`: (Σρ)² ÷ Σρ², how many rankings the weights leave."""

    places: int
    rankings: int
    left_out: int
    partly_explored: int
    unknown: int
    effective_rankings: float
    logged: Figure
    ips: Figure
    snips: Figure
    doubly_robust: Figure

    def lines(self) -> list[str]:
        """The estimates for people."""
        place = "place" if self.places == 1 else f"{self.places} places"
        return [
            *(
                [
                    f"left out: {self.left_out:,} rankings without propensities, served without exploration or with a post of 0"
                ]
                if self.left_out
                else []
            ),
            *(
                [f"left out: {self.partly_explored:,} rankings with a post whose propensity is unknown"]
                if self.partly_explored
                else []
            ),
            *([f"left out: {self.unknown:,} rankings with a post whose reward is unknown"] if self.unknown else []),
            f"reward of the first {place}, over {self.rankings:,} rankings, which weigh as {self.effective_rankings:,.0f}:",
            f"  as logged      {self.logged:#.4g}",
            f"  IPS            {self.ips:#.4g}",
            f"  SNIPS          {self.snips:#.4g}",
            f"  doubly robust  {self.doubly_robust:#.4g}",
        ]


def off_policy(rankings: Rankings, temperature: float, places: int = 1) -> Estimates:
    """Estimate the reward of another ranker that explores with this temperature, in units of its scores.

    Rankings without propensities are left out: they were served without exploration, or held a post of 0. So are those with a post
    whose propensity is 0, which is unknown, or whose reward is unknown, whatever its place: if only the first places counted, the order
    would decide which rankings stay, and the weights would not be theirs. Raises TableError where no ranking stays, and for rankings of
    which the log lacks posts or places: those whose `position` is not 1 … n, or whose last post was not sure of its place.
    """
    explored = np.isin(rankings.request, rankings.request[rankings.propensity > 0])
    if not explored.any():
        raise TableError(NO_PROPENSITIES)
    left_out = len(np.unique(rankings.request[~explored]))
    rankings = rankings.take(explored)
    is_partly = np.isin(rankings.request, rankings.request[rankings.propensity <= 0])
    if is_partly.all():
        raise TableError(
            "each ranking has a post whose propensity is 0, which is unknown, so no other order can be judged by this log"
        )
    partly_explored = len(np.unique(rankings.request[is_partly]))
    rankings = rankings.take(~is_partly)
    is_unknown = np.isin(rankings.request, rankings.request[np.isnan(rankings.reward)])
    if is_unknown.all():
        raise TableError(
            "each ranking has a post of which the log does not know an action that the score is for, so no reward can be estimated: give "
            "a log that knows, with false where the action was not taken"
        )
    unknown = len(np.unique(rankings.request[is_unknown]))
    table = _padded(rankings.take(~is_unknown), places)
    last = table.propensity[np.arange(len(table.reward)), table.is_there.sum(1) - 1]
    is_partial = ~table.has_all_places | (last < WHOLE)  # whatever is left gets the last place for sure
    if is_partial.any():
        raise TableError(
            f"{int(is_partial.sum())} of {len(last)} rankings lack posts that were ranked, or their places, so the probabilities of other "
            "orders are not known: serve the log without top_k, and join it without shown events"
        )
    weights, direct = _weights(table, temperature, places)
    count = len(table.reward)
    rewards, predicted = table.reward[:, :places], table.predicted[:, :places]
    before = np.concatenate((np.ones((count, 1)), weights[:, :-1]), 1)
    ips = weights * rewards
    robust = (before * direct + weights * (rewards - predicted)).sum(1)
    one = np.ones((count, 1))

    def figure(numerators: Floats, denominators: Floats) -> Figure:
        return _ratio(table.user, numerators, denominators)

    final = weights[:, -1]
    return Estimates(
        places,
        count,
        left_out,
        partly_explored,
        unknown,
        float(final.sum() ** 2 / np.square(final).sum()),
        figure(rewards.sum(1, keepdims=True), one),
        figure(ips.sum(1, keepdims=True), one),
        figure(ips, weights),
        figure(robust[:, None], one),
    )


def _ratio(user: NDArray[np.int64], numerators: Floats, denominators: Floats) -> Figure:
    """Σ_j of ratios of sums over rankings, float64 `[R, J]`, and its interval; of fewer than LEAST_USERS users, none.

    The interval is that of a studentised bootstrap over users: weights are skewed, and plain percentiles would miss the truth too often
    (Hall 1988).
    """
    users = int(user.max()) + 1

    def by_user(values: Floats) -> Floats:
        return np.stack([np.bincount(user, column, users) for column in values.T], 1)

    top, bottom = by_user(numerators), by_user(denominators)

    def estimate(drawn: Floats) -> tuple[Floats, Floats]:
        """The value and its standard error, by linearisation, of each resample `[r, U]` of users."""
        sums = np.maximum(drawn @ bottom, 1e-12)
        ratios = (drawn @ top) / sums
        rest = sum((top[:, j] - ratios[:, j, None] * bottom[:, j]) / sums[:, j, None] for j in range(top.shape[1]))
        return ratios.sum(1), np.sqrt((drawn * np.square(rest)).sum(1))

    value, error = (float(numbers[0]) for numbers in estimate(np.ones((1, users))))
    if users < LEAST_USERS:
        return Figure(value, np.nan, np.nan)
    rng = np.random.default_rng(SEED)
    parts = [
        estimate(rng.multinomial(users, np.full(users, 1 / users), 50).astype(np.float64))
        for _ in range(RESAMPLES // 50)
    ]
    values, errors = (np.concatenate(numbers) for numbers in zip(*parts, strict=True))
    low, high = np.percentile((values - value) / np.maximum(errors, 1e-12), INTERVAL)
    return Figure(value, value - float(high) * error, value - float(low) * error)


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """Rankings as rows, their posts in the order of their places, `[R, C]`; `user` `[R]`; `has_all_places` `[R]`: their
    positions are 1 … n. Where a ranking has fewer posts, `is_there` is False, rewards are 0, propensities 1 and scores −inf."""

    user: NDArray[np.int64]
    has_all_places: NDArray[np.bool_]
    is_there: NDArray[np.bool_]
    propensity: Floats
    reward: Floats
    score: Floats
    predicted: Floats


def _padded(rankings: Rankings, places: int) -> _Table:
    order = np.lexsort((rankings.position, rankings.request))
    _, first, row, sizes = np.unique(
        rankings.request[order], return_index=True, return_inverse=True, return_counts=True
    )
    column = np.arange(len(order)) - first[row]
    shape = len(first), max(places, int(sizes.max()))

    def table(values: NDArray[np.generic], empty: float) -> Floats:
        padded = np.full(shape, empty)
        padded[row, column] = values[order]
        return padded

    is_in_place = rankings.position[order] == column + 1
    is_there = np.zeros(shape, bool)
    is_there[row, column] = True
    return _Table(
        rankings.user[order][first],
        np.logical_and.reduceat(is_in_place, first),
        is_there,
        np.where(is_there, table(rankings.propensity, 1.0), 1.0),
        table(rankings.reward, 0.0),
        table(rankings.score, -np.inf),
        table(rankings.predicted, 0.0),
    )


def _weights(table: _Table, temperature: float, places: int) -> tuple[Floats, Floats]:
    """ρ of each place, and the reward that the other ranker expects there given the posts above, float64 `[R, places]` each."""
    weights, direct = [], []
    total = np.ones(len(table.reward))
    for place in range(places):
        scores = table.score[:, place:] / temperature
        top = scores.max(1, keepdims=True, initial=-np.inf)
        shares = np.exp(np.where(np.isfinite(scores), scores - np.where(np.isfinite(top), top, 0), -np.inf))
        shares /= np.maximum(shares.sum(1, keepdims=True), 1e-300)
        direct.append((shares * table.predicted[:, place:]).sum(1))
        is_there = table.is_there[:, place]
        propensity = np.maximum(table.propensity[:, place], 1e-12)
        total = np.where(is_there, total * shares[:, 0] / propensity, total)
        weights.append(total)
    return np.stack(weights, 1), np.stack(direct, 1)
