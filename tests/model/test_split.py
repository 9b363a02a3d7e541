"""The torch engine's own ways: prefixes across tiles, padded sizes, planning, and what warm-up refuses; see `test_engines` too."""

from __future__ import annotations

import gc
import itertools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model.config import ModelConfig
from model.create import HOST_CACHE_BYTES, cache_budget
from model.dense import DenseEngine
from model.device import free_memory, losses_of
from model.engine import EngineError, Item
from model.selftest import same_bits
from model.split.engine import SplitEngine
from model.split.graphs import CudaRecorder, PlainRecorder
from model.split.kernels.contract import Step
from model.split.kernels.portable import PortableKernels, rows_are_independent
from model.split.step import (
    ContextState,
    ContextWork,
    plan_steps,
)
from tests.model.builders import random_candidates, random_config, random_context, random_ranker

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def make_engine(dtype: torch.dtype = torch.float32, **overrides: Any) -> SplitEngine:
    config = random_config(**overrides)
    return SplitEngine(random_ranker(config), "cpu", dtype, "shared", 2**24, capacity=512)


def item(config: ModelConfig, history: int, candidates: int, seed: int = 0, **context: Any) -> Item:
    return Item(random_context(config, history, seed, **context), random_candidates(config, candidates, seed))


class Planted(PortableKernels):
    """Torch's kernels with a fault that a test plants by overriding one of them."""

    @classmethod
    def make(cls, config: ModelConfig, weights: Any, dtype: torch.dtype) -> Planted:
        return cls(config, weights.rope)


@DTYPES
def test_a_grown_history_extends_its_prefix_with_the_same_bits(dtype: torch.dtype) -> None:
    config = random_config(history_length=200)
    whole = item(config, 200, 65)
    whole.context.post_ids[[2, 150]] = 0
    expected = make_engine(dtype, history_length=200).forward([whole])[0]
    for known in (0, 1, 129, 199):
        engine = make_engine(dtype, history_length=200)
        engine.forward([Item(whole.context.first(known), whole.candidates)])
        grown = engine.forward([item(config, 9, 3, seed=4), whole])[1]
        assert grown.cache == "prefix"
        assert same_bits(grown.scores, expected.scores)


def test_what_lay_in_memory_before_is_in_no_score() -> None:
    engine = make_engine()
    asked = [item(engine.config, history, 9, history) for history in (0, 20, 37)]
    expected = engine.forward(asked)
    torch.use_deterministic_algorithms(True, warn_only=True)  # new tensors are full of NaN
    try:
        assert torch.empty(1).isnan()
        found = make_engine().forward(asked)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(same_bits(ours.scores, theirs.scores) for ours, theirs in zip(found, expected, strict=True))


class Leaky(Planted):
    """Rows that reach into their neighbours."""

    def multiply(self, step: Step, x: Any, weight: Any, out: Any) -> None:
        super().multiply(step, x, weight, out)
        if weight.shape[1] == 32:
            out[1 : step.rows] += 1e-6 * out[: step.rows - 1]


def test_warm_up_refuses_rows_that_influence_each_other() -> None:
    engine = make_engine(query_heads=3, kv_heads=1, head_width=6)  # narrow heads in an odd group
    engine.warm_up()
    assert engine.late_compilations() == 0
    assert engine.info.notes["self_test"]["different_bits"] == 0
    with pytest.raises(EngineError, match="isolation is broken"):
        SplitEngine(random_ranker(engine.config), kernels=Leaky.make, capacity=512).warm_up()


def test_a_product_of_another_size_is_caught() -> None:
    weight = torch.randn(176, 128)

    def reference(x: torch.Tensor) -> torch.Tensor:
        tiles = [torch.nn.functional.pad(tile, (0, 0, 0, 64 - len(tile))) for tile in x.split(64)]
        return torch.cat([tile @ weight for tile in tiles])[: len(x)]

    def split_inner_axis(x: torch.Tensor) -> torch.Tensor:
        return x[:, :88] @ weight[:88] + x[:, 88:] @ weight[88:]

    assert rows_are_independent(reference, reference, 65, 176, weight)
    assert not rows_are_independent(split_inner_axis, reference, 64, 176, weight)


def test_padded_sizes_give_the_same_bits() -> None:
    config = random_config(layers=1)
    ranker = random_ranker(config)
    padded = SplitEngine(ranker, capacity=320, recorder=PlainRecorder(), cache_bytes=2**20)
    padded.warm_up()
    notes = padded.info.notes
    assert notes["row_sizes"] == [64, 128, 192, 256, 320]
    assert notes["graphs"] == 10, "a body and a tail of each size"
    plain = SplitEngine(ranker, capacity=320)
    items = [
        item(config, history, count, seed) for seed, (history, count) in enumerate([(37, 700), (0, 1), (5, 64), (9, 9)])
    ]
    items.append(item(config, 0, 5, user_id=0))
    for _ in range(2):
        for ours, theirs in zip(padded.forward(items), plain.forward(items), strict=True):
            assert same_bits(ours.scores, theirs.scores)
    assert padded.late_compilations() == 0
    assert 0 < padded.padding_ratio() < 0.25


class OneBadSize(Planted):
    """Another order of additions when a step has so many rows."""

    bad_rows = 128

    def multiply(self, step: Step, x: Any, weight: Any, out: Any) -> None:
        super().multiply(step, x, weight, out)
        if step.rows == self.bad_rows:
            out[: step.rows] *= 1 + 2**-20


@pytest.mark.parametrize(("bad_rows", "kept"), [(128, [64, 192]), (192, [192])])
def test_sizes_with_other_bits_are_not_used(bad_rows: int, kept: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneBadSize, "bad_rows", bad_rows)
    config = random_config(layers=1)
    engine = SplitEngine(random_ranker(config), kernels=OneBadSize.make, capacity=192, recorder=PlainRecorder())
    engine.warm_up()
    assert engine.info.notes["row_sizes"] == kept
    assert sorted(kept + engine.info.notes["row_sizes_refused"]) == [64, 128, 192]
    asked = item(config, 20, 40)
    alone, among = engine.forward([asked])[0], engine.forward([item(config, 20, 90, seed=1), asked])[1]
    assert same_bits(alone.scores, among.scores)


class Narrow(Planted):
    """Multiplies a tile at a time, whatever was checked."""

    def check_products(self, *given: Any) -> dict[str, Any]:
        return {}


@pytest.mark.slow
@DTYPES
def test_wider_products_that_passed_the_check_change_no_bit(dtype: torch.dtype) -> None:
    ranker = random_ranker(random_config())
    wide = SplitEngine(ranker, "cpu", dtype, capacity=512)
    narrow = SplitEngine(ranker, "cpu", dtype, capacity=512, kernels=lambda *given: Narrow(given[0], given[1].rope))
    for engine in (wide, narrow):
        engine.warm_up()
    products = wide.info.notes["products"]
    # query 64, key and value 64, FFN 88 filled up to 128, heads 10 filled up to 32
    assert products.keys() == {"64x128", "64x64", "64x256", "128x64", "64x32"}, "every weight was tried"
    assert any(max(sizes) > 64 for sizes in products.values())
    asked = [item(wide.config, 30, 400), item(wide.config, 3, 65, seed=1)]
    for ours, theirs in zip(wide.forward(asked), narrow.forward(asked), strict=True):
        assert same_bits(ours.scores, theirs.scores)


class Forgetful(PlainRecorder):
    """Replays run something else than what was recorded."""

    def record(self, work: Any, step: Step) -> Any:
        replay = super().record(work, step)

        def disturbed(step: Step) -> None:
            replay(step)
            if work.__name__ == "tail":
                work.__self__.logits += 1e-6

        return disturbed


def test_replays_that_differ_from_the_plain_run_are_refused() -> None:
    engine = SplitEngine(random_ranker(random_config()), capacity=128, recorder=Forgetful())
    with pytest.raises(EngineError, match="when it is replayed"):
        engine.warm_up()


class Journal(PlainRecorder):
    """Notes what is replayed, and which host buffers are still read."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Any] = []
        self.numbers = itertools.count()

    def record(self, work: Any, step: Step) -> Any:
        replay = super().record(work, step)

        def noted(step: Step) -> None:
            self.said.append((work.__name__, step.rows))
            replay(step)

        return noted

    def mark(self) -> Any:
        number = next(self.numbers)
        return lambda: self.said.append(f"{number} has ended")


def test_a_host_buffer_is_reused_only_after_its_step_has_ended() -> None:
    recorder = Journal()
    engine = SplitEngine(random_ranker(random_config()), capacity=128, recorder=recorder)
    engine.warm_up()
    recorder.said.clear()
    recorder.numbers = itertools.count()
    engine.forward([item(engine.config, 20, 300)])
    steps = [("body", 128), ("tail", 128)]
    first = [("body", 128), ("tail", 64)]
    assert recorder.said == [*first, *steps, "0 has ended", *steps, "1 has ended", "2 has ended"]


class Crowded(PlainRecorder):
    """A device whose memory is used up after some recordings: it says so before, or at the next one."""

    def __init__(self, recordings: int, *, says_so: bool) -> None:
        super().__init__()
        self.recordings = recordings
        self.says_so = says_so

    def has_room(self) -> bool:
        return not self.says_so or self.recorded < self.recordings

    def record(self, work: Any, step: Step) -> Any:
        if self.recorded >= self.recordings:
            assert not (self.says_so and self.recorded), "it had said that there is no room"
            raise torch.OutOfMemoryError("planted")
        return super().record(work, step)


@pytest.mark.parametrize("says_so", [True, False])
def test_recordings_stop_at_the_memory_and_every_step_is_served(says_so: bool) -> None:
    config = random_config(layers=1)
    engine = SplitEngine(random_ranker(config), capacity=256, recorder=Crowded(5 + says_so, says_so=says_so))
    engine.warm_up()
    kept = [64, 128, 256] if says_so else [128, 256]
    assert engine.info.notes["row_sizes"] == kept
    assert engine.info.notes["row_sizes_without_room"] == [size for size in range(64, 257, 64) if size not in kept]
    plain = SplitEngine(random_ranker(config), capacity=256)
    for count in (1, 200, 300):
        asked = item(config, 9, count)
        assert same_bits(engine.forward([asked])[0].scores, plain.forward([asked])[0].scores)
    engine = SplitEngine(random_ranker(config), capacity=256, recorder=Crowded(0, says_so=says_so))
    with pytest.raises(torch.OutOfMemoryError):
        engine.warm_up()


class Full(Planted):
    """No memory for the first forwards."""

    failures = 0

    def embed(self, *given: Any) -> None:
        if type(self).failures:
            type(self).failures -= 1
            raise torch.OutOfMemoryError("planted")
        super().embed(*given)


def test_a_batch_too_large_for_memory_is_tried_without_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    config = random_config()
    engine = SplitEngine(random_ranker(config), kernels=Full.make, capacity=512, cache_bytes=2**20)
    items = [item(config, 5, 3, seed) for seed in range(3)]
    expected = engine.forward(items)
    monkeypatch.setattr(Full, "failures", 1)
    for ours, theirs in zip(engine.forward([*items, item(config, 7, 1, 9)]), expected, strict=False):
        assert same_bits(ours.scores, theirs.scores)
        assert ours.cache == "miss", "the cache was emptied"
    Full.failures = 2
    with pytest.raises(EngineError, match="out of memory") as failed:
        engine.forward([item(config, 8, 1, 10)])
    assert not failed.value.sticky, "smaller batches may still do"


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        ([(64, 0), (64, 0)], [([64, 64], [])]),
        ([(64, 0), (65, 0)], [([64], []), ([65], [])]),
        ([(1, 0)] * 11, [([1] * 10, []), ([1], [])]),
        ([(1, 200)], [([1], [64]), ([], [128]), ([], [8])]),
        ([(60, 68)], [([60], [68])]),
        ([(60, 69)], [([60], [64]), ([], [5])]),
        ([(0, 1)] * 21, [([], [1] * 20), ([], [1])]),
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


def test_a_cache_budget_depends_on_the_card_not_on_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reload finds the old version's tables and cache there, and must decide as the start did."""
    for free in (80, 1):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free * 2**30, 80 * 2**30))
        assert cache_budget(None, CUDA) == 10 * 2**30
    assert cache_budget(7, CUDA) == 7
    assert cache_budget(None, torch.device("cpu")) == HOST_CACHE_BYTES
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
    with pytest.raises(EngineError, match="tables must all be float32 or all bfloat16, got bfloat16, float32"):
        SplitEngine(mixed)


CUDA = torch.device("cuda", 0)


def test_a_recording_on_cuda_runs_once_and_is_then_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    class Graph:
        def capture_begin(self, *, pool: int, capture_error_mode: str) -> None:
            assert not gc.isenabled(), "a collection may free what a recording needs"
            assert capture_error_mode == "thread_local", "another thread may serve the version before"
            said.append("begun")

        def capture_end(self) -> None:
            said.append("captured")

        def replay(self) -> None:
            said.append("replayed")

    def event(*, blocking: bool) -> Any:
        assert blocking, "a thread that waits lets others have its processor"
        return SimpleNamespace(record=lambda: said.append("marked"), synchronize=lambda: said.append("reached"))

    stream: Any = SimpleNamespace(device=CUDA, synchronize=lambda: None)
    for name, stand_in in {
        "stream": nullcontext, "device": nullcontext, "CUDAGraph": Graph, "Event": event, "graph_pool_handle": lambda: 7,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    step: Any = "step"
    recorder = CudaRecorder(stream)
    replay = recorder.record(said.append, step)
    replay(step)
    recorder.mark()()
    assert said == ["step", "begun", "step", "captured", "replayed", "marked", "reached"]

    def fails(step: Any) -> None:
        if said[-1] == "begun":
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        recorder.record(fails, step)
    assert said[-1] == "captured"
    assert gc.isenabled()
    assert (recorder.recorded, len(recorder.graphs)) == (1, 2), "a graph that failed is kept with the others"
    for free, room in ((4, True), (3, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 64 * (device == CUDA)))
        assert recorder.has_room() is room


class Lost(Planted):
    """A device that is lost in a forward, as torch tells of it."""

    def gate(self, *given: Any) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("rung", ["recorded", "torch"])
def test_a_device_lost_while_serving_needs_a_new_process(rung: str) -> None:
    recorder = PlainRecorder(records=rung == "recorded")
    config = random_config()
    engine = SplitEngine(random_ranker(config), kernels=Lost.make, capacity=512, recorder=recorder)
    with pytest.raises(EngineError, match="the device failed: CUDA error") as raised:
        engine.forward([item(config, 3, 2)])
    assert raised.value.sticky


def test_so_is_one_that_the_definition_runs_on() -> None:
    ranker = random_ranker(random_config())

    def lost(*given: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    ranker.register_forward_pre_hook(lost)
    with pytest.raises(EngineError, match="the device failed") as raised:
        DenseEngine(ranker, torch.float32).forward([item(ranker.config, 3, 2)])
    assert raised.value.sticky


def test_a_lost_device_is_recognised_whatever_the_error_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton raises a plain RuntimeError."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    def lost(*given: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "empty_cache", lost)
    for is_lost in (False, True):
        monkeypatch.setattr(torch.cuda, "synchronize", lost if is_lost else lambda device: None)
        with pytest.raises(RuntimeError, match="Triton Error") as raised, losses_of(CUDA):
            raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
        assert isinstance(raised.value, EngineError) == is_lost
        free_memory(CUDA)  # it cannot, and says nothing
    with pytest.raises(torch.OutOfMemoryError), losses_of(CUDA):
        raise torch.OutOfMemoryError("a full device is not a lost one")
