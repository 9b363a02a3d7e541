"""The torch engine's own ways: prefixes across tiles, padded sizes, planning, and what warm-up refuses; see `test_engines` too."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from model.engine import EngineError, Item
from model.selftest import same_bits
from model.split.engine import SplitEngine, default_capacity
from model.split.graphs import PlainRecorder
from model.split.kernels.contract import Step
from model.split.kernels.portable import PortableKernels
from model.split.row_check import rows_are_independent
from model.split.step import StepPlan, context_tiles, plan_steps, tile_slots
from tests.model.builders import random_candidates, random_config, random_context, random_ranker

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def make_engine(dtype: torch.dtype = torch.float32, *, cache_bytes: int = 2**24, **overrides: Any) -> SplitEngine:
    config = random_config(**overrides)
    return SplitEngine(random_ranker(config), "cpu", dtype, "shared", cache_bytes, capacity=512)


def item(engine: SplitEngine, history: int, candidates: int, seed: int = 0, **context: Any) -> Item:
    config = engine.config
    return Item(random_context(config, history, seed, **context), random_candidates(config, candidates, seed))


@DTYPES
def test_a_grown_history_extends_its_prefix_with_the_same_bits(dtype: torch.dtype) -> None:
    engine = make_engine(dtype, history_length=200)
    whole = item(engine, 200, 65)
    whole.context.post_ids[[2, 150]] = 0
    expected = make_engine(dtype, history_length=200).forward([whole])[0]
    for known in (0, 1, 129, 199):
        engine = make_engine(dtype, history_length=200)
        engine.forward([Item(whole.context.first(known), whole.candidates)])
        grown = engine.forward([item(engine, 9, 3, seed=4), whole])[1]
        assert grown.cache == "prefix"
        assert same_bits(grown.scores, expected.scores)


def test_a_context_that_several_items_share_is_one_set_of_rows() -> None:
    engine = make_engine()
    context = item(engine, 30, 1).context
    lists = [random_candidates(engine.config, 10, seed) for seed in range(3)]
    engine.warm_up()
    engine.forward([Item(context, candidates) for candidates in lists])
    assert engine.padding_ratio() == pytest.approx(1 - 61 / 64)  # 31 context rows once, 30 candidates


def test_closing_lets_go_of_everything() -> None:
    engine = make_engine()
    engine.forward([item(engine, 5, 5)])
    weights = weakref.ref(engine._trunk)
    engine.close()
    engine.close()
    assert weights() is None
    assert engine.cache_stats().bytes == 0


class LeakyKernels(PortableKernels):
    """Products on as many rows as there are, and rows that reach into their neighbours: what warm-up must not let through."""

    def multiply(self, step: Step, x: Any, weight: Any, out: Any, rows: int, *, tail: bool = False) -> None:
        super().multiply(step, x, weight, out, rows, tail=tail)
        if weight.shape[1] == 32:
            out[1:rows] += 1e-6 * out[: rows - 1]


def test_warm_up_refuses_rows_that_influence_each_other() -> None:
    engine = make_engine()
    engine.warm_up()
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
