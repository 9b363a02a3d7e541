"""What is decided from a log, and why: each choice follows what was seen, and a log that nothing can be learned from is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from model.config import ConfigError
from tests.weights.lab.training.small_run import WORLD
from weights.lab.training.choices import Plan, new_shares, plan, propose_score_weights
from weights.lab.training.log import Log
from weights.lab.training.settings import TrainSettings
from weights.lab.world.simulate import World
from weights.tables import TableError

DAY = 86_400


@pytest.fixture
def log(world: World) -> Log:
    return world.log


def decided(made: Plan, word: str) -> str:
    """The line that was printed about this."""
    return next(line for line in made.lines() if word in line)


def with_actions(log: Log, **shares: float) -> Log:
    """The log with these actions, each taken for about this share of the impressions."""
    rng = np.random.default_rng(1)
    actions = np.stack([rng.random(len(log)) < share for share in shares.values()], 1)
    return replace(log, actions=actions, action_names=tuple(shares))


def test_every_choice_is_printed_with_its_reason_and_recorded(log: Log) -> None:
    made = plan(log)
    assert made.lines()[0].startswith(f"{len(log):,} impressions, ")
    users = len(np.unique(log.user_id))
    nobody = np.where(log.user_id == log.user_id[0], 0, log.user_id).astype(np.uint64)
    assert f" {users:,} users, " in made.lines()[0]
    assert f" {users - 1:,} users, " in plan(replace(log, user_id=nobody)).lines()[0], "nobody is no user"
    assert made.lines()[0].endswith("2026-06-01 … 2026-06-10")
    assert all(" → " in line for line in made.lines()[1:])
    record = made.record()
    assert [each["decided"] for each in record["choices"]] == [each.decided for each in made.choices]
    assert record["until_ts"] == made.until_ts
    assert record["settings"]["hidden_post_share"] == made.settings.hidden_post_share


def test_the_newest_fifth_is_held_out_unless_told_otherwise(log: Log) -> None:
    until = plan(log).until_ts
    assert until is not None
    assert (log.impression_ts < until).mean() == pytest.approx(0.8, abs=0.01)
    assert plan(log, hold_out=False).until_ts is None
    assert plan(log, until_ts=WORLD.test_ts).until_ts == WORLD.test_ts
    with pytest.raises(TableError, match="2026-06-01 … 2026-06-10"):
        plan(log, until_ts=WORLD.end_ts + DAY)


def test_ids_are_hidden_as_often_as_new_ones_come(log: Log) -> None:
    ordinary = plan(log).settings
    known = log.take(log.impression_ts < plan(log).until_ts)
    assert ordinary.hidden_post_share == pytest.approx(min(new_shares(known)["post"], 0.85), abs=0.01)
    assert (ordinary.hidden_user_share, ordinary.hidden_author_share) == (0.5, 0.0), "all of them were seen before"
    new = replace(log, post_id=np.arange(1, len(log) + 1, dtype=np.uint64))
    made = plan(new)
    assert made.settings.hidden_post_share == 0.85
    assert "newest fifth of the training period: 0% of posts" in decided(made, "newest fifth")
    assert made.config.post_hashes.vocab_size == 2048, "a table of ids that are mostly hidden says little"
    few = replace(log, post_id=log.post_id % np.uint64(40) + np.uint64(1))
    assert plan(few).settings.hidden_post_share == 0.02
    strangers = replace(log, user_id=log.request_id)
    assert plan(strangers).settings.hidden_user_share == 0.5
    assert "0% of users known" in decided(plan(strangers), "newest fifth")


def test_a_log_without_codes_is_told_nothing_of_them(log: Log) -> None:
    new_posts = 87  # a share that is rounded up
    posts = np.append(np.ones(len(log) - new_posts, np.uint64), np.arange(new_posts, dtype=np.uint64) + np.uint64(2))
    made = plan(replace(log, post_id=posts), hold_out=False)
    assert "codes" not in decided(made, "hide the ids of")


def test_tables_have_room_for_the_ids_that_are_told_apart(log: Log) -> None:
    many = replace(log, author_id=np.arange(len(log), dtype=np.uint64) % np.uint64(2000) + np.uint64(1))
    assert plan(log).config.author_hashes.vocab_size == 2048
    assert plan(many).config.author_hashes.vocab_size == 8192


def test_ages_fill_the_buckets(log: Log) -> None:
    hours = plan(log).config
    assert (hours.post_age_granularity_minutes, hours.max_post_age_minutes) == (60, 4800)
    years = (np.arange(len(log)) % 25) * 365 * DAY
    old = replace(log, created_at=np.maximum(log.impression_ts - years, 1))
    made = plan(old)
    assert (made.config.post_age_granularity_minutes, made.config.post_age_buckets) == (525_600, 82)
    assert "age buckets of 1 year" in decided(made, "ages 0 … 24 years")
    unknown = plan(replace(log, created_at=np.zeros(len(log), np.int64)))
    assert not unknown.config.has_post_age
    assert "no post ages" in decided(unknown, "no created_at")


def test_a_log_without_dwell_makes_a_model_without_it(log: Log) -> None:
    made = plan(replace(log, dwell_seconds=np.zeros(len(log), np.float32)))
    assert (made.config.has_dwell, made.config.continuous_actions) == (False, 0)
    assert (plan(log).config.has_dwell, plan(log).config.continuous_actions) == (True, 1)


def test_fewer_impressions_are_passed_over_more_often(log: Log) -> None:
    def passes(impressions: int) -> float:
        return plan(log.take(np.sort(np.arange(impressions) % len(log)))).settings.epochs

    assert passes(1_500_000) == 2.4
    assert passes(500_000) == pytest.approx(6, abs=0.1)
    assert passes(60_000) == pytest.approx(20, abs=0.2)
    assert passes(5_000) == 40


def test_validation_grows_until_it_holds_enough_positives(log: Log) -> None:
    rare, common = (plan(with_actions(log, like=share)).settings for share in (0.01, 0.5))
    assert (rare.validation_share, common.validation_share) == (0.15, pytest.approx(200 / 3600, abs=0.01))
    many = plan(with_actions(log.take(np.sort(np.arange(200_000) % len(log))), like=0.3)).settings
    assert (many.validation_share, many.validation_requests) == (0.03, 600)


def test_counts_help_where_the_log_has_few_positives(log: Log) -> None:
    popular = log.author_id % np.uint64(2) == 0
    few = with_actions(log, like=0.1)
    few = replace(few, actions=few.actions & popular[:, None])
    assert plan(few).settings.counts_share == 0.8
    many = few.take(np.sort(np.arange(1_000_000) % len(log)))
    assert plan(many).settings.counts_share == 0


def test_counts_teach_more_where_users_meet_posts_again(log: Log) -> None:
    large = with_actions(log.take(np.sort(np.arange(60_000) % len(log))), like=0.2)
    large = replace(large, actions=large.actions & (large.author_id % np.uint64(2) == 0)[:, None])
    catalogue = plan(replace(large, post_id=large.post_id % np.uint64(3) + np.uint64(1)))
    assert catalogue.settings.counts_share > plan(large).settings.counts_share + 0.2
    assert "users meet the same posts again" in "".join(catalogue.lines())
    assert "users meet the same posts again" not in "".join(plan(large).lines())


def test_counts_alone_teach_where_nothing_stays_popular(log: Log) -> None:
    """Every day other authors are liked."""
    large = log.take(np.sort(np.arange(60_000) % len(log)))
    in_fashion = (large.author_id + large.impression_ts.astype(np.uint64) // np.uint64(DAY)) % np.uint64(5) == 0
    made = plan(replace(large, actions=in_fashion[:, None], action_names=("like",)))
    assert made.settings.counts_share == 0.9
    assert "no post or author stays popular" in decided(made, "times like")
    always = large.author_id % np.uint64(5) == 0
    lasting = plan(replace(large, actions=always[:, None], action_names=("like",)))
    assert "stays popular" not in "".join(lasting.lines())


def test_a_log_of_too_few_positives_or_users_is_warned_of(log: Log) -> None:
    assert not any("TOO FEW" in line for line in plan(log).lines())
    for positives, is_warned in ((150, True), (260, False)):
        lines = plan(with_actions(log, like=positives / (0.8 * len(log)))).lines()
        assert any(re.search(r"only 1\d\d times like to train on +→ TOO FEW", line) for line in lines) == is_warned
    four = log.take(np.isin(log.user_id, np.unique(log.user_id)[:4]))
    assert "only 4 users to train on" in decided(plan(four), "TOO FEW")


def test_nobody_is_not_counted_among_the_users(log: Log) -> None:
    """Nor an unknown author among the authors."""
    four = np.unique(log.user_id)[:4]
    users = np.where(np.isin(log.user_id, four), log.user_id, 0).astype(np.uint64)
    authors = np.where(log.author_id == log.author_id[0], log.author_id, 0).astype(np.uint64)
    made = plan(replace(log, user_id=users, author_id=authors))
    assert "only 4 users to train on" in decided(made, "TOO FEW")
    assert "to train on: 4 users" in decided(made, "tables of")
    assert decided(made, "tables of").count(" 1 authors") == 1
    cut = int(0.8 * len(log))
    strangers = np.where((np.arange(len(log)) >= cut) & (users != 0), users + 7_000, users).astype(np.uint64)
    assert new_shares(replace(log, user_id=strangers))["user"] == 1


def test_the_plan_says_how_many_positives_it_validates_on(log: Log) -> None:
    made = plan(with_actions(log, like=0.1))
    assert re.search(r"\d+ times like in \d+ requests", decided(made, "validate on"))


def test_where_posts_are_known_their_likeness_is_learned(log: Log) -> None:
    few = plan(replace(log, post_id=log.post_id % np.uint64(40) + np.uint64(1)))
    assert few.config.right_anchored
    assert (few.settings.shared_events, few.settings.hidden_event_share) == (16, 0.2)
    new = plan(replace(log, post_id=np.arange(1, len(log) + 1, dtype=np.uint64)))
    assert not new.config.right_anchored
    rates = ("learning_rate", "batch_contexts", "weight_decay", "table_decay", "averaging", "attention_rate")
    assert all(getattr(new.settings, name) == getattr(TrainSettings(), name) for name in rates), "as the demo"


def test_what_is_given_replaces_what_was_chosen_and_is_printed(log: Log) -> None:
    given = {"hidden_post_share": 0.3, "history_length": 31, "post_rows": 4096, "epochs": 1.5}
    made = plan(log, overrides=given)
    assert (made.settings.hidden_post_share, made.settings.epochs) == (0.3, 1.5)
    assert (made.config.history_length, made.config.post_hashes.vocab_size) == (31, 4096)
    assert made.lines()[-1] == "given: hidden_post_share=0.3, history_length=31, post_rows=4096, epochs=1.5"
    with pytest.raises(ConfigError, match="history_length"):
        plan(log, overrides={"history_length": 0})


@pytest.mark.parametrize(
    ("shares", "weights"),
    [
        ({"favorite": 0.1, "click": 0.2, "not_interested": 0.03}, {"favorite": 1.0}),
        ({"click": 0.2, "add_to_cart": 0.05, "purchase": 0.01}, {"purchase": 1.0}),
        ({"returned": 0.1, "order_return": 0.1, "order": 0.1}, {"order": 1.0}),
        ({"click": 0.2, "share": 0.0}, {"click": 1.0}),
        ({"zapped": 0.2}, {"zapped": 1.0}),
        ({"zapped": 0.2, "zoomed": 0.1}, {}),
    ],
)
def test_the_score_is_for_the_surest_sign_that_a_post_was_wanted(
    shares: dict[str, float], weights: dict[str, float], log: Log
) -> None:
    found, choice = propose_score_weights(with_actions(log, **shares))
    assert found == weights
    assert "--score-weights" in choice.decided
    assert all(name in choice.seen for name in shares)


def test_a_log_of_xs_actions_is_scored_as_x_scores(log: Log) -> None:
    weights, choice = propose_score_weights(log)
    assert (weights["reply"], weights["report"]) == (5.0, -20.0)
    assert "X's weights" in choice.decided


def test_an_action_that_is_always_or_never_taken_is_told(log: Log) -> None:
    made = plan(with_actions(log, like=0.1, shown=1.0, hidden=0.0))
    line = decided(made, "always taken")
    assert "always taken: shown" in line
    assert "never taken: hidden" in line
    assert "2026-06-01 … 2026-06-" in line
    assert made.score_weights == {"like": 1.0}


def of_one(name: str) -> Callable[[Log], Log]:
    """The log with the rows of one request, or of one user."""
    return lambda log: log.take(getattr(log, name) == getattr(log, name)[0])


USELESS: dict[str, Callable[[Log], Log]] = {
    "only one request": of_one("request_id"),
    "only one user": of_one("user_id"),
    "only one time": lambda log: replace(log, impression_ts=np.full(len(log), 1_780_272_000)),
    "no action that was ever taken": lambda log: replace(log, actions=np.zeros_like(log.actions)),
    "no action that was ever not taken": lambda log: replace(log, actions=np.ones_like(log.actions)),
}


@pytest.mark.parametrize("reason", USELESS)
def test_a_log_that_teaches_nothing_is_refused_with_its_range(reason: str, log: Log) -> None:
    with pytest.raises(TableError, match=rf"^the log \(2026-06-.*\) holds {reason}[^\n]*$"):
        plan(USELESS[reason](log))


def test_a_useless_training_period_is_refused_with_its_range(log: Log) -> None:
    """The log as a whole would do."""
    times = np.unique(log.impression_ts)
    with pytest.raises(TableError, match=r"^the training period \(2026-06-01, Unix seconds .*\) holds only one "):
        plan(log, until_ts=int(times[1]))


def test_a_setting_that_does_not_exist_is_refused(log: Log) -> None:
    with pytest.raises(ValueError, match="there is no setting 'passes'"):
        plan(log, overrides={"passes": 3})
