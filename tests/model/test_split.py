"""The torch engine's own ways: prefixes across tiles, padded sizes, planning, and what warm-up refuses; see `test_engines` too."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from app.settings import Cache
from model.config import HashSpec
from model.create import cache_budget
from model.dense import DenseEngine
from model.engine import EngineError, EngineInfo, Item
from model.selftest import same_bits
from model.split.buckets import recording_order, row_sizes
from model.split.engine import SplitEngine, default_capacity
from model.split.graphs import CudaRecorder, PlainRecorder, no_garbage
from model.split.kernels.contract import Step, Tables
from model.split.kernels.portable import PortableKernels, rows_are_independent
from model.split.step import (
    CANDIDATES,
    FIRST_USER,
    ROWS,
    ContextState,
    ContextWork,
    StepPlan,
    context_tiles,
    host_arrays,
    plan_steps,
    step_bytes,
    tile_slots,
    used_bytes,
)
from model.split.tables import HostTables, default_placement
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


def test_a_warm_up_checks_the_products_with_every_weight() -> None:
    engine = make_engine()
    engine.warm_up()
    weights = engine._trunk.weights
    names = ("qkv", "query", "key_value", "output", "gate_value", "ffn_output")
    linear = [weights.heads, *(getattr(layer, name) for layer in weights.layers for name in names)]
    checked = engine._kernels.row_sizes  # type: ignore[attr-defined]
    assert checked.keys() == {tuple(weight.shape) for weight in linear if weight is not None}


@pytest.mark.parametrize("head_width", [6, 10])
def test_narrow_heads_in_odd_groups_are_isolated_too(head_width: int) -> None:
    engine = make_engine(query_heads=3, kv_heads=1, head_width=head_width)
    engine.warm_up()  # refuses where a bit depends on the batch
    assert engine.info.notes["self_test"]["different_bits"] == 0


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


def test_layers_between_the_first_and_the_last_are_their_own() -> None:
    """With two layers, the one after the first is also the one before it."""
    engine = make_engine(layers=4)
    asked = [item(engine, 20, 9)]
    [ours], [plain] = (
        each.forward(asked) for each in (engine, DenseEngine(random_ranker(engine.config), torch.float32))
    )
    np.testing.assert_allclose(ours.scores.logits, plain.scores.logits, atol=1e-4)


def test_an_engine_is_closed_on_a_device_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        asked.append(True)
        raise RuntimeError("CUDA error: device-side assert triggered")

    asked: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lost)
    engine = make_engine()
    engine._device = torch.device("cuda")
    engine.close()
    assert asked


def test_a_device_that_is_lost_in_a_forward_is_said_to_need_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(plans: Any) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    engine = make_engine()
    monkeypatch.setattr(engine._runner, "run", lost)
    with pytest.raises(EngineError, match="the device failed: CUDA error") as raised:
        engine.forward([item(engine, 3, 2)])
    assert raised.value.sticky


def test_what_lay_in_memory_before_is_in_no_score() -> None:
    engine = make_engine()
    asked = [item(engine, history, 9, history) for history in (0, 20, 37)]
    expected = engine.forward(asked)
    torch.use_deterministic_algorithms(True, warn_only=True)  # new tensors are full of NaN
    try:
        assert torch.empty(1).isnan()
        found = make_engine().forward(asked)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(same_bits(ours.scores, theirs.scores) for ours, theirs in zip(found, expected, strict=True))


class LeakyKernels(PortableKernels):
    """Products on as many rows as there are, and rows that reach into their neighbours: what warm-up must not let through."""

    def multiply(self, step: Step, x: Any, weight: Any, out: Any) -> None:
        super().multiply(step, x, weight, out)
        if weight.shape[1] == 32:
            out[1 : step.rows] += 1e-6 * out[: step.rows - 1]


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
    assert notes["graphs"] == 15, "a body, a tail and both in one of each size"
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


def test_what_is_copied_to_the_device_is_what_the_step_uses() -> None:
    config = random_config()
    engine = SplitEngine(random_ranker(config), capacity=320, recorder=PlainRecorder(), cache_bytes=2**20)
    engine.warm_up()
    runner: Any = engine._runner
    cold = [item(engine, 5, 3), item(engine, 0, 2, 1), item(engine, 9, 70, 2)]
    cold[0].context.post_ids[1] = 0
    expected = engine.forward(cold)
    engine._cache.clear()
    for rows, history, tiles in ((75 + 13 + 3, 13, 4 + 2 + 3), (75, 0, 4)):  # the second time contexts are cached
        runner._arrived.zero_()
        for staged in runner._staging:
            staged.fill_(1)
        for ours, theirs in zip(engine.forward(cold), expected, strict=True):
            assert same_bits(ours.scores, theirs.scores)
        used = 32 * tiles + 32 + 32 * rows + 4 * (config.actions + 1) * history
        assert sum(part.stop - part.start for part in used_bytes(runner._host[0], config, 320)) == used
        assert used / 3 < int((runner._arrived != 0).sum()) <= used < len(runner._arrived) / 2


class OneBadSize(PortableKernels):
    """Another order of additions when a step has 128 rows."""

    bad_rows = 128

    def multiply(self, step: Step, x: Any, weight: Any, out: Any) -> None:
        super().multiply(step, x, weight, out)
        if step.rows == self.bad_rows:
            out[: step.rows] *= 1 + 2**-20


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


@DTYPES
def test_engines_that_chose_other_products_give_equal_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a timing decides in one process, it may decide otherwise in another: every choice passed the same check."""
    engine = make_engine(dtype)
    engine.warm_up()
    kernels: Any = engine._kernels
    fast = kernels.row_sizes
    slow = {shape: sizes[-1:] for shape, sizes in fast.items()}
    assert fast != slow, "there must be a choice"

    multiplied, mm = set(), torch.mm
    monkeypatch.setattr(torch, "mm", lambda x, *given, **to: multiplied.add(len(x)) or mm(x, *given, **to))

    def scores(sizes: Any, skew: float = 0.0) -> list[Any]:
        multiplied.clear()
        kernels.row_sizes = sizes
        engine._trunk.weights.heads[0, 0] *= 1 + skew
        engine._cache.clear()
        return [outcome.scores for outcome in engine.forward([item(engine, 30, 400), item(engine, 3, 65, seed=1)])]

    expected = scores(fast)
    assert max(multiplied) > 64
    assert all(map(same_bits, scores(slow), expected))
    assert multiplied == {64}
    assert not any(map(same_bits, scores(slow, 1e-6), expected)), "one weight in its last bits would be seen"


def test_a_step_of_a_common_size_is_hardly_padded() -> None:
    assert row_sizes(2048) == list(range(64, 2049, 64)), "seed with 1537 rows takes 1600"


class Forgetful(PlainRecorder):
    """Replays run something else than what was recorded."""

    disturbs = "tail"

    def record(self, work: Any, step: Step) -> Any:
        replay = super().record(work, step)
        tail = work.__name__ == self.disturbs

        def disturbed(step: Step) -> None:
            replay(step)
            if tail:
                work.__self__.logits += 1e-6

        return disturbed


@pytest.mark.parametrize("disturbs", ["tail", "whole"])
def test_replays_that_differ_from_the_plain_run_are_refused(disturbs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forgetful, "disturbs", disturbs)
    engine = SplitEngine(random_ranker(random_config()), capacity=128, recorder=Forgetful())
    with pytest.raises(EngineError, match="when it is replayed"):
        engine.warm_up()


class Counting(PlainRecorder):
    """Notes what is replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.replayed: list[tuple[str, int]] = []

    def record(self, work: Any, step: Step) -> Any:
        replay = super().record(work, step)
        return lambda step: (self.replayed.append((work.__name__, step.rows)), replay(step))


def test_a_step_whose_contexts_are_known_is_one_recording() -> None:
    recorder = Counting()
    engine = SplitEngine(random_ranker(random_config()), capacity=128, recorder=recorder, cache_bytes=2**20)
    engine.warm_up()
    recorder.replayed.clear()
    for _ in range(2):
        engine.forward([item(engine, 20, 40)])
    assert recorder.replayed == [("whole", 64)] * 2, "cold 61 rows and 40, then 40 alone"
    recorder.replayed.clear()
    engine.forward([item(engine, 30, 60, seed=1)])
    assert recorder.replayed == [("body", 128), ("tail", 64)]


def test_a_host_buffer_is_written_again_only_after_its_step_has_ended() -> None:
    said: list[str] = []
    engine = SplitEngine(random_ranker(random_config()), capacity=128, recorder=PlainRecorder())
    runner: Any = engine._runner
    prepare, numbers = runner._source.prepare, itertools.count()

    def mark() -> Any:
        number = next(numbers)
        return lambda: said.append(f"{number} has ended")

    runner._recorder.mark = mark
    runner._source.prepare = lambda host, slot: (said.append(f"in {slot}"), prepare(host, slot))
    engine.forward([item(engine, 20, 300)])
    assert said == ["in 0", "in 1", "0 has ended", "in 0", "1 has ended", "2 has ended"]


class Crowded(PlainRecorder):
    """A device whose memory is used up after some recordings: it says so before, or at the next one."""

    def __init__(self, recordings: int, *, says_so: bool) -> None:
        super().__init__()
        self.recordings = recordings
        self.says_so = says_so

    def has_room(self) -> bool:
        return not self.says_so or self.recorded < self.recordings

    def record(self, work: Any, step: Step) -> Any:
        assert not gc.isenabled(), "a collection may free what a recording needs"
        if self.recorded >= self.recordings:
            assert not (self.says_so and self.recorded), "it had said that there is no room"
            raise torch.OutOfMemoryError("planted")
        return super().record(work, step)


@pytest.mark.parametrize("says_so", [True, False])
def test_recordings_stop_where_memory_does_and_every_step_is_still_served(says_so: bool) -> None:
    config = random_config()
    engine = SplitEngine(random_ranker(config), capacity=512, recorder=Crowded(7 + 2 * says_so, says_so=says_so))
    engine.warm_up()
    assert gc.isenabled()
    runner: Any = engine._runner
    assert sorted(runner._bodies) == [128, 256, 512], "a body whose tail had no room is not dropped alone"
    kept = [128, 256, 512] if says_so else [256, 512]
    assert engine.info.notes["row_sizes"] == kept
    assert engine.info.notes["row_sizes_without_room"] == [size for size in range(64, 513, 64) if size not in kept]
    plain = SplitEngine(random_ranker(config), capacity=512)
    for count in (1, 200, 700):
        asked = item(engine, 9, count)
        assert same_bits(engine.forward([asked])[0].scores, plain.forward([asked])[0].scores)
    engine = SplitEngine(random_ranker(config), capacity=512, recorder=Crowded(0, says_so=says_so))
    with pytest.raises(torch.OutOfMemoryError):
        engine.warm_up()


def test_garbage_is_collected_before_recordings_and_not_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: said.append("collected"))
    with no_garbage():
        assert said == ["collected"]
        with no_garbage():
            pass
        assert not gc.isenabled(), "who came in without leaves without"
    assert gc.isenabled()


class Small:
    """Memory for so many contexts at a time, those of the cache included; stands in for `SplitEngine._allocate`."""

    def __init__(self, engine: SplitEngine, contexts: int) -> None:
        self.contexts, self.held = contexts, weakref.WeakSet[Any]()
        self.allocate = engine._allocate
        engine._allocate = self  # type: ignore[method-assign, assignment]

    def __call__(self, *arguments: Any) -> Any:
        if len(self.held) == self.contexts:
            raise torch.OutOfMemoryError("planted")
        state = self.allocate(*arguments)
        self.held.add(state.keys_values)
        return state


def test_a_batch_too_large_for_memory_is_tried_without_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    items = [item(engine, 5, 3, seed) for seed in range(6)]
    expected = engine.forward(items)
    engine = make_engine()
    Small(engine, 6)
    engine.forward([item(engine, 5, 3, 9)])
    said: list[str] = []
    engine._stream = SimpleNamespace(synchronize=lambda: said.append("waited"))  # type: ignore[assignment]
    monkeypatch.setattr(engine, "_on_device", nullcontext)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: said.append("emptied"))
    for ours, theirs in zip(engine.forward(items), expected, strict=True):
        assert same_bits(ours.scores, theirs.scores)
    assert said == ["waited", "emptied"], "host buffers may still be read by what was queued"
    Small(engine, 1)
    with pytest.raises(EngineError, match="out of memory"):
        engine.forward([item(engine, 5, 3, seed) for seed in range(20, 26)])


def test_many_requests_of_one_candidate_take_a_small_step() -> None:
    assert next(size for size in row_sizes(2048) if size >= 64 and tile_slots(size) >= 64) == 384
    assert all(tile_slots(size) >= size // 64 + 3 for size in row_sizes(2**14)), "one request always fits"


def test_steps_hold_their_limits_and_lose_no_candidate() -> None:
    engine = make_engine()
    capacity = 128
    generator = np.random.default_rng(7)
    works = []
    for number in range(40):
        count = int(generator.choice([1, 2, 63, 64, 65, 500]))
        asked = item(engine, int(generator.integers(0, 38)), count, number)
        work, (state, *_) = engine._context_of(asked, {})
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


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        ([(64, 0), (64, 0)], [([64, 64], [])]),
        ([(64, 0), (65, 0)], [([64], []), ([65], [])]),
        ([(1, 0)] * 11, [([1] * 10, []), ([1], [])]),
        ([(1, 200)], [([1], [64]), ([], [128]), ([], [8])]),
        ([(60, 68)], [([60], [68])]),
        ([(60, 69)], [([60], [64]), ([], [5])]),
        ([(60, 128)], [([60], [64]), ([], [64])]),
        ([(0, 1)] * 21, [([], [1] * 20), ([], [1])]),
        ([(0, 64), (0, 64), (0, 1)], [([], [64, 64]), ([], [1])]),
        ([(0, 0)], []),
    ],
)
def test_a_step_is_filled_to_its_limits(asked: Any, steps: Any) -> None:
    """New rows of a context and candidates, in steps of 128 rows and 20 tiles; of each context 7 rows are known."""
    config, works = random_config(), []
    for number, (rows, count) in enumerate(asked):
        state = ContextState(torch.empty(1), 7 + rows, 7)
        work = ContextWork(random_context(config, 0), state, 7, 7) if rows else None
        works.append((work, number, random_candidates(config, 300).chunk(0, count), state))
    plans = plan_steps(works, 128)
    found = [
        (
            [work.state.length - work.first_index for work in plan.contexts],
            [len(work.candidates) for work in plan.candidates],
        )
        for plan in plans
    ]
    assert found == steps


def test_what_a_device_holds_is_decided_by_its_size_not_by_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reload finds the old version's tables and cache there, and must decide as the start did."""
    device = torch.device("cuda", 0)
    for free in (80, 1):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free * 2**30, 80 * 2**30))
        assert default_placement(26 * 2**30, device) == "device"
        assert default_placement(27 * 2**30, device) == "host"
        assert cache_budget(None, device) == 10 * 2**30
    assert default_placement(2**60, torch.device("cpu")) == "device"
    assert cache_budget(7, device) == 7
    assert cache_budget(None, torch.device("cpu")) == Cache().host_bytes
    assert SplitEngine(random_ranker(random_config()), cache_bytes=123).info.notes["cache_bytes"] == 123


def test_a_checkpoint_that_the_kernels_cannot_hold_is_refused() -> None:
    make_engine(attention_cap=80.0)
    with pytest.raises(EngineError, match="attention_cap"):
        make_engine(attention_cap=80.5)
    with pytest.raises(EngineError, match="capacity"):
        SplitEngine(random_ranker(random_config()), capacity=100)
    SplitEngine(random_ranker(random_config(history_length=63)), capacity=64)
    with pytest.raises(EngineError, match="hold a whole context"):
        SplitEngine(random_ranker(random_config(history_length=64)), capacity=64)
    mixed = random_ranker(random_config())
    mixed.tables.user.data = mixed.tables.user.data.bfloat16()
    with pytest.raises(EngineError, match="tables"):
        SplitEngine(mixed)
    assert default_capacity(random_config(width=2048, widening=4.0, head_width=128)) == 2048
    assert not StepPlan().states()


def test_nothing_waits_for_a_copy_and_a_rehearsal_does_the_work_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, copy = [], torch.Tensor.copy_

    def watched(self: Any, source: Any, **options: Any) -> Any:
        caller = Path(sys._getframe(1).f_code.co_filename).name
        copies.extend([options] if caller in ("buckets.py", "tables.py") else [])
        return copy(self, source, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", watched)
    config = random_config()
    engine, host = (
        SplitEngine(random_ranker(config), capacity=320, recorder=PlainRecorder(), placement=placement)
        for placement in ("device", "host")
    )
    asked = [item(engine, 20, 40), item(engine, 9, 7, 1)]
    entered: list[bool] = []
    monkeypatch.setattr(engine, "_on_device", lambda: entered.append(True) or nullcontext())
    again = engine.rehearse(asked)
    assert entered, "copies are queued on the engine's stream"
    runner: Any = engine._runner
    runner._outputs[0].fill_(torch.nan)
    again()
    rehearsed = runner._outputs[0].clone()
    for other in (engine, host):
        logits = np.concatenate([outcome.scores.logits for outcome in other.forward(asked)])
        assert np.array_equal(rehearsed[:47, :7], logits)
    assert copies == [{"non_blocking": True}] * len(copies)
    assert len(copies) == 2 * 3 + 3 + 2, "steps, outputs, rows of tables and their numbers"
    with pytest.raises(EngineError, match="on the device"):
        host.rehearse(asked)


def test_what_a_device_copies_is_pinned_and_of_the_kernels_types(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros, made = torch.zeros, []

    def noted(*shape: Any, **options: Any) -> Any:
        made.append((str(options["dtype"])[6:], str(options.get("device", options.get("pin_memory")))))
        return zeros(*shape, dtype=options["dtype"])

    monkeypatch.setattr(torch, "zeros", noted)
    config = random_config()
    tables = Tables(*(torch.empty(3, config.width, dtype=torch.bfloat16) for _ in range(3)))
    for device, pinned in ((CUDA, "True"), (torch.device("cpu"), "False")):
        made.clear()
        HostTables(config, tables, device, 64)
        kept = [("bfloat16", pinned)] * 2 + [("int32", pinned)] * 2
        assert made == [*kept, ("bfloat16", str(device)), ("int32", str(device))]
    made.clear()
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 7)
    CudaRecorder(SimpleNamespace(device=CUDA)).pinned(3, dtype=torch.uint8)  # type: ignore[arg-type]
    assert made == [("uint8", "True")]


class Journal(PortableKernels):
    """Notes in which order a warm-up asks."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.said: list[Any] = []

    def use_reference(self) -> None:
        self.said.append("reference")

    def compile(self, forward: Any) -> None:
        self.said.append("compile")
        forward()

    def embed(self, step: Step, *given: Any) -> None:
        self.said.append(step.rows)
        super().embed(step, *given)

    def choose(self, weights: Any, parts: Any, sizes: Any) -> Any:
        self.said += ["choose", *sizes]
        assert [part.rows for part in parts(64)] == [64] * len(parts(64))
        return {"how": "asked"}

    def keep_choices(self) -> None:
        self.said.append("keep")


def test_tables_on_the_host_have_room_for_a_step_whose_rows_are_all_distinct() -> None:
    hashes = HashSpec((1, 1), (0, 64), 2**61 - 1, 200)  # of id i: rows i + 1 and i + 65
    config = random_config(post_hashes=hashes, author_hashes=hashes)
    source = HostTables(config, Tables(*torch.randn(3, 200, config.width)), torch.device("cpu"), 64)
    host = host_arrays(torch.zeros(step_bytes(config, 64), dtype=torch.uint8), config, 64)
    host.counts[[CANDIDATES, FIRST_USER, ROWS]] = 64
    host.ids[:64] = np.arange(1, 65)[:, None]
    source.prepare(host, 0)
    assert source.tables.numbers is not None
    assert len(source.tables.numbers.unique()) == len(source.tables.post) - 1 == 4 * 64


def test_a_state_lies_where_the_engine_computes() -> None:
    engine = make_engine()
    engine._device = torch.device("meta")
    assert engine._allocate(random_context(engine.config, 3), None).keys_values.is_meta


def test_a_run_through_other_kernels_leaves_an_engine_its_own() -> None:
    engine = SplitEngine(random_ranker(random_config()), capacity=128)
    own, others = engine._kernels, Journal(engine.config, engine._trunk.weights.rope)
    engine.run_through(others, [item(engine, 9, 7)])
    assert others.said
    assert engine._kernels is engine._trunk.kernels is own


@pytest.mark.parametrize("recorder", [PlainRecorder, Forgetful, None])
def test_a_warm_up_compiles_compares_chooses_records_and_keeps(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SplitEngine(random_ranker(random_config()), capacity=128, recorder=recorder and recorder())
    kernels = engine._trunk.kernels = Journal(engine.config, engine._trunk.weights.rope)
    runner, notes = engine._runner, engine.info.notes
    monkeypatch.setattr("model.split.buckets.WHOLE_ROWS", 64)
    fixed = {"kernels": "torch, fixed tiles", "embedding_tables": "device", "step_rows": 128, "cache_bytes": 0}
    assert engine.info == EngineInfo("cpu", "float32", "torch", "shared", fixed)

    def record(work: Any, step: Step) -> Any:
        assert not any(buffer.any() for buffer in (*runner._staging, runner._arrived)), "states of probes that are gone"
        kernels.said.append("record")
        return replay(work, step)

    replay = runner._recorder.record
    monkeypatch.setattr(runner._recorder, "record", record)
    with nullcontext() if recorder is not Forgetful else pytest.raises(EngineError, match="when it is replayed"):
        runner.warm_up(notes, engine._probe, engine._trial)
    assert recorder is Forgetful or notes["products"] == {"how": "asked"}
    recorded = ["record", 128, "record", "record", 64, "record", "record", 64]
    expected = ["reference", "compile", 64, 64, 128, "choose", 64, 128, *recorded, 64, 64, 128, 128]
    assert kernels.said == (["choose", 64] if recorder is None else expected + ["keep"] * (recorder is PlainRecorder))


def test_sizes_are_fine_where_steps_are_small_and_the_coarsest_are_recorded_first() -> None:
    sizes = row_sizes(2**14)
    assert [size for size in sizes if size <= 2048] == list(range(64, 2049, 64))
    assert [size for size in sizes if 2048 <= size <= 4096] == list(range(2048, 4097, 128))
    assert [size for size in sizes if size >= 4096] == list(range(4096, 2**14 + 1, 512))
    assert row_sizes(100) == [64, 100]
    assert recording_order(range(64, 385, 64)) == [384, 256, 128, 64, 192, 320]
    assert [tile_slots(rows) for rows in (64, 352, 383, 384, 1536, 1568)] == [18, 27, 27, 64, 64, 65]
    assert [default_capacity(random_config(explicit_ffn_width=width)) for width in (64, 1025, 2049, 40000)] == [
        2**14,
        2**13,
        2**12,
        2**10,
    ]
    assert default_capacity(random_config(explicit_ffn_width=40000, history_length=1030)) == 1088


def test_an_engine_keeps_weights_of_its_own_in_the_types_that_its_kernels_go_by() -> None:
    ranker = random_ranker(random_config())
    engine = SplitEngine(ranker, "cpu", torch.bfloat16, capacity=512, cache_bytes=2**20)
    asked = item(engine, 20, 9)
    outcome = engine.forward([asked])[0]
    expected, state = outcome.scores, outcome.state
    assert state.nbytes == 2 * 2 * 128 * 2 * 16 * 2 < engine.cache_stats().bytes  # type: ignore[attr-defined]
    engine._cache.clear()
    for name, parameter in ranker.named_parameters():
        parameter.data *= name.startswith("tables.")
    assert same_bits(engine.forward([asked])[0].scores, expected)
    wide = {"residual", "final", "logits"}
    kept = {name: each for name, each in vars(engine._trunk).items() if torch.is_tensor(each)}
    assert {name: each.dtype for name, each in kept.items()} == {
        name: torch.float32 if name in wide else torch.bfloat16 for name in kept
    }
    assert {len(each) for each in kept.values()} == {512 + 64}
    weights = engine._trunk.weights
    tokens, (first, last) = weights.tokens, weights.layers
    assert tokens.inputs == (4 * 64, 4 * 64 + 128, 2 * 64), "7 actions and 64 for dwell seconds, filled up"
    assert weights.heads.shape == (64, 32)
    assert (first.gate_value.shape, first.ffn_output.shape) == ((64, 256), (128, 64)), "of 88"
    for layer in (first, last):
        linear = (layer.qkv, layer.query, layer.key_value, layer.output, layer.gate_value, layer.ffn_output)
        assert {each.dtype for each in linear if each is not None} == {torch.bfloat16}
        assert {norm.scale.dtype for norm in (layer.attention_norm, layer.ffn_norm, weights.final_norm)} == {
            torch.float32
        }
    exact = (tokens.projection, tokens.surfaces, tokens.ages, tokens.dwell_input, weights.heads, weights.rope)
    assert {each.dtype for each in exact} == {torch.float32}
    assert weights.rope.is_contiguous()


def test_a_trial_reads_a_long_context_of_random_numbers() -> None:
    """Else kinds of attention would be timed and compared on zeros."""
    engine = make_engine()
    keys_values = [engine._trial(rows).candidates[0].state.keys_values for rows in (128, 128, 192)]
    assert keys_values[0].std() > 0.9
    assert torch.equal(*keys_values[:2])
    assert not torch.equal(*keys_values[1:])
    assert engine._trial(128).rows == 128 - 5


CUDA = torch.device("cuda", 0)


def test_a_recording_on_cuda_is_run_once_and_then_captured_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    @contextmanager
    def entered(what: Any) -> Iterator[None]:
        said.append(what)
        yield
        said.append("left")

    class Graph:
        def capture_begin(self, **options: Any) -> None:
            said.append(options)

        def capture_end(self) -> None:
            said.append("captured")

        def replay(self) -> None:
            said.append("replayed")

    stream: Any = SimpleNamespace(device=CUDA, synchronize=lambda: said.append("waited"))
    event = SimpleNamespace(record=lambda: said.append("marked"), synchronize=lambda: said.append("reached"))
    for name, stand_in in {
        "stream": entered, "device": entered, "CUDAGraph": Graph, "Event": lambda: event, "graph_pool_handle": lambda: 7,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    step: Any = object()
    recorder, how = CudaRecorder(stream), {"pool": 7, "capture_error_mode": "thread_local"}
    replay = recorder.record(said.append, step)
    assert said == [CUDA, "left", stream, step, "waited", how, step, "captured", "left", "waited"]
    replay(step)
    recorder.mark()()
    assert said[-3:] == ["replayed", "marked", "reached"]

    def fails(step: Any) -> None:
        if said[-1] == how:
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        recorder.record(fails, step)
    assert said[-1] == "captured"
    assert (recorder.recorded, len(recorder.graphs)) == (1, 2), "a graph that failed is kept with the others"
    plain = CudaRecorder(stream, replay=False)
    assert plain.record(fails, step) is fails
    assert not plain.graphs
    for free, room in ((4, True), (3, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 64 * (device == CUDA)))
        assert recorder.has_room() is room
