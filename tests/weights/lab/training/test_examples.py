"""Examples are what serving would see: histories from before the request, padding that is marked, hidden ids as told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")

from model.synthetic import random_ranker
from weights.lab.training.examples import Examples, HiddenShares
from weights.lab.training.trainer import forward_shared
from weights.tables import TableError


def test_a_history_is_exactly_the_users_earlier_engagements(examples: Examples) -> None:
    log, checked = examples.log, 0
    for index in range(0, len(examples), 37):
        first = examples.starts[index]
        mine = (log.user_id == log.user_id[first]) & (log.impression_ts < log.impression_ts[first]) & log.actions.any(1)
        rows = np.flatnonzero(mine)[-examples.config.history_length :]
        context = examples.context(index)
        assert context.user_id == log.user_id[first]
        assert np.array_equal(context.post_ids, log.post_id[rows])
        assert np.array_equal(context.author_ids, log.author_id[rows])
        assert np.array_equal(context.actions, log.actions[rows])
        assert np.array_equal(context.dwell_seconds, log.dwell_seconds[rows])
        checked += len(rows)
    assert checked > 100


def test_hidden_ids_replace_the_stated_share_and_nothing_else(examples: Examples) -> None:
    groups = [np.array([index]) for index in range(200, 264)]
    plain, _, _ = examples.training_batch(groups, np.random.default_rng(1), HiddenShares(), 64)
    posts, _, _ = examples.training_batch(groups, np.random.default_rng(1), HiddenShares(posts=0.5), 64)
    authors, _, _ = examples.training_batch(groups, np.random.default_rng(1), HiddenShares(authors=0.5), 64)
    # two tables of 62 rows: a hidden post keeps both rows once in 62² times
    share = (plain.candidate_post_rows != posts.candidate_post_rows).any(-1).float().mean()
    assert 0.4 < share < 0.6
    share = (plain.history_author_rows != authors.history_author_rows).any(-1).float().mean()
    assert 0.2 < share < 0.6, "of the slots that hold an event"
    assert torch.equal(plain.candidate_author_rows, posts.candidate_author_rows)
    assert torch.equal(plain.candidate_post_rows, authors.candidate_post_rows)
    assert torch.equal(plain.history_actions, posts.history_actions)
    assert torch.equal(plain.user_rows, posts.user_rows)
    events, _, _ = examples.training_batch(groups, np.random.default_rng(1), HiddenShares(events=0.5), 64)
    there = plain.history_post_rows[..., 0] != 0
    assert 0.4 < (events.history_post_rows[..., 0] == 0)[there].float().mean() < 0.6
    assert torch.equal(plain.history_author_rows, events.history_author_rows), (
        "an event that is left out keeps its place"
    )


def test_groups_are_successive_requests_of_one_user_in_limits(examples: Examples) -> None:
    groups = examples.groups(np.arange(len(examples)), max_candidates=36, max_events=15)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(examples)))
    sizes = examples.stops - examples.starts
    for group in groups:
        assert len(set(examples.users[group].tolist())) == 1
        assert (np.diff(examples.times[group]) >= 0).all()
        assert len(group) == 1 or sizes[group].sum() <= 36
        assert examples.last[group[-1]] - examples.last[group[0]] <= 15
    assert max(map(len, groups)) == 3
    assert max(map(len, examples.groups(np.arange(len(examples)), 36, 0))) < 3, "events lie between most requests"


def test_requests_that_share_a_context_are_scored_as_each_alone(examples: Examples) -> None:
    ranker = random_ranker(examples.config, 1)
    groups = [group for group in examples.groups(np.arange(len(examples)), 36, 6) if len(group) > 1]
    whole = [g for g in groups if examples.last[g[-1]] - examples.first[g[-1]] <= examples.config.history_length][:20]
    batch, seen, labels = examples.training_batch(whole, np.random.default_rng(1), HiddenShares(), 36)
    shared = forward_shared(ranker, batch, seen)[0]
    alone = [ranker(examples.batch([index])[0])[0][0] for group in whole for index in group]
    torch.testing.assert_close(shared[labels.shown], torch.cat(alone), atol=2e-5, rtol=0)
    later = seen.amax(1, keepdim=True).expand_as(seen)
    assert (forward_shared(ranker, batch, later)[0] - shared)[labels.shown].abs().max() > 1e-3, "who sees later events"


@pytest.mark.parametrize(
    ("field", "reason"),
    [("actions", "19 actions, the architecture 2"), ("product_surfaces", "surface must be below 2")],
)
def test_a_log_that_does_not_fit_the_architecture_is_refused(field: str, reason: str, examples: Examples) -> None:
    with pytest.raises(TableError, match=reason):
        Examples(examples.log, replace(examples.config, **{field: 2}))
