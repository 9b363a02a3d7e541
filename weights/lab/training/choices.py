"""Looks at a log and decides from it how to train, with a reason for each choice. Trains nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from model.config import ModelConfig
from weights.actions import default_score_weights
from weights.lab.counts import rates_pass, repeated_share
from weights.lab.training.log import Log, date_of, distinct, time_words
from weights.lab.training.run import check_split, split
from weights.lab.training.settings import TrainSettings, demo_config, hashes, replaced
from weights.tables import TableError

NEWEST_SHARE = 0.2
"""This share of the log is held out. The newest part of the rest, the same share, tells how many ids will be new there."""
MOSTLY_HIDDEN = 0.5  # posts are hidden so often that their own table says little
AGE_BUCKETS = 80
AGES_READ = 5_000_000  # of a larger log, an even sample
AGES_COVERED = 0.85  # of the impressions have an age within the buckets; older posts share the last one
AGE_UNITS = {"1 hour": 60, "6 hours": 360, "1 day": 1440, "1 week": 10_080, "1 month": 43_200, "1 year": 525_600}
ROWS_AN_ID = 4  # of a table: few ids then share both of their rows
TABLE_ROWS = (2048, 65_536)
PASSED_IMPRESSIONS = 2_400_000
PASSES = (2.4, 40.0)
PASSES_OF_MANY, MANY_IMPRESSIONS = 8.0, 300_000
"""A log of so many impressions is passed over so often, a smaller one more often, by the square root of how much smaller it is."""
EVALUATIONS, PATIENCE, WARMUP_SHARE = 30, 10, 0.05
VALIDATION_POSITIVES = 200
"""So many rows with the action that the score is for make a validation loss that can be trusted, if the log can spare them."""
VALIDATION_SHARES = (0.03, 0.15)
FEWEST_VALIDATION_REQUESTS = 600
VALIDATION_COST = 0.05  # of the requests that training passes over: at most so many are validated on
REPEATED_SHARE = 0.5
"""From here on, users meet the same posts again and again: so many of the newest impressions are of a user and a post met before."""
COUNTED_IMPRESSIONS = 1_000_000  # more need no help of counts
HIDDEN_USERS = 0.5
HIDDEN_CODED_POSTS = 0.5
"""Posts with content codes are hidden at least this often: a model that sees their ids learns the posts and not the codes."""
HIDDEN_CODES = 0.5
"""Where posts come again, so many of their content codes are hidden: all codes of a post together tell which post it is."""
LEARNABLE_POSITIVES = 200  # the ranker was no better than chance with 117, and learned something with 260
LEARNABLE_USERS = 20
LIKENESS = {
    "right_anchored": True, "shared_events": 16, "batch_contexts": 8, "hidden_event_share": 0.2, "attention_rate": 0.3,
    "weight_decay": 0.05, "table_decay": 0.2, "averaging": 0.998, "evaluate_every": 500,
}  # fmt: skip
"""Settings for logs whose posts come again and again: a post is known best by its own row, and the newest events tell most."""
SALTS = {"user": 10, "post": 20, "author": 30}
KNOWN_ACTIONS = 8  # of X's actions: a log with so many is scored as X scores

WANTED = (
    "purchase", "buy", "order", "checkout", "subscribe", "favorite", "favourite", "like", "love", "upvote", "save", "bookmark",
    "add_to_cart", "share", "repost", "reply", "comment", "follow", "watch", "listen", "finish", "complete", "download", "click",
)  # fmt: skip
"""Words in the name of what a ranking may be for, the surest sign first."""
UNWANTED = (
    "not", "dislike", "report", "block", "mute", "hide", "skip", "return", "refund", "downvote", "unfollow", "remove",
)  # fmt: skip
"""Words in the names of complaints."""


class Teaching(NamedTuple):
    """How far counts are believed. What they expect is worth `strength` positives: with so many, half of each label is that, with more it
    is less. It is the share `most` at most. `remark`: why, in words."""

    remark: str
    strength: float
    most: float


NO_TEACHING = Teaching("", 0.0, 0.0)
USUAL = Teaching("", 2000.0, 1.0)
REPEATED = Teaching(", and users meet the same posts again", 10_000.0, 0.9)
"""Counts of a user with a post are then hard to beat."""
PASSING = Teaching(", and no post or author stays popular", 100_000.0, 1.0)
"""Learning posts and authors by heart then only harms."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What was seen in the log, what was decided from it in words, and the values by the names that `--set` takes."""

    seen: str
    decided: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """How to train on a log. `until_ts`: training ends before this time, Unix seconds; None: with the log. `summary`: the log in a line.
    `seen_until_ts`: what was shown from then on, Unix seconds, neither this training sees nor the one that it goes on from saw.

    `overrides`: what the caller decided instead, by the names that `--set` takes.
    """

    summary: str
    choices: tuple[Choice, ...]
    until_ts: int | None
    seen_until_ts: int
    config: ModelConfig
    settings: TrainSettings
    score_weights: dict[str, float]
    overrides: Mapping[str, Any]

    def lines(self) -> list[str]:
        """The plan for people: the log, then what was seen and what was decided in two columns, then what the caller decided."""
        width = max(len(choice.seen) for choice in self.choices)
        pairs = ", ".join(f"{name}={value}" for name, value in self.overrides.items())
        return [
            self.summary,
            *(f"{choice.seen:<{width}}  → {choice.decided}" for choice in self.choices),
            *([f"given: {pairs}"] if pairs else []),
        ]

    def scored_by_taught(self, log: Log, taught: Collection[str]) -> Plan:
        """The plan with score weights that are proposed for these actions of its log alone: the head of another one says nothing."""
        past = log if self.until_ts is None else log.before(self.until_ts)
        weights, scored = propose_score_weights(past, taught)
        return replace(self, choices=(*self.choices[:-1], scored), score_weights=weights)

    def scored_by(self, weights: Mapping[str, float], source: str) -> Plan:
        """The plan with these score weights in place of the proposed ones. `source`: where they are from, in words."""
        words = ", ".join(f"{weight:g} {name}" for name, weight in weights.items() if weight)
        *others, proposed = self.choices
        scored = replace(proposed, decided=f"score: {words} ({source})")
        return replace(self, choices=(*others, scored), score_weights=dict(weights))

    def record(self) -> dict[str, Any]:
        """The plan as JSON values, for the manifest."""
        return {
            "log": self.summary,
            "until_ts": self.seen_until_ts,
            "choices": [{"seen": choice.seen, "decided": choice.decided} for choice in self.choices],
            "settings": asdict(self.settings),
        }


def plan(
    log: Log,
    seed: int = 1,
    until_ts: int | None = None,
    hold_out: bool = True,
    overrides: Mapping[str, Any] | None = None,
    start_until_ts: int | None = None,
) -> Plan:
    """Decide from the log what it can decide. `until_ts`: the split, where the caller knows it; else the newest fifth is held out, or
    nothing if not `hold_out`. `overrides`: values that replace those chosen, by the names of TrainSettings, of the plain fields of
    ModelConfig and of the tables (`user_rows`, `post_rows`, `author_rows`). `start_until_ts`: the checkpoint that training goes on from was
    trained until then, Unix seconds; nothing earlier is held out.

    Raises TableError, in one sentence that names the log's range, for a log from which nothing can be learned, and ConfigError or
    ValueError for overrides whose names or values cannot be.
    """
    names = {one.name for kind in (TrainSettings, ModelConfig) for one in fields(kind)}
    if unknown := (overrides or {}).keys() - names - {f"{kind}_rows" for kind in SALTS}:
        raise ValueError(f"there is no setting {sorted(unknown)[0]!r}")
    _check_learnable(log, "the log")
    until, split = _split(log, until_ts, hold_out, start_until_ts)
    past = log.before(until)
    _check_learnable(past, "the training period")
    new = new_shares(past)
    weights, scored = propose_score_weights(past)
    name, positives = main_action(past, weights)
    choices = (
        split, *_too_little(past, name, positives), _hidden(new, has_codes=bool(log.codes.any())), _tables(past, new), _ages(past),
        *_codes(log, new), _dwell(past), _learning(past, new), _schedule(past, name, positives), *_constant(past), scored,
    )  # fmt: skip
    values = {name: value for choice in choices for name, value in choice.values.items()} | dict(overrides or {})
    config = demo_config(len(log.action_names))
    values |= {f"{kind}_hashes": hashes(values[f"{kind}_rows"], salt) for kind, salt in SALTS.items()}
    return Plan(
        _summary(log),
        choices,
        until,
        max(until or int(log.impression_ts[-1]) + 1, start_until_ts or 0),
        replaced(config, values),
        replaced(TrainSettings(seed=seed), values),
        weights,
        dict(overrides or {}),
    )


def _check_learnable(log: Log, what: str) -> None:
    """Raises TableError for a log of one request, one user or one time, or without two different outcomes."""
    subject = f"{what} ({log.span}) holds"
    if log.requests < 2:
        raise TableError(f"{subject} only one request: a model needs many, of many users")
    if (log.user_id == log.user_id[0]).all():
        raise TableError(f"{subject} {'only one' if log.user_id[0] else 'no'} user: a model needs many")
    if log.impression_ts[0] == log.impression_ts[-1]:
        raise TableError(f"{subject} only one time: no history comes before it")
    if not log.actions.any():
        raise TableError(f"{subject} no action that was ever taken: there is nothing to tell posts apart by")
    if log.actions.all():
        raise TableError(f"{subject} no action that was ever not taken: there is nothing to tell posts apart by")


def _count(ids: NDArray[np.uint64]) -> int:
    """How many different ids there are: 0 is nobody, or an unknown author."""
    return int(np.count_nonzero(distinct(ids)))


def _summary(log: Log) -> str:
    counts = {"request": log.requests, "user": _count(log.user_id), "post": len(distinct(log.post_id))}
    return (
        f"{len(log):,} impressions, "
        + ", ".join(f"{count:,} {name}s" for name, count in counts.items())
        + f", {log.span}"
    )


def _split(
    log: Log, until_ts: int | None, hold_out: bool, start_until_ts: int | None = None
) -> tuple[int | None, Choice]:
    trained = f"the checkpoint of --start was trained until {time_words(start_until_ts or 0)}"
    if until_ts is not None:
        check_split(log, until_ts)
        if start_until_ts and until_ts < start_until_ts:
            raise TableError(
                f"{trained}, so what would be held out from {until_ts} on is not new to it: give a later --until, or --until all"
            )
        before = float((log.impression_ts < until_ts).mean())
        return until_ts, Choice(f"split given: {date_of(until_ts)}", f"train on {before:.0%}, hold out the rest")
    if not hold_out:
        return None, Choice("no split requested", "train on the whole log; nothing is left to evaluate on")
    until = int(log.impression_ts[int(len(log) * (1 - NEWEST_SHARE))])
    if until == log.impression_ts[0]:
        until = int(log.impression_ts[log.impression_ts > until][0])
    if start_until_ts and until < start_until_ts:
        if start_until_ts > log.impression_ts[-1]:
            raise TableError(
                f"{trained}, and the log covers {log.span}, so nothing is left to hold out: give a newer log, or --until all"
            )
        return start_until_ts, Choice(trained, "hold out what is newer for eval; --until all trains on it too")
    return until, Choice(
        f"newest {NEWEST_SHARE:.0%} of the impressions begin on {time_words(until)}",
        "hold them out for eval",
    )


def new_shares(log: Log) -> dict[str, float]:
    """Of the impressions in the newest fifth that have a user, post or author: the share whose one was not seen before that fifth; 0
    where none has."""
    cut = min(int(len(log) * (1 - NEWEST_SHARE)), len(log) - 1)
    columns = {kind: getattr(log, f"{kind}_id") for kind in SALTS}
    newest = {kind: ids[cut:][ids[cut:] != 0] for kind, ids in columns.items()}
    seen = {kind: pc.is_in(pa.array(newest[kind]), value_set=distinct(ids[:cut])) for kind, ids in columns.items()}
    return {kind: 1 - float(pc.mean(is_seen).as_py()) if len(is_seen) else 0.0 for kind, is_seen in seen.items()}


def _hidden(new: Mapping[str, float], *, has_codes: bool) -> Choice:
    fewest_posts = HIDDEN_CODED_POSTS if has_codes else 0.02
    bounds = {"user": (HIDDEN_USERS, HIDDEN_USERS), "post": (fewest_posts, 0.85), "author": (0.0, 0.5)}
    shares = {kind: round(float(np.clip(new[kind], *bounds[kind])), 2) for kind in bounds}
    seen = ", ".join(f"{1 - new[kind]:.0%} of {kind}s" for kind in ("post", "author", "user"))
    decided = ", ".join(f"{shares[kind]:.0%} of {kind}s" for kind in ("post", "author", "user"))
    decided += " (posts so often that the codes are learned)" if has_codes and new["post"] < fewest_posts else ""
    values = {f"hidden_{kind}_share": share for kind, share in shares.items()}
    return Choice(f"newest fifth of the training period: {seen} known", f"hide the ids of {decided}", values)


def _tables(log: Log, new: Mapping[str, float]) -> Choice:
    counts = {kind: _count(getattr(log, f"{kind}_id")) for kind in SALTS}
    rows_needed = {
        kind: ROWS_AN_ID * count if new[kind] < MOSTLY_HIDDEN or kind == "user" else 0 for kind, count in counts.items()
    }
    rows = {
        kind: int(np.clip(2 ** int(np.ceil(np.log2(max(count, 1)))), *TABLE_ROWS))
        for kind, count in rows_needed.items()
    }
    seen = ", ".join(f"{counts[kind]:,} {kind}s" for kind in SALTS)
    decided = "tables of " + ", ".join(f"{count:,}" for count in rows.values()) + " rows"
    return Choice(f"to train on: {seen}", decided, {f"{kind}_rows": count for kind, count in rows.items()})


def _codes(log: Log, new: Mapping[str, float]) -> list[Choice]:
    """Content codes as an input, if the log has them. The whole log counts: the posts held out come from the same code book."""
    levels, most = log.codes.shape[1], int(log.codes.max(initial=0))
    if not most:
        return []
    share = float(log.codes.any(1).mean())
    seen = f"content codes for {share:.0%} of the impressions: {levels} levels, the largest code {most}"
    values = {"code_levels": levels, "code_values": most}
    if new["post"] >= MOSTLY_HIDDEN:
        return [Choice(seen, "content codes as input", values)]
    decided = (
        f"content codes as input, {HIDDEN_CODES:.0%} of them hidden so that they are not learned as names of posts"
    )
    return [Choice(seen, decided, {**values, "hidden_code_share": HIDDEN_CODES})]


def _ages(log: Log) -> Choice:
    some = slice(None, None, -(-len(log) // AGES_READ))
    shown_at, created_at = log.impression_ts[some], log.created_at[some]
    has_age = (created_at > 0) & (shown_at >= created_at)
    minutes = (shown_at - created_at)[has_age] / 60
    if not len(minutes):
        seen = "every created_at is later than its impression_ts" if log.created_at.any() else "no created_at"
        return Choice(seen, "no post ages", {"has_post_age": False})
    covered = float(np.quantile(minutes, AGES_COVERED))
    fitting = [name for name, size in AGE_UNITS.items() if size * AGE_BUCKETS >= covered]
    unit = fitting[0] if fitting else list(AGE_UNITS)[-1]
    size = AGE_UNITS[unit]
    values = {"has_post_age": True, "post_age_granularity_minutes": size, "max_post_age_minutes": AGE_BUCKETS * size}
    return Choice(
        f"ages 0 … {_age(float(minutes.max()))}, {AGES_COVERED:.0%} below {_age(covered)}",
        f"age buckets of {unit}",
        values,
    )


def _age(minutes: float) -> str:
    for size, name in ((525_600, "years"), (1440, "days"), (60, "hours")):
        if minutes >= 2 * size:
            return f"{minutes / size:.0f} {name}"
    return f"{minutes:.0f} minutes"


def _dwell(log: Log) -> Choice:
    share = float((log.dwell_seconds > 0).mean())
    if not share:
        return Choice("no dwell", "no dwell input and no dwell output", {"has_dwell": False, "continuous_actions": 0})
    return Choice(
        f"dwell known for {share:.0%}", "dwell as input and output", {"has_dwell": True, "continuous_actions": 1}
    )


def _learning(log: Log, new: Mapping[str, float]) -> Choice:
    """How often to pass over the log, and how to learn. Where posts are known, the model must learn what they have in common, and not
    each one by heart."""
    passes = passes_over(len(log))
    seen = f"{len(log):,} impressions to train on, {1 - new['post']:.0%} of posts known"
    decided = f"at most {passes:.2g} passes, fewer if validation stops improving"
    values = {"epochs": round(passes, 1)}
    if new["post"] >= MOSTLY_HIDDEN:
        return Choice(seen, decided, values)
    return Choice(seen, f"{decided}; learn what posts have in common, not each by heart", values | LIKENESS)


def passes_over(impressions: int) -> float:
    """How often training passes over so many impressions: about as much work for all large logs, less for small ones."""
    passes = min(PASSED_IMPRESSIONS / impressions, PASSES_OF_MANY * (MANY_IMPRESSIONS / impressions) ** 0.5)
    return float(np.clip(passes, *PASSES))


def main_action(log: Log, weights: Mapping[str, float]) -> tuple[str, int]:
    """Of the actions that the score is for, the one taken most often, and how often. If the score is undecided, of all actions."""
    taken = dict(zip(log.action_names, log.actions.sum(0).tolist(), strict=True))
    counts = {name: taken[name] for name, weight in weights.items() if weight > 0 and 0 < taken.get(name, 0) < len(log)}
    counts = counts or {name: count for name, count in taken.items() if 0 < count < len(log)} or taken
    return max(counts.items(), key=lambda item: item[1])


def _schedule(log: Log, name: str, positives: int) -> Choice:
    """Warm-up, evaluations and validation by how much there is of what the score is for; and how far counts are believed."""
    requests = log.requests
    share = float(np.clip(VALIDATION_POSITIVES / positives, *VALIDATION_SHARES))
    enough = int(np.ceil(VALIDATION_POSITIVES * requests / positives))
    affordable = int(VALIDATION_COST * passes_over(len(log)) * requests)
    validated = min(max(FEWEST_VALIDATION_REQUESTS, min(enough, affordable)), max(1, round(share * requests)))
    action, newest = log.action_names.index(name), int(len(log) * (1 - NEWEST_SHARE))
    _, validation = split(log.counted_requests, max(FEWEST_VALIDATION_REQUESTS, validated), round(share, 3))
    taken = int(np.add.reduceat(log.actions[:, action], log.request_starts, dtype=np.int64)[validation].sum())
    teaching = _teaching(log, newest, action)
    counts = round(min(teaching.strength / max(1.0, teaching.strength + positives), teaching.most), 1)
    smoothed = f"; {counts:.0%} of each label is what counts expect" if counts else ""
    return Choice(
        f"{positives:,} times {name} in {requests:,} requests{teaching.remark}",
        f"validate on {len(validation):,} of the newest requests, {taken:,} times {name}{smoothed}",
        {
            "warmup_share": WARMUP_SHARE, "evaluations": EVALUATIONS, "patience": PATIENCE, "counts_share": counts,
            "validation_share": round(share, 3), "validation_requests": max(FEWEST_VALIDATION_REQUESTS, validated),
        },
    )  # fmt: skip


def _teaching(log: Log, newest: int, action: int) -> Teaching:
    """What counts teach of this action. `newest`: the first row of the newest impressions."""
    if len(log) > COUNTED_IMPRESSIONS:
        return NO_TEACHING
    if rates_pass(log, newest, action):
        return PASSING
    return REPEATED if repeated_share(log, newest) >= REPEATED_SHARE else USUAL


def _too_little(log: Log, name: str, positives: int) -> list[Choice]:
    """A warning of what a model cannot learn from this log, if there is something."""
    users = _count(log.user_id)
    warnings = []
    if positives < LEARNABLE_POSITIVES:
        warnings.append(
            Choice(f"only {positives:,} times {name} to train on", "TOO FEW to learn what is wanted: collect more")
        )
    if users < LEARNABLE_USERS:
        warnings.append(
            Choice(f"only {users:,} users to train on", "TOO FEW to learn how users differ, and for eval to tell")
        )
    return warnings


def _constant(log: Log) -> list[Choice]:
    """A warning of actions that are always taken, never, or known of no impression, if there are any."""
    shares = np.where(log.known_actions, log.shares, np.nan)
    kinds = {"always taken": shares == 1, "never taken": shares == 0, "never known": np.isnan(shares)}
    constant_actions = {
        what: [name for name, is_so in zip(log.action_names, are_so, strict=True) if is_so]
        for what, are_so in kinds.items()
    }
    seen = ", ".join(f"{what}: {' and '.join(names)}" for what, names in constant_actions.items() if names)
    return [Choice(f"{seen} ({log.span})", "their probabilities say nothing")] if seen else []


def propose_score_weights(log: Log, taught: Collection[str] | None = None) -> tuple[dict[str, float], Choice]:
    """Score weights that suit the names of the actions and how often they are taken; no weights if the names do not tell.

    A log with X's actions gets X's weights. Any other is scored by one action, the surest sign that a post was wanted. An action that is
    not among those `taught` gets no weight; None: all may have one.
    """
    may_weigh = log.action_names if taught is None else taught
    shares = dict(zip(log.action_names, log.shares.tolist(), strict=True))
    is_known = dict(zip(log.action_names, log.known_actions.tolist(), strict=True))
    taken = ", ".join(
        f"{name} {'unknown' if not is_known[name] else 'under 0.01%' if 0 < share < 1e-4 else f'{share:.2%}'}"
        for name, share in shares.items()
    )
    weights = default_score_weights(log.action_names)
    if len(weights) >= KNOWN_ACTIONS:
        left_out = [name for name in weights if name not in may_weigh]
        return {name: weight for name, weight in weights.items() if name in may_weigh}, Choice(
            f"actions: {len(weights)} of X's",
            f"score: X's weights{without(left_out)} (--score-weights ACTION=WEIGHT,… for others)",
        )
    informative = [
        name
        for name, share in shares.items()
        if name in may_weigh and 0 < share < 1 and not set(_words(name)) & set(UNWANTED)
    ]
    signals = [name for word in WANTED for name in informative if word == name or word in _words(name)] or (
        informative if len(informative) == 1 else []
    )
    seen = f"actions {taken}"
    if not signals:
        return {}, Choice(seen, "score: undecided; choose it with --score-weights ACTION=1")
    return {signals[0]: 1.0}, Choice(seen, f"score: 1.0 {signals[0]} (--score-weights {signals[0]}=1,… for another)")


def without(untaught: Collection[str]) -> str:
    """Words for the actions that a score leaves out because nothing taught their heads; empty for none."""
    return f" without {', '.join(untaught)}, which no impression to learn from knows" if untaught else ""


def _words(name: str) -> list[str]:
    return name.lower().split("_")
