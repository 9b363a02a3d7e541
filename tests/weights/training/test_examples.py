"""Examples are what serving would see: histories from before the request, padding that is marked, fresh ids as told."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")

from weights.training.examples import Examples, training_batch


def test_a_history_is_what_the_user_engaged_with_before_and_nothing_else(examples: Examples) -> None:
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


def test_labels_line_up_with_candidates_and_padding_is_not_shown(examples: Examples) -> None:
    rows = [examples.rows(0), examples.rows(5)[:7]]
    labels = examples.labels(rows)
    assert labels.shown.sum(1).tolist() == [len(rows[0]), 7]
    assert np.array_equal(labels.actions[1, :7].numpy(), examples.log.actions[rows[1]])
    assert labels.dwell.max() <= 1
    assert not labels.actions[1, 7:].any()


def test_fresh_ids_replace_the_stated_share_and_nothing_else(examples: Examples) -> None:
    indices = np.arange(200, 264)
    shares = {"fresh_user_share": 0.0, "fresh_post_share": 0.0, "max_candidates": 64}
    plain, _ = training_batch(examples, indices, np.random.default_rng(1), **shares)
    shares |= {"fresh_post_share": 0.5}
    mixed, _ = training_batch(examples, indices, np.random.default_rng(1), **shares)
    # two tables of 62 rows: a fresh post keeps both rows once in 62² times
    share = (plain.candidate_post_rows != mixed.candidate_post_rows).any(-1).float().mean()
    assert 0.4 < share < 0.6
    assert torch.equal(plain.candidate_author_rows, mixed.candidate_author_rows)
    assert torch.equal(plain.history_actions, mixed.history_actions)
    assert torch.equal(plain.user_rows, mixed.user_rows)
