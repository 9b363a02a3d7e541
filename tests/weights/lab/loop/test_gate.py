"""The checks of a night and of a model, at their bounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("duckdb")

from tests.weights.call import run
from tests.weights.lab.loop.nights import DAYS, Nights
from weights.lab.evaluate.metrics import Figure
from weights.lab.loop.gate import (
    GateSettings,
    Usual,
    bounds_table,
    check_labels,
    check_model,
    check_night,
)
from weights.lab.loop.judge import ActionQuality, Judgement, judge
from weights.lab.loop.night import Night
from weights.lab.training.examples import Examples

GOOD = Night(
    rankings=200, impressions=2000, positives=50, activity=0.7, expected_activity=1.0, returning_requests=100,
    empty_histories=50, timed_events=1000, early_events=50, delay_seconds=(1800.0, 2000.0),
)  # fmt: skip
"""A night at every bound."""
JUDGED = Judgement(
    requests=100, impressions=1000, users=50, users_with_both=40, order=(Figure(0.7, 0.68, 0.72), Figure(0.71, 0.69, 0.73)),
    lead=Figure(0.01, -0.005, 0.02), actions={"favorite": ActionQuality(400, (0.8, 0.809), (1.0, 1.19))}, unseen={},
)  # fmt: skip
"""A new model just within the bounds."""


def failed(night: Night = GOOD, usual: Usual | None = None) -> list[str]:
    return [check.name for check in check_night(night, usual or Usual(), GateSettings()) if not check.passed]


def test_a_night_at_every_bound_passes() -> None:
    assert failed() == []
    assert failed(usual=Usual([1.0] * 7)) == []


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("enough", {"rankings": 199}),
        ("enough", {"positives": 49}),
        ("clock", {"early_events": 51}),
        ("clock", {"delay_seconds": (1801.0, 2000.0)}),
        ("histories", {"empty_histories": 51}),
        ("events", {"activity": 0.699}),
    ],
)
def test_a_night_beyond_a_bound_fails_by_name(name: str, changes: dict[str, Any]) -> None:
    assert failed(replace(GOOD, **changes)) == [name]


def test_of_too_few_rankings_nothing_else_is_said() -> None:
    assert failed(replace(GOOD, rankings=199, activity=0.0, early_events=1000)) == ["enough"]
    assert failed(replace(GOOD, impressions=0, activity=0.0), Usual([1.0] * 7)) == ["enough"], "nothing was shown"


def test_activity_is_compared_with_the_last_seven_nights() -> None:
    assert failed(usual=Usual([5.0] * 10 + [1.0] * 7)) == []
    assert failed(usual=Usual([1.0] * 10 + [1.01] * 7)) == ["events"]


def test_labels_that_nobody_can_order_fail() -> None:
    """The one trained on the night may order what the serving model cannot: tastes have changed, and nothing was shuffled."""
    bounds, usual = GateSettings(), Usual(orders=[0.2] * 7)
    shuffled = replace(JUDGED, order=(Figure(0.52, 0.5, 0.55), Figure(0.54, 0.51, 0.57)))
    changed = replace(JUDGED, order=(Figure(0.50, 0.48, 0.52), Figure(0.57, 0.55, 0.59)))
    assert not check_labels(shuffled, usual, bounds).passed
    assert check_labels(changed, usual, bounds).passed
    turned = replace(JUDGED, order=(Figure(0.42, 0.39, 0.45), Figure(0.51, 0.48, 0.54)))
    assert check_labels(turned, usual, bounds).passed, "an order that is surely wrong says something too"
    assert check_labels(JUDGED, Usual(), bounds).passed
    by_chance = replace(JUDGED, order=(Figure(0.55, 0.49, 0.61), Figure(0.54, 0.48, 0.60)))
    assert not check_labels(by_chance, Usual(), bounds).passed
    nobody = replace(JUDGED, order=(Figure(float("nan"), float("nan"), float("nan")),) * 2)
    assert not check_labels(nobody, usual, bounds).passed


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("order", {"lead": Figure(0.01, -0.0051, 0.02)}),
        ("order", {"lead": Figure(0.01, float("nan"), float("nan"))}),
        ("quality", {"actions": {"favorite": ActionQuality(400, (0.8, 0.811), (1.0, 1.0))}}),
        ("quality", {"actions": {"favorite": ActionQuality(400, (0.8, 0.8), (1.0, 1.21))}}),
        ("quality", {"actions": {"favorite": ActionQuality(400, (0.8, 0.8), (1.0, 0.79))}}),
        ("", {"actions": {"favorite": ActionQuality(64, (0.8, 0.8), (1.0, 1.34))}}),
        ("", {"actions": {"favorite": ActionQuality(400, (0.8, 0.5), (2.0, 1.0))}}),
    ],
)
def test_a_worse_model_fails_by_name(name: str, changes: dict[str, Any]) -> None:
    assert [check.name for check in check_model(JUDGED, GateSettings()) if not check.passed] == []
    checks = check_model(replace(JUDGED, **changes), GateSettings())
    assert [check.name for check in checks if not check.passed] == [name] * bool(name)


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 3, 9, 10])
def test_fewer_than_ten_users_with_both_outcomes_fail(nights: Nights, count: int) -> None:
    """Only some of the users who are held out did something; both models know what that was."""
    log, until_ts = nights.log, nights.start_ts(DAYS - 1)
    is_held_out = log.impression_ts >= until_ts
    users = np.unique(log.user_id[is_held_out])
    assert len(users) > 20
    is_taken = np.isin(log.user_id, users[:count]) & (np.arange(len(log)) % 3 == 0)
    actions = np.where(is_held_out[:, None], is_taken[:, None], log.actions)
    examples = Examples(replace(log, actions=actions), nights.examples.config)
    requests = np.flatnonzero(examples.times >= until_ts)
    weights, right = np.ones(len(log.action_names), np.float32), actions[is_held_out].astype(np.float32)
    judged = judge(examples, requests, (right, right), weights, until_ts)
    assert (judged.users, judged.users_with_both) == (len(users), count)
    checks = [check_labels(judged, Usual(), GateSettings()), check_model(judged, GateSettings())[-1]]
    assert [check.passed for check in checks] == [count >= 10] * 2
    if count < 10:
        said = f"of {len(users)} held-out users, {count} have impressions worth more than nothing and others"
        assert all(check.sentence == f"{said}: too few to tell, a turn needs 10 or more" for check in checks)


@pytest.mark.slow
@pytest.mark.slow
def test_nobody_is_neither_a_new_nor_a_known_user(nights: Nights) -> None:
    """Half of the requests are of nobody, before and after; all users who are held out are new."""
    until_ts = nights.start_ts(2)
    is_nobody, is_held_out = nights.log.request_id % 2 > 0, nights.log.impression_ts >= until_ts
    users = np.where(is_nobody, 0, nights.log.user_id + 7_000 * is_held_out).astype(np.uint64)
    examples = Examples(replace(nights.log, user_id=users), nights.examples.config)
    requests = np.flatnonzero(examples.times >= until_ts)
    count, actions = int(is_held_out.sum()), len(nights.log.action_names)
    pair = np.random.default_rng(1).random((2, count, actions), np.float32)
    of_users = judge(examples, requests, (pair[0], pair[1]), np.ones(actions, np.float32), until_ts).unseen["user"]
    assert of_users.share == pytest.approx((~is_nobody)[is_held_out].mean())
    assert not np.isnan(of_users.order[0].value)
    assert np.isnan(of_users.order_of_others[0].value), "there are no others"


def test_the_page_and_the_command_list_every_bound() -> None:
    page, (code, said) = Path("docs/loop.md").read_text(), run("refresh", "--bounds")
    assert code == 0
    for name, default, meaning in bounds_table():
        assert f"`{name}={default:g}`" in page, name
        assert name in said
        assert meaning.split(":")[0] in ("clock", "histories", "events", "enough", "labels", "quality", "order")
