"""The C++ CPU engine against the plain definition, and its bits against its own when batch, order and cache change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from loadtest.bits import Compositions, run, small_config
from model.create import EngineOptions, create_engine
from model.dense import DenseEngine
from model.engine import Engine, EngineError, Item
from model.native import packing
from model.native.build import KernelUnavailable
from model.native.engine import NativeEngine
from model.native.kernel import Kernel, load_kernel
from model.selftest import check_isolation, same_bits
from model.tolerances import PARITY
from tests.model.builders import random_config, random_ranker, random_request

VARIANTS = {
    "may": {},
    "january": {"has_dwell": False, "has_post_age": False, "continuous_actions": 0},
    "bidirectional": {"context_attention": "bidirectional"},
    "right-anchored": {"right_anchored": True},
    "one head each": {"kv_heads": 4},
    "odd widths": {"width": 40, "head_width": 10, "widening": 3.1},
    "wide heads": {"query_heads": 2, "kv_heads": 1, "head_width": 96},
    "one layer": {"layers": 1},
    "other cap": {"attention_cap": 5.0, "attention_multiplier": 0.7},
    "three hashes": {"post_hashes": replace(random_config().post_hashes, scales=(3, 5, 7), biases=(1, 2, 3))},
}
SIZES = ((0, 1), (1, 63), (17, 65), (37, 100))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", ["shared", "sequential"])
def test_equals_the_plain_definition(name: str, dtype: torch.dtype, positions: str) -> None:
    config = random_config(**VARIANTS[name])
    ranker = random_ranker(config)
    dense = DenseEngine(ranker, torch.float32, positions)
    native = NativeEngine(ranker, dtype, positions)
    for history, count in SIZES:
        item = Item(*random_request(config, history, count, seed=history))
        expected, actual = dense.forward([item])[0].scores, native.forward([item])[0].scores
        assert np.abs(expected.logits).max() > 0.5, "weights too small to show an error"
        np.testing.assert_allclose(actual.logits, expected.logits, atol=PARITY[dtype].logits, rtol=0)
        np.testing.assert_allclose(actual.continuous, expected.continuous, atol=PARITY[dtype].probabilities, rtol=0)
        np.testing.assert_allclose(actual.probabilities, 1 / (1 + np.exp(-actual.logits)), atol=1e-6, rtol=0)


def test_padding_is_absent() -> None:
    """Items and users with id 0 influence nothing, and the places of the others stay as they are."""
    config = random_config()
    ranker = random_ranker(config)
    context, candidates = random_request(config, 20, 9)
    gaps = context.post_ids.copy()
    gaps[[0, 7, 19]] = 0
    for user_id in (0, context.user_id):
        item = Item(replace(context, post_ids=gaps, user_id=user_id), candidates)
        expected = DenseEngine(ranker, torch.float32).forward([item])[0].scores.logits
        actual = NativeEngine(ranker, torch.float32).forward([item])[0].scores.logits
        np.testing.assert_allclose(actual, expected, atol=PARITY[torch.float32].logits, rtol=0)


def test_bf16_tables_are_read_in_place() -> None:
    config = random_config()
    ranker = random_ranker(config)
    for name in ("user", "post", "author"):
        table = getattr(ranker.tables, name)
        table.data = table.data.bfloat16()
    item = Item(*random_request(config, 20, 9))
    expected = DenseEngine(ranker, torch.float32).forward([item])[0].scores.logits
    actual = NativeEngine(ranker, torch.float32).forward([item])[0].scores.logits
    np.testing.assert_allclose(actual, expected, atol=PARITY[torch.float32].logits, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_depends_on_the_batch(dtype: torch.dtype) -> None:
    """Random batches, orders, repeats, chunks, cache hits, grown histories and evictions: the scores of each candidate alone."""
    ranker = random_ranker(small_config())
    tally = run(lambda cache_bytes: NativeEngine(ranker, dtype, cache_bytes=cache_bytes), 1000)
    assert tally.different == 0
    assert tally.hits > 100, "the cache was hardly used, so this shows little"
    assert tally.prefixes > 20, "histories hardly grew, so this shows little"


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_no_bit_depends_on_threads(threads: int) -> None:
    ranker = random_ranker(small_config())
    draws = Compositions(NativeEngine(ranker, torch.bfloat16, threads=1), seed=1)
    engine = NativeEngine(ranker, torch.bfloat16, threads=threads, cache_bytes=10**6)
    assert sum(draws.check(engine)[1] for _ in range(50)) == 0


def test_a_product_that_depends_on_its_row_count_is_caught() -> None:
    """Negative control: the plain definition runs one product over all rows of a request, so its bits depend on the batch."""
    dense = DenseEngine(random_ranker(small_config(width=176, layers=4)), torch.float32)
    with pytest.raises(EngineError, match="isolation is broken"):
        check_isolation(dense)


def test_a_planted_leak_is_caught() -> None:
    """Negative control: the second candidate's score leaks by one ulp when another request is in its batch."""

    class Leaky(NativeEngine):
        def forward(self, items):  # type: ignore[no-untyped-def]
            outcomes = super().forward(items)
            if len(items) > 1:
                scores = outcomes[-1].scores
                scores.logits[0, 0] = np.nextafter(scores.logits[0, 0], np.float32(99))
            return outcomes

    ranker = random_ranker(small_config())
    assert run(lambda cache_bytes: Leaky(ranker, torch.float32, cache_bytes=cache_bytes), 20).different > 0


@pytest.mark.parametrize("width", [48, 80])
def test_tile_registers_by_emulation(width: int) -> None:
    """The kernel for tile registers, its instructions emulated: right numbers, and no bit that depends on the batch."""
    ranker = random_ranker(small_config(width=width, head_width=width // 4 - 2))
    engine = NativeEngine(ranker, torch.bfloat16, kernel=load_kernel(None, "RANKER_EMULATE_AMX"))
    assert engine.info.notes["tile_registers"]
    item = Item(*random_request(ranker.config, 17, 9))
    expected, actual = DenseEngine(ranker, torch.float32).forward([item])[0].scores, engine.forward([item])[0].scores
    np.testing.assert_allclose(actual.logits, expected.logits, atol=PARITY[torch.bfloat16].logits, rtol=0)
    assert check_isolation(engine, (1, 17, 40))["different_bits"] == 0


def test_without_wide_vectors_auto_takes_the_torch_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernel, "vector_bits", lambda self: 128)
    engine = create_engine(random_ranker(random_config()), EngineOptions(device="cpu"))
    assert engine.info.backend == "torch"
    assert "AVX-512" in engine.info.notes["fallback"]


def test_without_a_compiler_auto_takes_the_torch_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    ranker = random_ranker(random_config())
    assert "install g++" in create_engine(ranker, EngineOptions(device="cpu")).info.notes["fallback"]
    with pytest.raises(KernelUnavailable, match=r"install g\+\+"):
        create_engine(ranker, EngineOptions(device="cpu", backend="native"))


@pytest.mark.parametrize(
    ("struct", "members", "named"),
    [
        ("ContextJob", "rows start blocks has_user keys post_rows user_rows author_rows surfaces positions actions dwell_seconds",
         "ContextJob.post_rows, ContextJob.user_rows"),
        ("ContextJob", "rows start", "ContextJob, ContextJob.actions, ContextJob.author_rows, ContextJob.blocks"),
        ("Entity", "table hashes unused", "Entity, Entity.unused"),
    ],
)  # fmt: skip
def test_structs_that_are_not_the_kernels_are_refused(
    monkeypatch: pytest.MonkeyPatch, struct: str, members: str, named: str
) -> None:
    """Two members that changed places, some that are missing, one too many."""
    planted = packing.structure(struct, (packing.Int64, members))
    structs = [planted if known.__name__ == struct else known for known in packing.STRUCTS]
    monkeypatch.setattr("model.native.kernel.STRUCTS", structs)
    with pytest.raises(EngineError, match=f"do not agree on {named}"):
        load_kernel()


def test_warm_up_checks_isolation_and_says_so() -> None:
    engine = NativeEngine(random_ranker(random_config()), cache_bytes=10**6)
    engine.warm_up()
    assert engine.info.notes["self_test"]["different_bits"] == 0
    assert engine.info.notes["self_test"]["comparisons"] > 8
    assert engine.cache_stats().bytes == 0


def test_cache_results_and_equal_bits() -> None:
    config = random_config()
    engine: Engine = NativeEngine(random_ranker(config), torch.bfloat16, cache_bytes=10**6)
    context, candidates = random_request(config, 20, 9)
    older = replace(context, **{name: getattr(context, name)[:13] for name in ("post_ids", "author_ids", "actions", "surfaces")},
                    dwell_seconds=context.dwell_seconds[:13])  # fmt: skip
    assert engine.forward([Item(older, candidates)])[0].cache == "miss"
    grown = engine.forward([Item(context, candidates)])[0]
    assert grown.cache == "prefix"
    assert engine.forward([Item(context, candidates)])[0].cache == "hit"
    fresh = NativeEngine(random_ranker(config), torch.bfloat16).forward([Item(context, candidates)])[0]
    assert fresh.cache == "miss"
    assert same_bits(grown.scores, fresh.scores)


def test_equal_contexts_of_one_forward_are_computed_once() -> None:
    config = random_config()
    engine = NativeEngine(random_ranker(config), torch.bfloat16, cache_bytes=10**6)
    context, candidates = random_request(config, 20, 9)
    outcomes = engine.forward([Item(context, candidates), Item(context, candidates.chunk(3, 5))])
    assert [outcome.cache for outcome in outcomes] == ["miss", "hit"]
    assert outcomes[0].state is outcomes[1].state
    np.testing.assert_array_equal(outcomes[0].scores.logits[3:5], outcomes[1].scores.logits)


@pytest.mark.parametrize("variant", [{"right_anchored": True}, {"context_attention": "bidirectional"}])
def test_no_prefix_where_it_would_not_be_exact(variant: dict[str, object]) -> None:
    config = random_config(**variant)
    engine = NativeEngine(random_ranker(config), torch.bfloat16, cache_bytes=10**6)
    context, candidates = random_request(config, 20, 9)
    columns = ("post_ids", "author_ids", "actions", "surfaces", "dwell_seconds")
    engine.forward([Item(replace(context, **{name: getattr(context, name)[:13] for name in columns}), candidates)])
    assert engine.forward([Item(context, candidates)])[0].cache == "miss"


def test_nan_weights_give_nan_scores_not_numbers() -> None:
    config = random_config()
    ranker = random_ranker(config)
    ranker.trunk.layers[0].value[3, 3] = float("nan")
    scores = NativeEngine(ranker, torch.float32).forward([Item(*random_request(config, 5, 3))])[0].scores
    assert not scores.is_finite()
