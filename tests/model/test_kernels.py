"""Every Triton kernel, in the interpreter, against its plain fp32 definition, and the engine that they make."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, name-defined"
from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported, in this process only by this file

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model.batch import collate
from model.config import HashSpec, ModelConfig
from model.dense import DenseEngine
from model.engine import Item
from model.layers import rotate, soft_cap
from model.presets import with_preset
from model.ranker import Ranker
from model.selftest import same_bits
from model.split.engine import SplitEngine
from model.split.kernels.contract import Kernels, Step, Tables, softmax_shift
from model.split.kernels.portable import KEY_TILE
from model.split.step import CandidateWork, ContextState, ContextWork, StepPlan, device_arrays, host_arrays, step_bytes
from model.split.weights import NormWeights, split_weights
from model.split.write import StepWriter
from model.tolerances import PARITY
from tests.model.builders import interpret_quickly, random_candidates, random_config, random_context, random_ranker

triton = pytest.importorskip("triton", reason="triton is not installed here")
tl = pytest.importorskip("triton.language")
attention = pytest.importorskip("model.split.kernels.attention")
launching = pytest.importorskip("model.split.kernels.launch")
product = pytest.importorskip("model.split.kernels.product")
rows = pytest.importorskip("model.split.kernels.rows")

interpret_quickly()
CAPACITY = 256
REQUESTS = ((9, 0, 65), (0, 0, 1), (7, 3, 2))  # history, of it known, candidates: one more than a tile
FEW = ((9, 0, 5), *REQUESTS[1:])


@dataclass
class Bench:
    """A step of three requests, kernels, and what a trunk would hold."""

    config: ModelConfig
    ranker: Ranker
    kernels: Kernels
    step: Step
    plan: StepPlan
    generator: torch.Generator
    dtype: torch.dtype
    rooms: list[Tensor]

    def random(self, width: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(CAPACITY + 64, width, generator=self.generator) * scale
        return values.to(dtype or self.dtype)

    def given(self, width: int, scale: float = 1.0) -> Tensor:
        """Random numbers that end with the last row that Triton's kernels may read: one read behind it is seen."""
        return self.random(width, scale)[: self.step.used].clone()


def make_bench(dtype: torch.dtype = torch.float32, requests: Any = REQUESTS, **overrides: Any) -> Bench:
    config = random_config(width=40, layers=2, history_length=max(history for history, *_ in requests), **overrides)
    ranker = random_ranker(config)
    weights = split_weights(ranker, torch.device("cpu"), dtype)
    rooms: list[Tensor] = []
    kernels = launching.TritonKernels(config, weights, dtype, Watched(rooms))
    generator = torch.Generator().manual_seed(5)
    plan = StepPlan()
    for number, (history, known, candidates) in enumerate(requests):
        shape = (config.layers, 2, -(-(1 + history) // KEY_TILE) * KEY_TILE, config.kv_heads, config.head_width)
        state = ContextState(torch.randn(shape, generator=generator).to(dtype), 1 + history, history)
        if history >= 0:
            work = ContextWork(random_context(config, history, number), state, known, 1 + known if known else 0)
            plan.add_context(work, state.length - work.first_index)
        plan.add_candidates(CandidateWork(number, 0, random_candidates(config, candidates, number), state))
    anchor = torch.empty(64, dtype=dtype)
    buffer = torch.full(
        (step_bytes(config, CAPACITY),), 77, dtype=torch.uint8
    )  # what a step does not write may be anything
    host = host_arrays(buffer, config, CAPACITY)
    StepWriter(config, "shared", anchor).write(plan, host)
    step = Step(anchor, device_arrays(buffer, config, CAPACITY), host, plan.states())
    step = step.at(-(-step.used // 64) * 64 + 64)  # the last tile is nobody's
    rooms += [state.keys_values for state in step.states]
    return Bench(config, ranker, kernels, step, plan, generator, dtype, rooms)


POINTERS = {
    **dict.fromkeys(("counts", "tiles", "states", "rows"), torch.int32), "slots": torch.int64,
    **dict.fromkeys(("residual", "scale", "bias", "post_scale", "post_bias", "rope", "surfaces"), torch.float32),
    **dict.fromkeys(("ages", "dwell_input", "history"), torch.float32),
}  # fmt: skip


class Watched:
    """A launcher for Triton's interpreter that is as strict as a device: arguments have the types that kernels go by, a masked load
    without `other` gives garbage, what is read lies in a tensor, no two programs write to one place, and one that writes nothing reads
    no matrix."""

    def __init__(self, rooms: list[Tensor]) -> None:
        self.builder: Any = triton.runtime.interpreter.interpreter_builder
        self.rooms = rooms  # what kernels reach beside their arguments

    def __call__(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        given = dict(zip(kernel.arg_names, arguments, strict=False))
        assert {name: given[name].dtype for name in POINTERS.keys() & given.keys()}.items() <= POINTERS.items()
        storages = [each.untyped_storage() for each in (*self.rooms, *arguments) if torch.is_tensor(each)]
        starts = np.array(sorted({each.data_ptr(): each.nbytes() for each in storages}.items()), np.int64)
        written: dict[Any, list[Any]] = {}
        busy = set()  # programs that read a matrix

        def load(pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
            read = pointers.data[mask.data].astype(np.int64)
            busy.update([self.builder.grid_idx] if len(read) and pointers.data.ndim == 2 else [])
            start, size = starts[np.searchsorted(starts[:, 0], read.min(initial=2**62), "right") - 1]
            if (
                len(read) and not start <= read.min() <= read.max() < start + size
            ):  # in more than one tensor, or in none
                room = starts[np.searchsorted(starts[:, 0], read, "right") - 1]
                assert np.all((room[:, 0] <= read) & (read < room.sum(1))), f"{kernel} reads what is in no tensor"
            found = masked_load(pointers, mask, other, *rest)
            if other is None and mask.data.size > 1:  # a scalar 0 arrives as None
                nan = np.array([*[255] * (found.data.itemsize - 1), 127], np.uint8).view(found.data.dtype)[0]
                far = 987_654_321  # as a place, and its multiples too
                found.data = np.where(mask.data, found.data, far if found.data.dtype.kind == "i" else nan)
            return found

        def store(pointers: Any, value: Any, mask: Any, *rest: Any) -> None:
            places = pointers.data[mask.data]
            assert len(np.unique(places)) == len(places), f"{kernel} writes two values to one place"
            written.setdefault(self.builder.grid_idx, []).append(places)
            masked_store(pointers, value, mask, *rest)

        def dot(a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> Any:
            assert "TF32x3" in str(precision), f"{kernel} multiplies in TF32"
            return plain_dot(a, b, d, precision, *rest)

        plain_dot, self.builder.create_dot = self.builder.create_dot, dot
        masked_load, masked_store = self.builder.create_masked_load, self.builder.create_masked_store
        self.builder.create_masked_load, self.builder.create_masked_store = load, store
        try:
            launching.launch(kernel, grid, *arguments, **constants)
        finally:
            del self.builder.create_masked_load, self.builder.create_masked_store
            self.builder.create_dot = plain_dot
        assert busy <= {program for program, places in written.items() if any(map(len, places))}, (
            f"{kernel} works for nobody"
        )
        places = np.concatenate([np.unique(np.concatenate(each)) for each in written.values()] or [np.zeros(0)])
        assert len(np.unique(places)) == len(places), f"two programs of {kernel} write to one place"


@triton.jit
def weigh(
    products, weights, FORM: tl.constexpr, SCALE: tl.constexpr, RISE: tl.constexpr, FALL: tl.constexpr,
    EMULATED: tl.constexpr,
):  # fmt: skip
    """`attention.bounded_weight` of eight products."""
    places = tl.arange(0, 8)
    found = attention.bounded_weight(tl.load(products + places), FORM, SCALE, RISE, FALL, EMULATED)
    tl.store(weights + places, found)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def close(one: Tensor, other: Tensor, dtype: torch.dtype) -> None:
    tolerance = PARITY[dtype].operation
    torch.testing.assert_close(one.float(), other.float(), atol=tolerance, rtol=tolerance)


@DTYPES
@pytest.mark.parametrize(
    ("width", "heads", "groups", "context", "cap"),
    [
        (32, 2, 2, "bidirectional", 30.0),
        (24, 3, 1, "causal", 5.0),
        (16, 4, 1, "causal", None),
        (256, 1, 1, "causal", 80.0),
    ],
)
def test_attention_equals_its_definition(
    dtype: torch.dtype, width: int, heads: int, groups: int, context: str, cap: float | None
) -> None:
    shape = {"query_heads": heads, "kv_heads": groups, "head_width": width}
    bench = make_bench(dtype, context_attention=context, attention_cap=cap, **shape)
    step = bench.step
    query, key_value = bench.given(heads * width, 3.0), bench.given(2 * groups * width, 3.0)
    out = torch.full_like(bench.random(heads * width), torch.nan)
    bench.kernels.attend(step, query, key_value, 1, out)
    check_attention(bench, query, key_value, out)


def check_attention(bench: Bench, query: Tensor, key_value: Tensor, out: Tensor) -> None:
    """All rows of the second layer against the definition."""
    step, config, covered = bench.step, bench.config, 0
    for first, count, request, place in step.host.tiles[: step.host.count("tiles")].tolist():
        tile, state = slice(first, first + count), step.states[request]
        limits = torch.full((count,), state.length)
        if place >= 0 and config.context_attention == "causal":
            limits = torch.arange(place + 1, place + 1 + count)
        own = key_value[tile].view(count, 2, config.kv_heads, config.head_width)
        expected = attention.attend(
            query[tile].view(count, config.query_heads, config.head_width),
            *state.keys_values[1, :, : state.length],
            limits,
            (own[:, 0], own[:, 1]) if place < 0 else None,
            config.attention_multiplier,
            config.attention_cap,
        )
        close(out[tile], expected.flatten(1), bench.dtype)
        covered += count
    assert covered == step.used
    assert out[covered:].isnan().all()


@pytest.mark.parametrize("cap", [30.0, 60.0])
@DTYPES
def test_an_attention_weight_is_relative_to_the_shift(dtype: torch.dtype, cap: float) -> None:
    """So that no context is long enough for a sum of weights to overflow."""
    products = torch.tensor([-700.0, -300.0, -7.0, 0.0, 0.5, 20.0, 400.0, 700.0])
    weights, shift = torch.empty(8), softmax_shift(cap)
    assert shift == min(cap, 80 - cap)
    constants = attention.softmax_constants(0.25, cap, dtype)
    assert (constants["FORM"] == "fast_tanh") == (dtype == BF16)
    weigh[(1,)](products, weights, **constants, EMULATED=True)
    exact = torch.exp(soft_cap(products.double() * 0.25, cap) - shift)
    torch.testing.assert_close(weights.double(), exact, rtol=0.05 if dtype == torch.bfloat16 else 1e-4, atol=0)


@DTYPES
def test_rope_turns_queries_and_keys_and_stores_contexts(dtype: torch.dtype) -> None:
    bench = make_bench(dtype, query_heads=3, kv_heads=3, head_width=24)
    step = bench.step
    qkv = bench.given(9 * 24)
    before = qkv.clone()
    states = [state.keys_values.clone() for state in step.states]
    bench.kernels.rotate(step, qkv[:, :72], qkv[:, 72:], 1)
    used, records = step.used, step.host.rows
    assert torch.equal(qkv[used:], before[used:])
    cos, sin = split_weights(bench.ranker, torch.device("cpu"), dtype).rope[
        :, step.arrays.row("position")[:used].long()
    ]
    cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    expected = rotate(before[:used, :144].reshape(used, 6, 24), cos, sin).flatten(1)
    close(qkv[:used, :144], expected, dtype)
    assert torch.equal(qkv[:used, 144:], before[:used, 144:])
    query = before[:, :72].clone()  # in a tensor of its own, which ends where its heads end
    bench.kernels.rotate(step, query, None, 1)
    assert torch.equal(query[:used], qkv[:used, :72])
    for row in range(used):
        if (place := records["place"][row]) >= 0:
            states[records["request"][row]][1, :, place] = qkv[row, 72:].view(2, 3, 24)
    assert (records["place"][:used] >= 0).sum() == used - step.host.count("candidates") == 10 + 1 + 4
    assert all(torch.equal(state.keys_values, expected) for state, expected in zip(step.states, states, strict=True))


@DTYPES
@pytest.mark.parametrize(("tail", "sandwich", "centred"), [(False, True, False), (True, False, True)])
def test_norms_add_the_residual(dtype: torch.dtype, tail: bool, sandwich: bool, centred: bool) -> None:
    bench = make_bench(dtype)
    mixed, residual = bench.random(40, 2.0) + 1, bench.random(40, dtype=torch.float32) - 1
    norm, other = (NormWeights(torch.rand(40) + 0.5, torch.rand(40) if centred else None) for _ in range(2))
    post = other if sandwich else None
    expected = rows.add_norm(mixed, post, residual, norm, bench.config.norm_epsilon)
    first = rows.add_norm(None, None, residual, norm, bench.config.norm_epsilon)[1]
    used = bench.step.at(0, tail=tail).used
    step = bench.step.at(-(-used // 64) * 64, tail=tail)
    out, before = torch.zeros_like(mixed), residual.clone()
    bench.kernels.norm(step, None, None, residual, norm, out)
    close(out[:used], first[:used], dtype)
    assert torch.equal(residual, before)
    bench.kernels.norm(step, mixed, post, residual, norm, out)
    close(residual[:used], expected[0][:used], torch.float32)
    close(out[:used], expected[1][:used], dtype)
    assert torch.equal(residual[used:], before[used:])
    assert not out[used:].any()


@DTYPES
@pytest.mark.parametrize(("activation", "gated"), [("gelu_tanh", True), ("gelu", False), ("silu", True)])
def test_gate_is_the_activation_times_value(dtype: torch.dtype, activation: Any, gated: bool) -> None:
    bench = make_bench(dtype, activation=activation, gated=gated)
    width = 1104 if activation == "silu" else 72  # more and less than a block
    gate_value = bench.given((1 + gated) * width, 3.0)
    out = torch.zeros(CAPACITY + 64, width, dtype=dtype)
    bench.kernels.gate(bench.step, gate_value, out)
    used = bench.step.used
    close(out[:used], rows.gate(gate_value, activation, gated=gated)[:used], dtype)
    assert not out[used:].any()


@DTYPES
@pytest.mark.parametrize(("inner", "columns"), [(64, 96), (176, 144)])
def test_product_equals_its_definition(dtype: torch.dtype, inner: int, columns: int) -> None:
    bench = make_bench(dtype)
    x, weight = bench.given(inner), (torch.randn(inner, columns, generator=bench.generator) / inner**0.5).to(dtype)
    out = torch.full((CAPACITY + 64, columns), torch.nan, dtype=dtype)
    used = bench.step.used
    bench.kernels.multiply(bench.step, x, weight, out)
    close(out[:used], product.multiply(x, weight)[:used], dtype)
    assert out[used:].isnan().all(), "rows that nobody asked for"


def test_large_tiles_give_the_numbers_of_small_ones() -> None:
    bench = make_bench(BF16)
    x, weight = bench.random(128), (torch.randn(128, 144, generator=bench.generator) / 11).bfloat16()
    assert launching.product_tile(128, 144, BF16) != launching.product_tile(257, 144, BF16)
    small, large = (torch.full((len(x), 144), torch.nan).bfloat16() for _ in range(2))
    bench.kernels.multiply(bench.step, x, weight, small)
    bench.kernels.multiply(bench.step.at(320), x, weight, large)
    used = bench.step.used
    assert torch.equal(small[:used], large[:used])
    close(large[:used], product.multiply(x, weight)[:used], BF16)


FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "table_dtype", "variant"),
    [
        (FP32, FP32, "may, in tiles"), (BF16, BF16, "may"), (FP32, BF16, "january"), (BF16, FP32, "january"),
    ],
)  # fmt: skip
def test_tokens_equal_the_rankers(dtype: torch.dtype, table_dtype: torch.dtype, variant: str) -> None:
    may = variant != "january"
    scale = 1.0 if may else 5.5
    features = {"has_dwell": may, "has_post_age": may, "continuous_actions": 3 if may else 0, "input_scale": scale}
    features |= {} if may else {"actions": 130}  # inputs of a history item that end within a block
    bench = make_bench(dtype, REQUESTS if "in tiles" in variant else FEW, **features)
    if may:
        oldest = bench.config.post_age_buckets - 1
        bench.plan.candidates[0].candidates.age_buckets[0] = bench.step.host.rows["age"][0] = oldest
    bench.plan.candidates[0].candidates.author_ids[1] = 0  # nobody, though row 0 holds numbers
    bench.step.host.rows["author"][1] = 0
    ranker = bench.ranker
    ranker.tables.to(table_dtype)
    tables = Tables(ranker.tables.user.detach(), ranker.tables.post.detach(), ranker.tables.author.detach())
    tokens = split_weights(ranker, torch.device("cpu"), dtype, dtype).tokens
    residual = torch.full((CAPACITY + 64, 40), torch.nan)
    bench.rooms += [tables.user, tables.author]
    bench.kernels.embed(bench.step, tables, tokens, residual)
    residual /= scale
    pairs = [
        (context.context, candidates.candidates)
        for context, candidates in zip(bench.plan.contexts, bench.plan.candidates, strict=True)
    ]
    expected = ranker.build_inputs(collate(pairs, bench.config))[0]
    row = 0
    for number, (_, candidates) in enumerate(pairs):
        close(residual[row : row + len(candidates)], expected[number, 10 : 10 + len(candidates)], dtype)
        row += len(candidates)
    for number, work in enumerate(bench.plan.contexts):
        items = work.first_history + np.flatnonzero(work.context.post_ids[work.first_history :])
        close(residual[row : row + len(items)], expected[number, 1 + items], dtype)
        row += len(items)
    close(residual[row : row + 2], expected[:2, 0], dtype)
    assert row + 2 == bench.step.used
    assert residual[row + 2 :].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "layers", "preset", "most"),
    [(FP32, 2, "grok", 62), (BF16, 1, "grok", 20), (FP32, 1, "vanilla", 20), (BF16, 1, "gemma", 20)],
)
def test_an_engine_of_these_kernels_equals_the_plain_definition(
    dtype: torch.dtype, layers: int, preset: Any, most: int
) -> None:
    """In several steps where `most` candidates are too many for one. Ids of all sizes are hashed by numbers of all signs. A candidate
    has the bits that it has alone, with its context from the cache and computed again."""
    odd = HashSpec((-3, 2**62 + 1), (2**63 - 1, -7), 2**61 - 1, 40)
    shape = random_config(
        width=32, layers=layers, history_length=9, query_heads=2, kv_heads=1,
        post_hashes=odd, author_hashes=odd, user_hashes=odd,
    )  # fmt: skip
    config = with_preset(shape, preset)
    ranker = random_ranker(config)
    engine = SplitEngine(ranker, "cpu", dtype, cache_bytes=2**20, kernels="triton", capacity=64)
    sizes = [(9, 3), (0, 1), (4, most)]
    items = [
        Item(random_context(config, history, seed), random_candidates(config, count, seed))
        for seed, (history, count) in enumerate(sizes)
    ]
    items[0].context.post_ids[:4] = 2**64 - 1, 2**63, 0, 1
    outcomes = engine.forward(items)
    for ours, theirs in zip(outcomes, DenseEngine(ranker, torch.float32).forward(items), strict=True):
        assert np.abs(ours.scores.logits - theirs.scores.logits).max() < PARITY[dtype].logits
        assert np.abs(ours.scores.continuous - theirs.scores.continuous).max() < PARITY[dtype].probabilities
    anew = SplitEngine(ranker, "cpu", dtype, kernels="triton", capacity=64)
    for each, request, place, cache in ((engine, 0, 1, "hit"), (anew, 2, most - 1, "miss")):
        item = items[request]
        alone = each.forward([Item(item.context, item.candidates.chunk(place, place + 1))])[0]
        assert alone.cache == cache
        assert same_bits(alone.scores, outcomes[request].scores.rows(slice(place, place + 1)))
