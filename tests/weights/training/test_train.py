"""Training: examples are what serving would see, the run is deterministic and resumable, and upstream's saddle is left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")

from model.layers import rms_norm, rope_tables, rotate
from model.ranker import Ranker
from tests.weights.training.small_run import TRAINING, WORLD, small_config
from weights.training import initial
from weights.training.examples import Examples, training_batch
from weights.training.losses import continuous_loss, discrete_loss, total_loss
from weights.training.run import split, train
from weights.training.state import StateError, load_state, save_state
from weights.training.trainer import Look, Trainer
from weights.training.world.simulate import World, simulate


@pytest.fixture(scope="module")
def world() -> World:
    return simulate(WORLD)


@pytest.fixture(scope="module")
def examples(world: World) -> Examples:
    return Examples(world.log, small_config())


def trainer(examples: Examples, **changes: object) -> Trainer:
    return Trainer(examples, *split(len(examples), 20), replace(TRAINING, **changes))


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


def test_padding_adds_nothing_to_the_losses(examples: Examples) -> None:
    labels = examples.labels([examples.rows(0)[:5]])
    padded = examples.labels([examples.rows(0)[:5], examples.rows(1)])
    logits = torch.randn(2, 12, 19)
    continuous = torch.rand(2, 12, 1)
    alone = total_loss(logits[:1, :5], continuous[:1, :5], labels, 1.0)
    padded = replace(padded, shown=padded.shown & torch.tensor([[True], [False]]))
    assert torch.equal(alone, total_loss(logits, continuous, padded, 1.0))
    assert discrete_loss(logits[:1, :5], labels) != discrete_loss(logits[1:, :5], labels)
    unknown = replace(labels, dwelt=torch.zeros_like(labels.dwelt))
    assert continuous_loss(continuous[:1, :5], unknown) == 0


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


def test_upstreams_initial_values_score_everything_alike_and_hold_the_trunk_on_a_saddle(examples: Examples) -> None:
    run = trainer(examples)
    run.advance()  # leaves the saddle after its step, so the control below starts again from the initial values
    ranker = Ranker(small_config())
    initial.upstream(ranker, torch.Generator().manual_seed(1))
    optimizer = torch.optim.Adam(ranker.parameters(), lr=0.01)
    trunk = {f"{name}" for name, _ in ranker.trunk.named_parameters()}
    for step in range(5):
        batch, labels = training_batch(
            examples, np.arange(100, 116), np.random.default_rng(step),
            fresh_user_share=0.0, fresh_post_share=0.0, max_candidates=64,
        )  # fmt: skip
        logits, continuous = ranker(batch)
        if step == 0:
            assert not logits.any()
        optimizer.zero_grad()
        total_loss(logits, continuous, labels, 1.0).backward()
        optimizer.step()
        assert set(initial.stuck(ranker.trunk)) == trunk, "without help no step moves the trunk"
    assert ranker.heads.norm.any()
    assert not set(initial.stuck(run.ranker.trunk)) & {name for name in trunk if "post_norm" not in name}


def test_leaving_the_saddle_changes_no_score_bit_and_opens_every_gradient(examples: Examples) -> None:
    ranker = Ranker(small_config())
    generator = torch.Generator().manual_seed(2)
    initial.upstream(ranker, generator)
    with torch.no_grad():
        ranker.heads.norm.fill_(0.3)
    batch, labels = training_batch(
        examples, np.arange(100, 116), np.random.default_rng(0),
        fresh_user_share=0.0, fresh_post_share=0.0, max_candidates=64,
    )  # fmt: skip
    before = ranker(batch)[0]
    initial.leave_saddle(ranker, generator)
    after, continuous = ranker(batch)
    assert before.any()
    assert torch.equal(before, after)
    optimizer = torch.optim.Adam(ranker.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        logits, continuous = ranker(batch)
        total_loss(logits, continuous, labels, 1.0).backward()
        optimizer.step()
    assert initial.stuck(ranker) == []


def test_a_candidate_starts_by_looking_at_events_of_its_own_author() -> None:
    config = replace(small_config(), width=64, head_width=32, history_length=63)
    ranker = Ranker(config)
    generator = torch.Generator().manual_seed(5)
    initial.upstream(ranker, generator)
    initial.leave_saddle(ranker, generator)
    rows = torch.arange(1, 41).reshape(20, 2)
    none = torch.zeros(20, dtype=torch.int64)
    candidates = ranker.tokens.candidate(ranker.tables, none[:, None].expand(-1, 2), rows, none, none)
    seconds, actions = torch.zeros(20), torch.eye(20, 19)
    events = ranker.tokens.history(ranker.tables, none[:, None].expand(-1, 2), rows, actions, none, seconds)
    layer = ranker.trunk.layers[0]

    def heads(tokens: torch.Tensor, weight: torch.Tensor, position: int) -> torch.Tensor:
        first = (rms_norm(tokens, layer.attention_norm, config.norm_epsilon) @ weight)[:, : config.head_width]
        tables = rope_tables(torch.full((20,), position), config.head_width, config.rope_base)
        return rotate(first[:, None], *tables)[:, 0]

    for event in (1, config.history_length):  # the oldest event as well as the newest
        queries = heads(candidates, layer.query, config.history_length + 1)
        logits = queries @ heads(events, layer.key, event).T * config.attention_multiplier
        own = logits.diagonal().mean()
        other = (logits.sum() - logits.diagonal().sum()) / (20 * 19)
        assert own > other + 2


def test_training_from_upstreams_initial_values_learns(world: World) -> None:
    looks: list[Look] = []
    train(world.log, small_config(), replace(TRAINING, epochs=4), report=looks.append)
    first = next(look for look in looks if look.validation == look.validation)
    assert looks[-1].best < first.validation * 0.97
    assert looks[-1].step == looks[-1].steps


def test_the_same_run_twice_gives_the_same_bits_and_another_seed_does_not(world: World) -> None:
    states = [
        train(world.log, small_config(), replace(TRAINING, epochs=1, seed=seed)).state_dict() for seed in (1, 1, 2)
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(examples: Examples, tmp_path: Path) -> None:
    whole = trainer(examples, epochs=1)
    whole.run(lambda look: None, lambda current: None)
    part = trainer(examples, epochs=1)
    for _ in range(20):
        part.advance()
    part.look()
    save_state(part, tmp_path)
    rest = trainer(examples, epochs=1)
    load_state(rest, tmp_path)
    assert rest.step == 20
    rest.run(lambda look: None, lambda current: None)
    expected, got = whole.ranker.state_dict(), rest.ranker.state_dict()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    # control: without the moments of the optimiser the run ends elsewhere
    forgetful = trainer(examples, epochs=1)
    load_state(forgetful, tmp_path)
    forgetful.optimizer.state.clear()
    forgetful.run(lambda look: None, lambda current: None)
    assert not all(torch.equal(expected[name], forgetful.ranker.state_dict()[name]) for name in expected)


def test_a_state_of_another_run_is_refused(examples: Examples, tmp_path: Path) -> None:
    run = trainer(examples)
    run.advance()
    run.look()
    save_state(run, tmp_path)
    with pytest.raises(StateError, match="settings"):
        load_state(trainer(examples, seed=9), tmp_path)
    with pytest.raises(StateError, match="cannot be read"):
        load_state(run, tmp_path / "absent")


def test_the_run_stops_when_validation_stops_improving(examples: Examples) -> None:
    run = trainer(examples, epochs=50, evaluate_every=2, patience=3, learning_rate=0.0)
    run.run(lambda look: None, lambda current: None)
    assert run.step == 2 * (1 + 3)
    assert run.step < run.steps
