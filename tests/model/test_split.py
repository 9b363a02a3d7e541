"""The split engine on a CPU: parity with the dense definition, and equal bits in every batch, order and state of the cache."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from model.dense import DenseEngine
from model.engine import EngineError, Item
from model.inputs import Candidates, Context, Scores
from model.selftest import same_bits
from model.split.engine import SplitEngine, default_capacity
from model.split.graphs import PlainRecorder
from model.split.kernels.contract import Step
from model.split.kernels.portable import PortableKernels
from model.split.row_check import rows_are_independent
from model.split.step import StepPlan, context_tiles, plan_steps, tile_slots
from model.tolerances import PARITY
from tests.model.builders import random_candidates, random_config, random_context, random_ranker

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
JANUARY: dict[str, Any] = {"has_dwell": False, "has_post_age": False, "continuous_actions": 0}


def make_engine(dtype: torch.dtype = torch.float32, *, cache_bytes: int = 2**24, **overrides: Any) -> SplitEngine:
    config = random_config(**overrides)
    return SplitEngine(random_ranker(config), "cpu", dtype, "shared", cache_bytes, capacity=512)


def item(engine: SplitEngine, history: int, candidates: int, seed: int = 0, **context: Any) -> Item:
    config = engine.config
    return Item(random_context(config, history, seed, **context), random_candidates(config, candidates, seed))


def picked(candidates: Candidates, order: Any) -> Candidates:
    columns = (candidates.post_ids, candidates.author_ids, candidates.surfaces, candidates.age_buckets)
    return Candidates(*(column[order] for column in columns))


def rows(scores: Scores, order: Any) -> Scores:
    return Scores(scores.logits[order], scores.probabilities[order], scores.continuous[order])


@DTYPES
@pytest.mark.parametrize("mode", ["shared", "sequential"])
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"context_attention": "bidirectional", "query_heads": 6, "kv_heads": 1},
        {"right_anchored": True, "head_width": 32, **JANUARY},
        {"layers": 1, "width": 48, "head_width": 24, "kv_heads": 4, "history_length": 150},
    ],
    ids=["causal", "bidirectional", "right-anchored-january", "one-layer"],
)
def test_scores_equal_the_dense_definition(overrides: dict[str, Any], mode: Any, dtype: torch.dtype) -> None:
    config = random_config(**overrides)
    ranker = random_ranker(config)
    engine = SplitEngine(ranker, "cpu", dtype, mode, 0, capacity=512)
    full = config.history_length
    sizes = [(0, 1), (1, 63), (full, 65), (full - 1, 100), (0, 3), (5, 30)]
    items = [item(engine, history, candidates, seed) for seed, (history, candidates) in enumerate(sizes)]
    items[4] = item(engine, 0, 3, user_id=0)  # no user and no history: a candidate sees itself alone
    items[5] = item(engine, 5, 30, user_id=0)
    items[2].context.post_ids[[3, full - 1]] = 0
    expected = DenseEngine(ranker, torch.float32, mode).forward(items)
    for ours, theirs in zip(engine.forward(items), expected, strict=True):
        assert np.abs(ours.scores.logits - theirs.scores.logits).max() < PARITY[dtype].logits
        assert np.abs(ours.scores.continuous - theirs.scores.continuous).max(initial=0) < PARITY[dtype].probabilities
        assert ours.scores.is_finite()
        assert ours.cache == "miss"


@DTYPES
def test_bits_do_not_depend_on_candidates_batch_or_cache(dtype: torch.dtype) -> None:
    engine = make_engine(dtype)
    asked = item(engine, 30, 100)
    others = [item(engine, 3, 63, seed=1), item(engine, 37, 300, seed=2), item(engine, 0, 1, seed=3)]
    alone = engine.forward([asked])[0]
    order = np.random.default_rng(0).permutation(100)
    for position in range(4):
        batch = [*others[:position], asked, *others[position:]]
        outcome = engine.forward(batch)[position]
        assert outcome.cache == "hit"
        assert same_bits(outcome.scores, alone.scores)
    shuffled = engine.forward([Item(asked.context, picked(asked.candidates, order))])[0]
    assert same_bits(shuffled.scores, rows(alone.scores, order))
    one = engine.forward([Item(asked.context, picked(asked.candidates, [77]))])[0]
    assert same_bits(one.scores, rows(alone.scores, [77]))
    changed_list = random_candidates(engine.config, 100, seed=9)
    changed_list.post_ids[41] = asked.candidates.post_ids[41]
    changed_list.author_ids[41] = asked.candidates.author_ids[41]
    changed_list.surfaces[41], changed_list.age_buckets[41] = (
        asked.candidates.surfaces[41],
        asked.candidates.age_buckets[41],
    )
    changed = engine.forward([Item(asked.context, changed_list)])[0]
    assert same_bits(rows(changed.scores, [41]), rows(alone.scores, [41]))
    assert not same_bits(rows(changed.scores, [40]), rows(alone.scores, [40]))
    fresh = SplitEngine(random_ranker(engine.config), "cpu", dtype, capacity=512).forward([*others, asked])[3]
    assert same_bits(fresh.scores, alone.scores)


@DTYPES
def test_a_grown_history_extends_its_prefix_with_the_same_bits(dtype: torch.dtype) -> None:
    engine = make_engine(dtype, history_length=200)
    whole = item(engine, 200, 65)
    whole.context.post_ids[[2, 150]] = 0
    expected = make_engine(dtype, history_length=200).forward([whole])[0]
    for known in (0, 1, 129, 199):
        context = whole.context
        columns = (context.post_ids, context.author_ids, context.actions, context.surfaces, context.dwell_seconds)
        beginning = Context(context.user_id, *(column[:known] for column in columns))
        engine = make_engine(dtype, history_length=200)
        engine.forward([Item(beginning, whole.candidates)])
        grown = engine.forward([item(engine, 9, 3, seed=4), whole])[1]
        assert grown.cache == "prefix"
        assert same_bits(grown.scores, expected.scores)
    for attention, anchored in (("bidirectional", False), ("causal", True)):
        engine = make_engine(dtype, history_length=200, context_attention=attention, right_anchored=anchored)
        engine.forward([Item(beginning, whole.candidates)])
        assert engine.forward([whole])[0].cache == "miss"


def test_chunks_of_a_request_use_one_state() -> None:
    engine = make_engine(cache_bytes=0)
    asked = item(engine, 20, 100)
    whole = engine.forward([asked])[0]
    first = engine.forward([Item(asked.context, asked.candidates.chunk(0, 1))])[0]
    assert first.cache == "miss"
    rest = engine.forward([Item(asked.context, asked.candidates.chunk(1, 100), first.state)])[0]
    assert same_bits(Scores.concatenate([first.scores, rest.scores]), whole.scores)


def test_equal_contexts_are_computed_once() -> None:
    engine = make_engine()
    context = item(engine, 30, 1).context
    lists = [random_candidates(engine.config, 10, seed) for seed in range(3)]
    engine.warm_up()
    outcomes = engine.forward([Item(context, candidates) for candidates in lists])
    assert [outcome.cache for outcome in outcomes] == ["miss", "hit", "hit"]
    assert len({id(outcome.state) for outcome in outcomes}) == 1
    assert engine.padding_ratio() == pytest.approx(1 - 61 / 64)  # 31 context rows once, 30 candidates
    assert engine.cache_stats().entries == 1


def test_closing_lets_go_of_everything() -> None:
    engine = make_engine()
    engine.forward([item(engine, 5, 5)])
    weights = weakref.ref(engine._trunk)
    engine.close()
    engine.close()
    assert weights() is None
    assert engine.cache_stats().bytes == 0


def test_random_compositions_change_no_bit() -> None:
    engine = make_engine(torch.float32, cache_bytes=100_000)
    generator = np.random.default_rng(3)
    requests = [
        item(engine, int(generator.integers(0, 38)), int(generator.integers(1, 90)), seed) for seed in range(12)
    ]
    expected = [engine.forward([request])[0].scores for request in requests]
    for _ in range(25):
        chosen = generator.choice(12, size=int(generator.integers(1, 7)))
        cuts = [sorted(generator.integers(0, len(requests[n].candidates), 2)) for n in chosen]
        items = [
            Item(requests[n].context, requests[n].candidates.chunk(start, stop + 1))
            for n, (start, stop) in zip(chosen, cuts, strict=True)
        ]
        for n, (start, stop), outcome in zip(chosen, cuts, engine.forward(items), strict=True):
            assert same_bits(outcome.scores, rows(expected[n], slice(start, stop + 1)))


class LeakyKernels(PortableKernels):
    """Products on as many rows as there are, and rows that reach into their neighbours: what warm-up must not let through."""

    def multiply(self, step: Step, x: Any, weight: Any, out: Any, rows: int, *, tail: bool = False) -> None:
        super().multiply(step, x, weight, out, rows, tail=tail)
        if weight.shape[1] == 32:
            out[1:rows] += 1e-6 * out[: rows - 1]


def test_warm_up_refuses_rows_that_influence_each_other() -> None:
    engine = make_engine()
    engine.warm_up()
    assert engine.info.notes["self_test"]["different_bits"] == 0
    assert engine.late_compilations() == 0
    engine = make_engine()
    engine._trunk.kernels = LeakyKernels(engine.config, engine._trunk.weights.rope)
    with pytest.raises(EngineError, match="isolation is broken"):
        engine.warm_up()


def test_a_product_of_another_size_is_caught() -> None:
    weight = torch.randn(176, 128)

    def reference(x: torch.Tensor) -> torch.Tensor:
        tiles = [torch.nn.functional.pad(tile, (0, 0, 0, 64 - len(tile))) for tile in x.split(64)]
        return torch.cat([tile @ weight for tile in tiles])[: len(x)]

    def split_inner_axis(x: torch.Tensor) -> torch.Tensor:
        return x[:, :88] @ weight[:88] + x[:, 88:] @ weight[88:]

    def ragged(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:1] @ weight, reference(x[1:])])

    assert rows_are_independent(reference, reference, 65, 176, weight)
    assert not rows_are_independent(split_inner_axis, reference, 64, 176, weight)
    assert not rows_are_independent(ragged, reference, 64, 176, weight), "one row alone takes another kernel in fp32"


@pytest.mark.parametrize("placement", ["device", "host"])
def test_padded_sizes_give_the_same_bits(placement: Any) -> None:
    config = random_config()
    ranker = random_ranker(config)
    padded = SplitEngine(ranker, capacity=320, recorder=PlainRecorder(), placement=placement, cache_bytes=2**20)
    padded.warm_up()
    notes = padded.info.notes
    assert notes["row_sizes"] == [64, 128, 192, 256, 320]
    assert notes["embedding_tables"] == placement
    assert notes["graphs"] == 10
    plain = SplitEngine(ranker, capacity=320)
    items = [
        item(plain, history, count, seed) for seed, (history, count) in enumerate([(37, 700), (0, 1), (5, 64), (9, 9)])
    ]
    items.append(item(plain, 0, 5, user_id=0))
    for _ in range(2):
        for ours, theirs in zip(padded.forward(items), plain.forward(items), strict=True):
            assert same_bits(ours.scores, theirs.scores)
    assert padded.late_compilations() == 0
    assert 0 < padded.padding_ratio() < 0.25


class OneBadSize(PortableKernels):
    """Another order of additions when a step has 128 rows."""

    bad_rows = 128

    def multiply(self, step: Step, x: Any, weight: Any, out: Any, rows: int, *, tail: bool = False) -> None:
        super().multiply(step, x, weight, out, rows, tail=tail)
        if rows == self.bad_rows:
            out[:rows] *= 1 + 2**-20


@pytest.mark.parametrize(("bad_rows", "kept"), [(128, [64, 192, 256, 320]), (320, [320])])
def test_sizes_with_other_bits_are_not_used(bad_rows: int, kept: list[int]) -> None:
    config = random_config()
    engine = SplitEngine(random_ranker(config), capacity=320, recorder=PlainRecorder())
    kernels = OneBadSize(config, engine._trunk.weights.rope)
    kernels.bad_rows = bad_rows
    engine._trunk.kernels = kernels
    engine.warm_up()
    assert engine.info.notes["row_sizes"] == kept
    assert sorted(kept + engine.info.notes["row_sizes_refused"]) == [64, 128, 192, 256, 320]
    asked = item(engine, 20, 40)
    alone, among = engine.forward([asked])[0], engine.forward([item(engine, 20, 90, seed=1), asked])[1]
    assert same_bits(alone.scores, among.scores)


class Forgetful(PlainRecorder):
    """Replays run something else than what was recorded."""

    def record(self, work: Any, step: Step) -> Any:
        replay = super().record(work, step)
        tail = work.func.__name__ == "tail"

        def disturbed(step: Step) -> None:
            replay(step)
            if tail:
                work.func.__self__.logits += 1e-6

        return disturbed


def test_replays_that_differ_from_the_plain_run_are_refused() -> None:
    engine = SplitEngine(random_ranker(random_config()), capacity=128, recorder=Forgetful())
    with pytest.raises(EngineError, match="when it is replayed"):
        engine.warm_up()


def test_steps_hold_their_limits_and_lose_no_candidate() -> None:
    engine = make_engine()
    capacity = 128
    generator = np.random.default_rng(7)
    works = []
    for number in range(40):
        count = int(generator.choice([1, 2, 63, 64, 65, 500]))
        asked = item(engine, int(generator.integers(0, 38)), count, number)
        work, state, _ = engine._context_of(asked, {})
        works.append((work, number, asked.candidates, state))
    plans = plan_steps(works, capacity)
    for plan in plans:
        assert plan.rows <= capacity
        assert plan.tiles <= tile_slots(capacity)
        assert plan.rows == sum(w.state.length for w in plan.contexts) + sum(len(w.candidates) for w in plan.candidates)
        assert plan.tiles >= sum(context_tiles(w.state.length - w.first_index) for w in plan.contexts)
    seen = [(w.item, w.start + i) for plan in plans for w in plan.candidates for i in range(len(w.candidates))]
    assert seen == list(itertools.chain(*([(n, i) for i in range(len(c))] for _, n, c, _ in works)))
    ready: set[int] = set()
    for plan in plans:
        ready |= {id(work.state) for work in plan.contexts}
        assert all(id(work.state) in ready for work in plan.candidates)


def test_a_checkpoint_that_the_kernels_cannot_hold_is_refused() -> None:
    with pytest.raises(EngineError, match="attention_cap"):
        make_engine(attention_cap=90.0)
    with pytest.raises(EngineError, match="capacity"):
        SplitEngine(random_ranker(random_config()), capacity=100)
    mixed = random_ranker(random_config())
    mixed.tables.user.data = mixed.tables.user.data.bfloat16()
    with pytest.raises(EngineError, match="tables"):
        SplitEngine(mixed)
    assert default_capacity(random_config(width=2048, widening=4.0, head_width=128)) == 2048
    assert not StepPlan().states()
