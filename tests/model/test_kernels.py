"""Every operation of the split engine, in torch and in Triton's interpreter, against its plain fp32 definition."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported, in this process only by this file

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from model.batch import collate, hash_rows
from model.config import HashSpec, ModelConfig
from model.dense import DenseEngine
from model.engine import Item
from model.layers import rotate, soft_cap
from model.presets import with_preset
from model.ranker import Ranker
from model.split import engine as split_engine
from model.split.engine import SplitEngine
from model.split.kernels.contract import Kernels, Step, Tables, softmax_shift
from model.split.kernels.portable import KEY_TILE, PortableKernels, _Softmax
from model.split.step import (
    CANDIDATES,
    FIRST_USER,
    ROWS,
    CandidateWork,
    ContextState,
    ContextWork,
    StepPlan,
    host_arrays,
    step_arrays,
    step_bytes,
)
from model.split.tables import HostTables
from model.split.weights import Norm, split_weights
from model.split.write import StepWriter
from model.tolerances import PARITY
from tests.model import naive
from tests.model.builders import interpret_quickly, random_candidates, random_config, random_context, random_ranker

fused = pytest.importorskip("model.split.kernels.fused", reason="triton is not installed here")
products_module = pytest.importorskip("model.split.kernels.products")

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
attention_module = pytest.importorskip("model.split.kernels.attention")
build_module = pytest.importorskip("model.split.kernels.build")
order_module = pytest.importorskip("model.split.kernels.order")

interpret_quickly()
CAPACITY = 256
REQUESTS = ((9, 0, 65), (0, 0, 1), (7, 3, 2))  # history, of it known, candidates: one more than a tile
FEW = ((9, 0, 5), *REQUESTS[1:])


@pytest.mark.parametrize(("history", "chunks"), [(9, 0), (255, 0), (256, 2)])
def test_what_kernels_keep_lies_where_the_weights_are(history: int, chunks: int) -> None:
    config = random_config(width=32, history_length=history)
    weights = split_weights(random_ranker(config).to("meta"), torch.device("meta"), torch.bfloat16)
    kernels = fused.FusedKernels(config, weights, torch.bfloat16)
    kept = [each for each in vars(kernels).values() if torch.is_tensor(each)]
    assert len(kept) > 2
    assert len(kernels._partial) == chunks, "sums of a context of one chunk are kept nowhere"
    assert kernels.choices._spread == (chunks > 1)
    tables = Tables(*torch.empty(3, 8, config.width, device="meta"))
    assert all(each.is_meta for each in (*kept, fused.embedding_slots(config, tables)))
    trunk, _ = build_module.weightless(config, torch.bfloat16, 90, fused.launch, 512)
    rooms = [each for each in vars(trunk).values() if torch.is_tensor(each)]
    assert len(rooms) > 5
    assert all(each.is_meta for each in rooms)


def test_a_card_decides_how_its_kernels_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[bool] = []
    card = SimpleNamespace(major=12, minor=1, shared_memory_per_block_optin=101_376)
    monkeypatch.setattr(fused, "settle_library", lambda: settled.append(True))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    with FakeTensorMode():  # tensors of a card that is not there
        weights: Any = SimpleNamespace(heads=torch.empty(3, device="cuda"), rope=None)
        kernels = fused.FusedKernels(random_config(), weights, torch.bfloat16)
    assert settled == [True]
    with FakeTensorMode():
        made: Any = [
            split_engine._fused_kernels(random_config(), weights, torch.bfloat16, plain=plain)
            for plain in (True, False)
        ]
    assert [each._plain for each in made] == [True, False]
    assert (kernels.choices._capability, kernels._shared_bytes, kernels._dependent) == (121, 101_376, True)


def test_an_interpreter_compiles_nothing_ahead() -> None:
    make_bench("fused").kernels.compile_on_threads(pytest.fail)  # type: ignore[attr-defined]


def test_a_tail_is_of_candidates_alone() -> None:
    step = make_bench("portable").step
    tail = step.at(step.rows, tail=True)
    assert step.used > 68 == tail.used
    assert tail.at(step.rows).used == step.used


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
        values = self.random(width, scale)
        return values if isinstance(self.kernels, PortableKernels) else values[: self.step.host.counts[ROWS]].clone()

    def past(self, used: int) -> slice:
        """Rows that kernels leave alone: torch's go over whole tiles."""
        return slice(self.step.rows if isinstance(self.kernels, PortableKernels) else used, None)


def make_bench(kind: str, dtype: torch.dtype = torch.float32, requests: Any = REQUESTS, **overrides: Any) -> Bench:
    config = random_config(width=40, layers=2, history_length=max(history for history, *_ in requests), **overrides)
    ranker = random_ranker(config)
    weights = split_weights(ranker, torch.device("cpu"), dtype)
    rooms: list[Tensor] = []
    kernels = (
        PortableKernels(config, weights.rope)
        if kind == "portable"
        else fused.FusedKernels(config, weights, dtype, Watched(rooms))
    )
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
    unwritten = 0 if kind == "portable" else 77  # for Triton's kernels what a step does not write may be anything
    buffer = torch.full((step_bytes(config, CAPACITY),), unwritten, dtype=torch.uint8)
    host = host_arrays(buffer, config, CAPACITY)
    StepWriter(config, "shared", anchor).write(plan, host)
    step = Step(anchor, step_arrays(buffer, config, CAPACITY), host, plan.states())
    step = step.at(-(-step.used // 64) * 64 + 64)  # the last tile is nobody's
    rooms += [state.keys_values for state in step.states]
    return Bench(config, ranker, kernels, step, plan, generator, dtype, rooms)


POINTERS = {
    **dict.fromkeys(("counts", "numbers"), torch.int32), "slots": torch.int64,
    **dict.fromkeys(("residual", "scale", "bias", "post_scale", "post_bias", "rope", "partial", "totals", "surfaces"), torch.float32),
    **dict.fromkeys(("ages", "dwell_input", "history_actions"), torch.float32),
}  # fmt: skip


class Watched:
    """A launcher for Triton's interpreter that is as strict as a device: arguments have the types that kernels go by, a masked load
    without `other` gives garbage, what is read lies in a tensor, no two programs write to one place, and one that writes nothing reads
    no matrix."""

    def __init__(self, rooms: list[Tensor]) -> None:
        self.builder: Any = triton.runtime.interpreter.interpreter_builder
        self.rooms = rooms  # what kernels reach beside their arguments
        self.reads: dict[Any, list[Any]] = {}  # of each program of the last launch

    def __call__(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], **constants: Any) -> None:
        given = dict(zip(kernel.arg_names, arguments, strict=False))
        assert {name: given[name].dtype for name in POINTERS.keys() & given.keys()}.items() <= POINTERS.items()
        storages = [each.untyped_storage() for each in (*self.rooms, *arguments) if torch.is_tensor(each)]
        starts = np.array(sorted({each.data_ptr(): each.nbytes() for each in storages}.items()), np.int64)
        written: dict[Any, list[Any]] = {}
        busy = set()  # programs that read a matrix
        self.reads.clear()

        def load(pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
            read = pointers.data[mask.data].astype(np.int64)
            self.reads.setdefault(self.builder.grid_idx, []).append(read)
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
            fused.launch(kernel, grid, arguments, **constants)
        finally:
            del self.builder.create_masked_load, self.builder.create_masked_store, self.builder.create_dot
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
    found = attention_module.bounded_weight(tl.load(products + places), FORM, SCALE, RISE, FALL, EMULATED)
    tl.store(weights + places, found)


KINDS = pytest.mark.parametrize("kind", ["portable", "fused"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def close(one: Tensor, other: Tensor, dtype: torch.dtype) -> None:
    tolerance = PARITY[dtype].operation
    torch.testing.assert_close(one.float(), other.float(), atol=tolerance, rtol=tolerance)


@KINDS
@DTYPES
@pytest.mark.parametrize(
    ("width", "heads", "groups", "attention", "cap"),
    [
        (16, 4, 2, "causal", 30.0),
        (32, 2, 2, "bidirectional", 30.0),
        (24, 3, 1, "causal", 5.0),
        (64, 2, 1, "causal", 50.0),
        (128, 1, 1, "bidirectional", 30.0),
        (16, 4, 1, "causal", None),
        (256, 1, 1, "causal", 80.0),
    ],
)
def test_attention_equals_its_definition(
    kind: str, dtype: torch.dtype, width: int, heads: int, groups: int, attention: str, cap: float | None
) -> None:
    shape = {"query_heads": heads, "kv_heads": groups, "head_width": width}
    bench = make_bench(kind, dtype, context_attention=attention, attention_cap=cap, **shape)
    step = bench.step
    query, key_value = bench.given(heads * width, 3.0), bench.given(2 * groups * width, 3.0)
    out = torch.full_like(bench.random(heads * width), torch.nan)
    bench.kernels.attend(step, query, key_value, 1, out)
    check_attention(bench, query, key_value, out)


def check_attention(bench: Bench, query: Tensor, key_value: Tensor, out: Tensor) -> None:
    """All rows of the second layer against the definition."""
    step, config, covered = bench.step, bench.config, 0
    for first, count, request, place in step.host.tiles[: step.host.counts[2]].tolist():
        tile, state = slice(first, first + count), step.states[request]
        limits = torch.full((count,), state.length)
        if place >= 0 and config.context_attention == "causal":
            limits = torch.arange(place + 1, place + 1 + count)
        own = key_value[tile].view(count, 2, config.kv_heads, config.head_width)
        expected = naive.attend(
            query[tile].view(count, config.query_heads, config.head_width),
            *state.keys_values[1, :, : state.length],
            limits,
            (own[:, 0], own[:, 1]) if place < 0 else None,
            config.attention_multiplier,
            config.attention_cap,
        )
        close(out[tile], expected.flatten(1), bench.dtype)
        covered += count
    assert covered == step.host.counts[ROWS]
    assert out[covered:].isnan().all()


@pytest.mark.parametrize("cap", [30.0, 5.0, 60.0])
@DTYPES
def test_an_attention_weight_is_relative_to_the_shift(dtype: torch.dtype, cap: float) -> None:
    """So that no context is long enough for a sum of weights to overflow."""
    products = torch.tensor([-700.0, -300.0, -7.0, 0.0, 0.5, 20.0, 400.0, 700.0])
    weights, shift = torch.empty(8), softmax_shift(cap)
    assert shift == min(cap, 80 - cap)
    constants = fused.softmax_constants(0.25, cap, dtype)
    assert (constants["FORM"] == "fast_tanh") == (dtype == BF16)
    weigh[(1,)](products, weights, **constants, EMULATED=True)
    exact = torch.exp(soft_cap(products.double() * 0.25, cap) - shift)
    torch.testing.assert_close(weights.double(), exact, rtol=0.05 if dtype == torch.bfloat16 else 1e-4, atol=0)
    plain = _Softmax(random_config(attention_multiplier=0.25, attention_cap=cap), products[None])
    torch.testing.assert_close(plain.weights(products[None], torch.tensor(True))[0].double(), exact, rtol=1e-4, atol=0)


@KINDS
@DTYPES
def test_rope_turns_queries_and_keys_and_stores_contexts(kind: str, dtype: torch.dtype) -> None:
    bench = make_bench(kind, dtype, query_heads=3, kv_heads=3, head_width=24)
    step = bench.step
    qkv = bench.given(9 * 24)
    before = qkv.clone()
    states = [state.keys_values.clone() for state in step.states]
    bench.kernels.rotate(step, qkv[:, :72], qkv[:, 72:], 1)
    used = int(step.host.counts[ROWS])
    assert torch.equal(qkv[bench.past(used)], before[bench.past(used)])
    cos, sin = split_weights(bench.ranker, torch.device("cpu"), dtype).rope[:, step.arrays.positions[:used].long()]
    cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    expected = rotate(before[:used, :144].reshape(used, 6, 24), cos, sin).flatten(1)
    close(qkv[:used, :144], expected, dtype)
    assert torch.equal(qkv[:used, 144:], before[:used, 144:])
    query = before[:, :72].clone()  # in a tensor of its own, which ends where its heads end
    bench.kernels.rotate(step, query, None, 1)
    assert torch.equal(query[:used], qkv[:used, :72])
    for row, (request, place) in enumerate(step.host.owners[:used].tolist()):
        if place >= 0:
            states[request][1, :, place] = qkv[row, 72:].view(2, 3, 24)
    assert (step.host.owners[:used, 1] >= 0).sum() == used - step.host.counts[CANDIDATES] == 10 + 1 + 4
    assert all(torch.equal(state.keys_values, expected) for state, expected in zip(step.states, states, strict=True))


@KINDS
@DTYPES
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize(("sandwich", "centred"), [(True, False), (False, True)])
def test_norms_add_the_residual(kind: str, dtype: torch.dtype, tail: bool, sandwich: bool, centred: bool) -> None:
    bench = make_bench(kind, dtype)
    mixed, residual = bench.random(40, 2.0) + 1, bench.random(40, dtype=torch.float32) - 1
    norm, other = (Norm(torch.rand(40) + 0.5, torch.rand(40) if centred else None) for _ in range(2))
    post = other if sandwich else None
    expected = naive.add_norm(mixed, post, residual, norm, bench.config.norm_epsilon)
    first = naive.add_norm(None, None, residual, norm, bench.config.norm_epsilon)[1]
    used = int(bench.step.host.counts[CANDIDATES if tail else ROWS])
    step = bench.step.at(-(-used // 64) * 64, tail=tail)
    out, before, past = torch.zeros_like(mixed), residual.clone(), bench.past(used)
    bench.kernels.norm(step, None, None, residual, norm, out)
    close(out[:used], first[:used], dtype)
    assert torch.equal(residual, before)
    bench.kernels.norm(step, mixed, post, residual, norm, out)
    close(residual[:used], expected[0][:used], torch.float32)
    close(out[:used], expected[1][:used], dtype)
    assert torch.equal(residual[past], before[past])
    assert not out[past].any()


@KINDS
@DTYPES
@pytest.mark.parametrize(("activation", "gated"), [("gelu_tanh", True), ("gelu", False), ("silu", True)])
def test_gate_is_the_activation_times_value(kind: str, dtype: torch.dtype, activation: Any, gated: bool) -> None:
    bench = make_bench(kind, dtype, activation=activation, gated=gated)
    width = 1104 if activation == "silu" else 72  # more and less than a block
    gate_value = bench.given((1 + gated) * width, 3.0)
    out = torch.zeros(CAPACITY + 64, width, dtype=dtype)
    bench.kernels.gate(bench.step, gate_value, out)
    used = int(bench.step.host.counts[ROWS])
    close(out[:used], naive.gate(gate_value, activation, gated=gated)[:used], dtype)
    assert not out[bench.past(used)].any()


@KINDS
@DTYPES
@pytest.mark.parametrize(("inner", "columns"), [(64, 96), (88, 32), (176, 144)])
def test_product_equals_its_definition(kind: str, dtype: torch.dtype, inner: int, columns: int) -> None:
    bench = make_bench(kind, dtype)
    x, weight = bench.given(inner), (torch.randn(inner, columns, generator=bench.generator) / inner**0.5).to(dtype)
    out = torch.full((CAPACITY + 64, columns), torch.nan, dtype=dtype)
    used = int(bench.step.host.counts[ROWS])
    x[used:] = torch.nan  # what rows past a step's own hold must reach no other
    bench.kernels.multiply(bench.step, x, weight, out)
    close(out[:used], naive.multiply(x, weight)[:used], dtype)
    assert out[bench.past(used)].isnan().all(), "rows that nobody asked for"


def test_the_library_is_told_to_keep_one_order_of_additions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "7")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = (True, True)
    products_module.settle_library()
    assert not matmul.allow_bf16_reduced_precision_reduction
    assert not matmul.allow_bf16_reduced_precision_reduction_split_k
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["CUBLASLT_WORKSPACE_SIZE"] == "7", "what an operator has set stays"
    monkeypatch.delenv("CUBLASLT_WORKSPACE_SIZE")
    preferred: list[str] = []
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred.append)
    products_module.settle_library()
    assert preferred == ["cublaslt"]
    assert os.environ["CUBLASLT_WORKSPACE_SIZE"] == "1"


@pytest.mark.parametrize("kind", [*products_module.PRODUCT_TILES, "library"])
def test_a_product_of_any_kind_equals_its_definition(kind: str) -> None:
    bench = make_bench("fused", torch.bfloat16)
    bench.kernels.choices.forced = kind  # type: ignore[attr-defined]
    x, weight = bench.random(176), (torch.randn(176, 144, generator=bench.generator) / 13).bfloat16()
    out = torch.full((len(x), 144), torch.nan).bfloat16()
    bench.step.arrays.counts[ROWS] = 101
    if kind == "library":
        bench.kernels._launcher = None  # type: ignore[attr-defined]  # nothing is launched
    bench.kernels.multiply(bench.step.at(128), x, weight, out)
    close(out[:101], naive.multiply(x, weight)[:101], torch.bfloat16)
    assert kind == "library" or out[101:].isnan().all(), "rows that the step does not have"


@pytest.mark.parametrize("kind", ["fused 64x64", "fused 128x128"])
def test_a_gated_product_ends_where_its_columns_end(kind: str) -> None:
    bench = make_bench("fused", BF16)
    bench.kernels.choices.forced = kind  # type: ignore[attr-defined]
    x, weight = bench.given(88), (torch.randn(88, 2 * 72, generator=bench.generator) / 9).bfloat16()
    out, used = torch.full((CAPACITY + 64, 72), torch.nan).bfloat16(), int(bench.step.host.counts[ROWS])
    bench.kernels.multiply_gate(bench.step, x, weight, bench.random(2 * 72), out)
    close(out[:used], naive.gate(naive.multiply(x, weight).bfloat16())[:used], BF16)
    assert out[bench.past(used)].isnan().all(), "rows that nobody asked for"


# history, of it known, candidates: chunks of 64 keys, ends within and between, and a user of whom nothing is known
LONG = [(150, 0, 65), (0, 0, 1), (129, 100, 3), (-1, 0, 2)]


@pytest.mark.parametrize(
    ("attention", "cap"),
    [("causal", 30.0), ("bidirectional", None)],
)
def test_programs_for_single_chunks_of_keys_give_the_bits_of_one_for_all(
    attention: str, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "CHUNK_KEYS", 64)
    shape = {"query_heads": 2, "kv_heads": 1, "head_width": 32, "context_attention": attention}
    bench = make_bench("fused", torch.bfloat16, LONG, attention_cap=cap, **shape)
    kernels: Any = bench.kernels
    query, key_value = bench.random(64, 3.0), bench.random(64, 3.0)
    results = []
    for kind in ("64x64", "spread"):
        kernels.choices.forced = kind
        kernels._partial.fill_(torch.nan)
        results.append(torch.full_like(query, torch.nan))
        kernels.attend(bench.step.at(256), query, key_value, 1, results[-1])
        assert kernels._partial.isnan().all() == (kind != "spread")
    reads = kernels._launcher.reads.items()  # of what adds the chunks up
    idle, busy = (
        [len(each) for place, each in reads if (place[1] >= bench.step.host.counts[2]) == is_idle]
        for is_idle in (True, False)
    )
    assert max(idle) < min(busy), "a program without rows goes home"
    assert torch.equal(results[0].view(torch.int16), results[1].view(torch.int16))
    check_attention(bench, query, key_value, results[1])


def numbered(bench: Bench, tables: Tables) -> Tables:
    """The tables as one that is renumbered for the step, as where they stay in host memory."""
    source = HostTables(bench.config, tables, torch.device("cpu"), CAPACITY)
    source.prepare(bench.step.host, 1)
    return source.tables


FP32, BF16 = torch.float32, torch.bfloat16


@KINDS
@pytest.mark.parametrize(
    ("dtype", "table_dtype", "variant"),
    [
        (FP32, FP32, "may, in tiles"), (BF16, BF16, "may"), (FP32, BF16, "january"), (BF16, FP32, "january"),
        (BF16, BF16, "may, in tiles, numbered"),
    ],
)  # fmt: skip
def test_tokens_equal_the_rankers(kind: str, dtype: torch.dtype, table_dtype: torch.dtype, variant: str) -> None:
    may = variant != "january"
    scale = 1.0 if may else 5.5
    features = {"has_dwell": may, "has_post_age": may, "continuous_actions": 3 if may else 0, "input_scale": scale}
    features |= {} if may else {"actions": 130}  # inputs of a history item that end within a block
    bench = make_bench(kind, dtype, REQUESTS if "in tiles" in variant else FEW, **features)
    if may:
        oldest = bench.config.post_age_buckets - 1
        bench.plan.candidates[0].candidates.age_buckets[0] = bench.step.host.owners[0, 0] = oldest
    bench.plan.candidates[0].candidates.author_ids[1] = bench.step.host.ids[1, 1] = (
        0  # nobody, though row 0 holds numbers
    )
    ranker = bench.ranker
    ranker.tables.to(table_dtype)
    tables = Tables(ranker.tables.user.detach(), ranker.tables.post.detach(), ranker.tables.author.detach())
    tables = numbered(bench, tables) if variant.endswith("numbered") else tables
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
    assert row + 2 == bench.step.host.counts[ROWS]
    assert residual[row + 2 :].isnan().all()


def test_ids_are_hashed_as_the_published_pipeline_hashes_them() -> None:
    """Every embedding of ids of all sizes, above 2^63 too: its own row, or one of another value would be found."""
    odd = HashSpec((-3, 2**62 + 1), (2**63 - 1, -7), 2**61 - 1, 40)
    bench = make_bench("fused", FP32, FEW, post_hashes=odd, author_hashes=odd, user_hashes=odd)
    ids = bench.step.host.ids
    ids[0] = (2**64 - 1, 2**63)
    ids[1] = (1, 0)
    tables = [torch.randn(40, 40, generator=bench.generator) for _ in range(3)]
    tokens = split_weights(bench.ranker, torch.device("cpu"), torch.float32).tokens
    bench.rooms += tables
    bench.kernels.embed(bench.step, Tables(*tables), tokens, bench.random(40))
    counts = bench.step.host.counts
    first_user, rows = int(counts[FIRST_USER]), int(counts[ROWS])
    parts = [(tables[1], ids[:first_user, 0]), (tables[2], ids[:first_user, 1]), (tables[0], ids[first_user:rows, 0])]
    posts, authors, users = (
        torch.where((found := torch.from_numpy(hash_rows(part, odd)))[..., None] == 0, 0.0, table[found]).flatten(1)
        for table, part in parts
    )
    assert torch.equal(bench.kernels._inputs[:first_user, :80], posts)
    assert torch.equal(bench.kernels._inputs[:first_user, 80:160], authors)
    assert torch.equal(bench.kernels._inputs[first_user:rows, :80], users)


@pytest.mark.parametrize(
    ("dtype", "layers", "preset", "most"),
    [
        (FP32, 2, "grok", 62), (BF16, 1, "grok", 20), (FP32, 1, "vanilla", 20),
        (BF16, 1, "gemma", 20),
    ],
)  # fmt: skip
def test_an_engine_of_these_kernels_equals_the_plain_definition(
    dtype: torch.dtype, layers: int, preset: Any, most: int
) -> None:
    """In several steps where `most` candidates are too many for one."""
    shape = random_config(width=32, layers=layers, history_length=9, query_heads=2, kv_heads=1)
    config = with_preset(shape, preset)
    ranker = random_ranker(config)
    engine = SplitEngine(ranker, "cpu", dtype, cache_bytes=2**20, kernels="fused", capacity=64)
    if (dtype, preset) == (torch.bfloat16, "grok"):
        kernels: Any = engine._kernels
        kernels.choices.forced = "fused 64x64"
        kernels.gate = kernels.rotate = None  # would be called by none
    sizes = [(9, 3), (0, 1), (4, most)]
    items = [
        Item(random_context(config, history, seed), random_candidates(config, count, seed))
        for seed, (history, count) in enumerate(sizes)
    ]
    items[0].context.post_ids[2] = 0
    outcomes = engine.forward(items)
    for ours, theirs in zip(outcomes, DenseEngine(ranker, torch.float32).forward(items), strict=True):
        assert np.abs(ours.scores.logits - theirs.scores.logits).max() < PARITY[dtype].logits
        assert np.abs(ours.scores.continuous - theirs.scores.continuous).max() < PARITY[dtype].probabilities
    alone = engine.forward([Item(items[0].context, items[0].candidates.chunk(1, 2))])[0]
    assert alone.cache == "hit"
    assert np.array_equal(alone.scores.logits, outcomes[0].scores.logits[1:2])


REFERENCE = ["64x64"]
LAUNCHED: dict[str, tuple[torch.dtype, list[str], dict[str, int], dict[str, list[Any]]]] = {
    "wide": (BF16, [*REFERENCE, "spread"], {"width": 640, "head_width": 128, "history_length": 300}, {
        "gather_rows": [(192, 5, 4, None)], "project_tiles": [(10, 5, 4, 4)], "norm_rows": [(192, 8, None), (64, 8, None)],
        "multiply_tiles": [
            (16, 3, 4, 4), (10, 3, 4, 4), (28, 3, 4, 4), (8, 3, 4, 4), (8, 1, 4, 4), (10, 1, 4, 4), (28, 1, 4, 4), (1, 1, 4, 4),
        ],
        "rotate_rows": [(192, 4, None), (64, 4, None)], "gate_rows": [(192, 1, 4, None), (64, 1, 4, None)],
        "attend_tiles": [(4, 22, 1, 8, 2), (4, 18, 1, 8, 2), (4, 22, 2, 8, 2), (4, 18, 2, 8, 2)],
        "add_chunks": [(4, 22, 4, None), (4, 18, 4, None)],
    }),
    "narrow": (FP32, REFERENCE, {"width": 40, "head_width": 24}, {
        "gather_rows": [(192, 5, 1, None)], "project_tiles": [(1, 5, 4, 4)], "norm_rows": [(192, 1, None), (64, 1, None)],
        "multiply_tiles": [(3, 3, 4, 4), (1, 3, 4, 4), (2, 3, 4, 4), (2, 1, 4, 4), (1, 1, 4, 4)],
        "rotate_rows": [(192, 4, None), (64, 4, None)], "gate_rows": [(192, 1, 4, None), (64, 1, 4, None)],
        "attend_tiles": [(4, 22, 1, 4, 2), (4, 18, 1, 4, 2)],
    }),
    "widest": (BF16, REFERENCE, {"width": 4096, "head_width": 64}, {
        "gather_rows": [(192, 5, 4, None)], "project_tiles": [(64, 5, 4, 4)], "norm_rows": [(192, 32, None), (64, 32, None)],
        "multiply_tiles": [
            (8, 3, 4, 4), (64, 3, 4, 4), (172, 3, 4, 4), (4, 3, 4, 4), (4, 1, 4, 4), (64, 1, 4, 4), (172, 1, 4, 4), (1, 1, 4, 4),
        ],
        "rotate_rows": [(192, 4, None), (64, 4, None)], "gate_rows": [(192, 6, 4, None), (64, 6, 4, None)],
        "attend_tiles": [(4, 22, 1, 4, 2), (4, 18, 1, 4, 2)],
    }),
}  # fmt: skip


@pytest.mark.parametrize(("dtype", "kinds", "shape", "expected"), LAUNCHED.values(), ids=LAUNCHED)
def test_launches_are_those_whose_times_were_measured(
    dtype: torch.dtype, kinds: list[str], shape: dict[str, int], expected: dict[str, Any]
) -> None:
    """Grid, warps and stages, for 192 rows and a tail of 64: other ones give the same numbers in another time."""
    found: dict[str, dict[Any, None]] = {}

    def note(kernel: Any, grid: tuple[int, ...], arguments: Any, **constants: Any) -> None:
        how = (*grid, constants["num_warps"], constants.get("num_stages"))
        found.setdefault(kernel.fn.__name__, {})[how] = None
        assert constants["DEPENDENT"] == constants["launch_pdl"] is True

    build_module.forward(random_config(layers=2, **shape), dtype, 90, note, kinds, 192, 64)
    assert {name: list(launches) for name, launches in found.items()} == expected


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_a_kernel_overlaps_the_one_before_only_where_devices_can(capability: int) -> None:
    bench, said = make_bench("fused"), []
    weights = split_weights(bench.ranker, torch.device("cpu"), FP32)
    for plain in (False, True):
        kernels = fused.FusedKernels(
            bench.config, weights, FP32, lambda *_, **given: said.append(given), plain=plain, capability=capability
        )
        kernels.gate(bench.step, bench.random(2 * 88), bench.random(88))
        assert kernels._shared_bytes == {80: 163, 90: 227, 100: 227}[capability] * 1024
    assert [given["DEPENDENT"] for given in said] == [capability >= 90, False]
    assert ["launch_pdl" in given for given in said] == [capability >= 90, False]


@pytest.mark.parametrize("name", ["multiply", "gate_value", "qkv", "embed"])
def test_what_is_fetched_ahead_is_what_is_read_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into the cache, of a weight, a line of 128 bytes each, before a kernel waits for the one before it."""
    bench = make_bench("fused", BF16, FEW[:2], query_heads=3, kv_heads=1, head_width=24, widening=5.0)
    weights = split_weights(bench.ranker, torch.device("cpu"), BF16, BF16)
    watched, layer, ahead, waits, before = Watched(bench.rooms), weights.layers[0], {}, [], int(name == "embed")
    kernels = fused.FusedKernels(bench.config, weights, BF16, watched, capability=90)

    def fetch(asm: str, constraints: str, addresses: Any, *rest: Any, **how: Any) -> None:
        assert waits.count(watched.builder.grid_idx) == before
        ahead.setdefault(watched.builder.grid_idx, []).append(addresses[0].handle.data.astype(np.int64).ravel())

    monkeypatch.setattr(tl, "inline_asm_elementwise", fetch)
    monkeypatch.setattr(order_module, "gdc_wait", lambda: waits.append(watched.builder.grid_idx))
    monkeypatch.setattr(order_module, "gdc_launch_dependents", lambda: None)
    kernels.choices.forced = {"multiply": "128x128", "embed": "64x64"}.get(name, "fused 64x64")
    x, out, weight = bench.random(40), bench.random(480), layer.gate_value
    if name == "multiply":
        weight = torch.randn(40, 150).bfloat16()  # two tiles of two lines each, the last beyond its end
        kernels.multiply(bench.step, x, weight, bench.random(weight.shape[1]))
    elif name == "gate_value":
        kernels.multiply_gate(bench.step, x, weight, out, bench.random(weight.shape[1] // 2))
    elif name == "qkv":
        assert layer.qkv is not None
        weight = layer.qkv
        kernels.multiply_rotate(bench.step, x, weight, bench.random(weight.shape[1]), "qkv", 1)
    else:
        tables = [
            table.detach() for table in (bench.ranker.tables.user, bench.ranker.tables.post, bench.ranker.tables.author)
        ]
        bench.rooms += tables
        weight = weights.tokens.projection
        kernels.embed(bench.step, Tables(*tables), weights.tokens, bench.random(40, dtype=FP32))
    start, end = weight.data_ptr(), weight.data_ptr() + weight.nbytes
    covered = 0
    for program, reads in watched.reads.items():
        of_weight = [read for read in reads if len(read) and start <= read.min() < end]
        lines = np.concatenate(ahead[program])
        assert waits.count(program) == before + 1
        assert np.all((start <= lines) & (lines < end))
        for read in of_weight[: 1 + (name in ("gate_value", "qkv"))]:
            gaps = read[:, None] - lines
            assert np.all(np.any((gaps >= 0) & (gaps < 128), 1))
            covered += 1
    assert covered > 1
