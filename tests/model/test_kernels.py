"""Every operation of the split engine, in torch and in Triton's interpreter, against its plain fp32 definition."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported, in this process only by this file

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model.batch import collate, hash_rows
from model.config import HashSpec, ModelConfig
from model.dense import DenseEngine
from model.engine import Item
from model.layers import rotate, soft_cap
from model.presets import with_preset
from model.ranker import Ranker
from model.split.engine import SplitEngine
from model.split.kernels.contract import Kernels, Step, Tables, softmax_shift
from model.split.kernels.portable import KEY_TILE, PortableKernels
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

interpret_quickly()
CAPACITY = 256


@pytest.mark.parametrize("history", [9, 300])
def test_what_kernels_keep_lies_where_the_weights_are(history: int) -> None:
    config = random_config(width=32, history_length=history)
    weights = split_weights(random_ranker(config).to("meta"), torch.device("meta"), torch.bfloat16)
    kept = [
        each for each in vars(fused.FusedKernels(config, weights, torch.bfloat16)).values() if torch.is_tensor(each)
    ]
    assert len(kept) > 2
    tables = Tables(*torch.empty(3, 8, config.width, device="meta"))
    assert all(each.is_meta for each in (*kept, fused.embedding_slots(config, tables)))


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

    def random(self, width: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(CAPACITY + 64, width, generator=self.generator) * scale
        return values.to(dtype or self.dtype)


def make_bench(
    kind: str, dtype: torch.dtype = torch.float32, requests: Any = ((9, 0, 65), (0, 0, 1), (7, 3, 2)), **overrides: Any
) -> Bench:
    config = random_config(width=32, layers=2, history_length=max(history for history, *_ in requests), **overrides)
    ranker = random_ranker(config)
    weights = split_weights(ranker, torch.device("cpu"), dtype)
    kernels = (
        PortableKernels(config, weights.rope) if kind == "portable" else fused.FusedKernels(config, weights, dtype)
    )
    generator = torch.Generator().manual_seed(5)
    plan = StepPlan()
    for number, (history, known, candidates) in enumerate(requests):
        context = random_context(config, history, number)
        shape = (config.layers, 2, -(-(1 + history) // KEY_TILE) * KEY_TILE, config.kv_heads, config.head_width)
        state = ContextState(torch.randn(shape, generator=generator).to(dtype), 1 + history, history)
        work = ContextWork(context, state, known, 1 + known if known else 0)
        plan.add_context(work, state.length - work.first_index)
        plan.add_candidates(CandidateWork(number, 0, random_candidates(config, candidates, number), state))
    anchor = torch.empty(64, dtype=dtype)
    buffer = torch.zeros(step_bytes(config, CAPACITY), dtype=torch.uint8)
    host = host_arrays(buffer, config, CAPACITY)
    StepWriter(config, "shared", anchor).write(plan, host)
    step = Step(anchor, step_arrays(buffer, config, CAPACITY), host, plan.states())
    step = step.at(-(-step.used // 64) * 64)
    return Bench(config, ranker, kernels, step, plan, generator, dtype)


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
        (16, 4, 2, "causal", (30.0, "tanh")),
        (32, 2, 2, "bidirectional", (30.0, "tanh")),
        (24, 3, 1, "causal", (5.0, "tanh")),
        (64, 2, 1, "causal", (50.0, "tanh")),
        (128, 1, 1, "bidirectional", (30.0, "tanh")),
        (16, 4, 1, "causal", (None, "tanh")),
        (32, 2, 1, "causal", (80.0, "softsign")),
        (256, 1, 1, "causal", (5.0, "softsign")),
    ],
)
def test_attention_equals_its_definition(
    kind: str, dtype: torch.dtype, width: int, heads: int, groups: int, attention: str, cap: tuple[float | None, Any]
) -> None:
    shape = {"query_heads": heads, "kv_heads": groups, "head_width": width}
    bench = make_bench(kind, dtype, context_attention=attention, attention_cap=cap[0], cap_form=cap[1], **shape)
    step = bench.step
    query, key_value = bench.random(heads * width, 3.0), bench.random(2 * groups * width, 3.0)
    out = torch.full_like(query, torch.nan)
    bench.kernels.attend(step, query, key_value, 1, out)
    covered = 0
    for first, count, request, place in step.host.tiles[: step.host.counts[2]].tolist():
        tile, state = slice(first, first + count), step.states[request]
        limits = torch.full((count,), state.length)
        if place >= 0 and attention == "causal":
            limits = torch.arange(place + 1, place + 1 + count)
        own = key_value[tile].view(count, 2, groups, width)
        expected = naive.attend(
            query[tile].view(count, heads, width),
            *state.keys_values[1, :, : state.length],
            limits,
            (own[:, 0], own[:, 1]) if place < 0 else None,
            bench.config.attention_multiplier,
            *cap,
        )
        close(out[tile], expected.flatten(1), dtype)
        covered += count
    assert covered == step.host.counts[ROWS]


@pytest.mark.parametrize(("cap", "form"), [(30.0, "tanh"), (5.0, "tanh"), (60.0, "softsign"), (5.0, "softsign")])
@DTYPES
def test_an_attention_weight_is_relative_to_the_shift(dtype: torch.dtype, cap: float, form: Any) -> None:
    """So that no context is long enough for a sum of weights to overflow."""
    products = torch.tensor([-700.0, -300.0, -7.0, 0.0, 0.5, 20.0, 400.0, 700.0])
    weights, shift = torch.empty(8), softmax_shift(cap)
    constants = fused.softmax_constants(0.25, cap, form, dtype)
    weigh[(1,)](products, weights, **constants, EMULATED=True)
    exact = torch.exp(soft_cap(products.double() * 0.25, cap, form) - shift)
    torch.testing.assert_close(weights.double(), exact, rtol=0.05 if dtype == torch.bfloat16 else 1e-4, atol=0)


@KINDS
@DTYPES
def test_rope_turns_queries_and_keys_and_stores_contexts(kind: str, dtype: torch.dtype) -> None:
    bench = make_bench(kind, dtype, query_heads=3, kv_heads=1, head_width=24)
    step = bench.step
    qkv = bench.random(5 * 24)
    before = qkv.clone()
    bench.kernels.rotate(step, qkv[:, :72], qkv[:, 72:], 1)
    used = int(step.host.counts[ROWS])
    cos, sin = split_weights(bench.ranker, torch.device("cpu"), dtype).rope[:, step.arrays.positions[:used].long()]
    cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    expected = rotate(before[:used, :96].reshape(used, 4, 24), cos, sin).flatten(1)
    close(qkv[:used, :96], expected, dtype)
    assert torch.equal(qkv[:used, 96:], before[:used, 96:])
    stored = 0
    for row, (request, place) in enumerate(step.host.owners[:used].tolist()):
        if place >= 0:
            state = step.states[request].keys_values
            assert torch.equal(state[1, 0, place].flatten(), qkv[row, 72:96])
            assert torch.equal(state[1, 1, place].flatten(), qkv[row, 96:])
            stored += 1
    assert stored == used - step.host.counts[CANDIDATES] == 10 + 1 + 4


@KINDS
@DTYPES
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize(("sandwich", "centred"), [(True, False), (False, True)])
def test_norms_add_the_residual(kind: str, dtype: torch.dtype, tail: bool, sandwich: bool, centred: bool) -> None:
    bench = make_bench(kind, dtype)
    mixed, residual = bench.random(32, 2.0) + 1, bench.random(32, dtype=torch.float32) - 1
    norm, other = (Norm(torch.rand(32) + 0.5, torch.rand(32) if centred else None) for _ in range(2))
    post = other if sandwich else None
    expected = naive.add_norm(mixed, post, residual, norm, bench.config.norm_epsilon)
    first = naive.add_norm(None, None, residual, norm, bench.config.norm_epsilon)[1]
    used = int(bench.step.host.counts[CANDIDATES if tail else ROWS])
    step = bench.step.at(-(-used // 64) * 64, tail=tail)
    out = torch.zeros_like(mixed)
    bench.kernels.norm(step, None, None, residual, norm, out)
    close(out[:used], first[:used], dtype)
    bench.kernels.norm(step, mixed, post, residual, norm, out)
    close(residual[:used], expected[0][:used], torch.float32)
    close(out[:used], expected[1][:used], dtype)


@KINDS
@DTYPES
def test_heads_are_normed_one_by_one(kind: str, dtype: torch.dtype) -> None:
    bench = make_bench(kind, dtype)
    qkv, scale = bench.random(5 * 24, 3.0), torch.rand(24) + 0.5
    before, used = qkv.clone(), int(bench.step.host.counts[ROWS])
    bench.kernels.norm_heads(bench.step, qkv[:, 24:], 3, scale)
    expected = naive.normed(before[:used, 24:96].reshape(-1, 24), Norm(scale), bench.config.norm_epsilon)
    close(qkv[:used, 24:96], expected.view(used, -1), dtype)
    assert torch.equal(qkv[:, :24], before[:, :24])
    assert torch.equal(qkv[:, 96:], before[:, 96:])


@KINDS
@DTYPES
@pytest.mark.parametrize(("activation", "gated"), [("gelu_tanh", True), ("gelu", False), ("silu", True)])
def test_gate_is_the_activation_times_value(kind: str, dtype: torch.dtype, activation: Any, gated: bool) -> None:
    bench = make_bench(kind, dtype, activation=activation, gated=gated)
    gate_value = bench.random((1 + gated) * 64, 3.0)
    out = torch.zeros(len(gate_value), 64, dtype=dtype)
    bench.kernels.gate(bench.step, gate_value, out)
    used = int(bench.step.host.counts[ROWS])
    close(out[:used], naive.gate(gate_value, activation, gated=gated)[:used], dtype)


@KINDS
@DTYPES
@pytest.mark.parametrize(("inner", "columns"), [(64, 96), (88, 32), (176, 144)])
def test_product_equals_its_definition(kind: str, dtype: torch.dtype, inner: int, columns: int) -> None:
    bench = make_bench(kind, dtype)
    x, weight = bench.random(inner), (torch.randn(inner, columns, generator=bench.generator) / inner**0.5).to(dtype)
    out = torch.full((len(x), columns), torch.nan, dtype=dtype)
    bench.kernels.multiply(bench.step, x, weight, out)
    used = int(bench.step.host.counts[ROWS])
    close(out[:used], naive.multiply(x, weight)[:used], dtype)
    assert out[bench.step.rows :].isnan().all(), "rows that nobody asked for"


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


@pytest.mark.parametrize("kind", [*products_module.PRODUCT_TILES, "library"])
def test_a_product_of_any_kind_equals_its_definition(kind: str) -> None:
    bench = make_bench("fused", torch.bfloat16)
    bench.kernels.choices.forced = kind  # type: ignore[attr-defined]
    x, weight = bench.random(176), (torch.randn(176, 144, generator=bench.generator) / 13).bfloat16()
    out = torch.full((len(x), 144), torch.nan).bfloat16()
    bench.step.arrays.counts[ROWS] = 101
    bench.kernels.multiply(bench.step.at(128), x, weight, out)
    close(out[:101], naive.multiply(x, weight)[:101], torch.bfloat16)
    assert kind == "library" or out[101:].isnan().all(), "rows that the step does not have"


LONG = [
    (150, 0, 65),
    (0, 0, 1),
    (129, 100, 3),
]  # history, of it known, candidates: chunks of 64 keys, ends within and between


@pytest.mark.parametrize(
    ("attention", "cap"),
    [("causal", (30.0, "tanh")), ("bidirectional", (None, "tanh")), ("causal", (80.0, "softsign"))],
)
def test_programs_for_single_chunks_of_keys_give_the_bits_of_one_for_all(
    attention: str, cap: tuple[float | None, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "CHUNK_KEYS", 64)
    shape = {"query_heads": 2, "kv_heads": 1, "head_width": 32, "context_attention": attention}
    bench = make_bench("fused", torch.bfloat16, LONG, attention_cap=cap[0], cap_form=cap[1], **shape)
    kernels: Any = bench.kernels
    query, key_value = bench.random(64, 3.0), bench.random(64, 3.0)
    results = []
    for kind in ("64x64", "spread"):
        kernels.choices.forced = kind
        kernels._partial.fill_(torch.nan)
        results.append(torch.full_like(query, torch.nan))
        kernels.attend(bench.step.at(256), query, key_value, 1, results[-1])
        assert kernels._partial.isnan().all() == (kind != "spread")
    used = int(bench.step.host.counts[ROWS])
    assert torch.equal(results[0].view(torch.int16), results[1].view(torch.int16))
    assert results[0][:used].isfinite().all()
    first, count, request, _ = bench.step.host.tiles[0].tolist()
    state, own = bench.step.states[request], key_value[first : first + count].view(count, 2, 1, 32)
    expected = naive.attend(
        query[first : first + count].view(count, 2, 32), *state.keys_values[1, :, : state.length],
        torch.full((count,), state.length), (own[:, 0], own[:, 1]), bench.config.attention_multiplier, *cap,
    )  # fmt: skip
    close(results[1][first : first + count], expected.flatten(1), torch.bfloat16)


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
        (FP32, FP32, "may"), (BF16, BF16, "may"), (FP32, BF16, "january"), (BF16, FP32, "january"), (BF16, BF16, "may, numbered"),
    ],
)  # fmt: skip
def test_tokens_equal_the_rankers(kind: str, dtype: torch.dtype, table_dtype: torch.dtype, variant: str) -> None:
    may = variant != "january"
    scale = 1.0 if may else 5.5
    bench = make_bench(
        kind, dtype, has_dwell=may, has_post_age=may, continuous_actions=3 if may else 0, input_scale=scale
    )
    ranker = bench.ranker
    ranker.tables.to(table_dtype)
    tables = Tables(ranker.tables.user.detach(), ranker.tables.post.detach(), ranker.tables.author.detach())
    tables = numbered(bench, tables) if variant.endswith("numbered") else tables
    tokens = split_weights(ranker, torch.device("cpu"), dtype, dtype).tokens
    residual = torch.full((CAPACITY + 64, 32), torch.nan)
    bench.kernels.embed(bench.step, tables, tokens, residual)
    residual /= scale
    pairs = [
        (context.context, candidates.candidates)
        for context, candidates in zip(bench.plan.contexts, bench.plan.candidates, strict=True)
    ]
    expected = ranker.embed(collate(pairs, bench.config))[0]
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
    bench = make_bench("fused", post_hashes=odd, author_hashes=odd, user_hashes=odd)
    ids = bench.step.host.ids
    ids[0] = (2**64 - 1, 2**63)
    ids[1] = (1, 0)
    tables = [torch.randn(40, 32, generator=bench.generator) for _ in range(3)]
    tokens = split_weights(bench.ranker, torch.device("cpu"), torch.float32).tokens
    bench.kernels.embed(bench.step, Tables(*tables), tokens, bench.random(32))
    counts = bench.step.host.counts
    first_user, rows = int(counts[FIRST_USER]), int(counts[ROWS])
    parts = [(tables[1], ids[:first_user, 0]), (tables[2], ids[:first_user, 1]), (tables[0], ids[first_user:rows, 0])]
    posts, authors, users = (
        torch.where((found := torch.from_numpy(hash_rows(part, odd)))[..., None] == 0, 0.0, table[found]).flatten(1)
        for table, part in parts
    )
    assert torch.equal(bench.kernels._inputs[:first_user, :64], posts)
    assert torch.equal(bench.kernels._inputs[:first_user, 64:128], authors)
    assert torch.equal(bench.kernels._inputs[first_user:rows, :64], users)


@pytest.mark.parametrize(
    ("dtype", "layers", "preset", "most"),
    [
        (FP32, 2, "grok", 62), (BF16, 1, "grok", 20), (FP32, 1, "vanilla", 20), (FP32, 1, "phoenix-2026", 20),
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
