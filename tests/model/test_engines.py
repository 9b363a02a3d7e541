"""What every engine promises, native and torch: the plain definition's numbers, and bits that do not depend on the batch."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from loadtest.bits import run
from loadtest.compositions import Compositions, small_config
from model.batch import hash_rows
from model.create import EngineOptions, create_engine
from model.dense import DenseEngine
from model.engine import Engine, EngineError, Item, Outcome
from model.native.build import Vectors
from model.native.engine import NativeEngine
from model.native.packing import refusal
from model.presets import PRESETS, with_preset
from model.ranker import Ranker
from model.selftest import check_isolation, same_bits
from model.split.engine import SplitEngine
from model.tolerances import PARITY
from tests.model.builders import random_config, random_ranker, random_request

Build = Callable[..., Engine]
NARROWER: Vectors = "avx2" if platform.machine() == "x86_64" else "neon"


def native(
    ranker: Ranker, dtype: torch.dtype = torch.bfloat16, positions: Any = "shared", cache_bytes: int = 0, **how: Any
) -> Engine:
    if reason := refusal(ranker.config):
        pytest.skip(reason)
    return NativeEngine(ranker, dtype, positions, cache_bytes=cache_bytes, **how)


def narrow(*asked: Any, **options: Any) -> Engine:
    """The native engine with narrower vectors than this processor's, as most processors have."""
    return native(*asked, **options, vectors=NARROWER)


def split(
    ranker: Ranker, dtype: torch.dtype = torch.float32, positions: Any = "shared", cache_bytes: int = 0
) -> Engine:
    return SplitEngine(ranker, "cpu", dtype, positions, cache_bytes, capacity=512)


def dense(ranker: Ranker, dtype: torch.dtype = torch.float32) -> Engine:
    return DenseEngine(ranker, dtype)


@pytest.fixture(autouse=True, scope="module")
def two_threads() -> Iterator[None]:
    """What is promised of bits holds with several threads; a worker of `make test` has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


ENGINES = pytest.mark.parametrize("build", [native, narrow, split])
FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
OTHERS = [name for name in PRESETS if name != "grok"]
VARIANTS: dict[str, dict[str, Any]] = {
    "may": {},
    "january": {"has_dwell": False, "has_post_age": False, "continuous_actions": 0, "code_levels": 0, "code_values": 0},
    "six levels of codes": {"has_dwell": False, "code_levels": 6, "code_values": 256},
    "counts of the history": {"code_levels": 0, "code_values": 0, "history_counts": True},
    "counts beside many codes": {"code_levels": 2, "code_values": 40, "history_counts": True},
    "bidirectional, one key head": {"context_attention": "bidirectional", "query_heads": 6, "kv_heads": 1},
    "right-anchored, long history": {"right_anchored": True, "head_width": 32, "history_length": 80},
    "one key head each": {"kv_heads": 4},
    "odd widths": {"width": 40, "head_width": 10, "widening": 3.1},
    "wide heads, long history": {"query_heads": 2, "kv_heads": 1, "head_width": 112, "history_length": 80},
    "one layer, long history": {"layers": 1, "history_length": 150},
    "other cap": {"attention_cap": 5.0, "attention_multiplier": 0.7},
    "one hash a post, three an author": {
        "post_hashes": replace(random_config().post_hashes, scales=(3,), biases=(1,)),
        "author_hashes": replace(random_config().author_hashes, scales=(3, 5, 7), biases=(1, 2, 3)),
    },
}


def near(
    build: Build, ranker: Ranker, dtype: torch.dtype, items: list[Item], positions: Any = "shared", expected: Any = None
) -> None:
    """Compare all items in one forward with the dense definition of each."""
    expected = expected or DenseEngine(ranker, torch.float32, positions).forward(items)
    for ours, theirs in zip(build(ranker, dtype, positions).forward(items), expected, strict=True):
        actual, wanted, tolerance = ours.scores, theirs.scores, PARITY[dtype]
        assert np.abs(wanted.logits).max() > 0.5, "weights too small to show an error"
        np.testing.assert_allclose(actual.logits, wanted.logits, atol=tolerance.logits, rtol=0)
        np.testing.assert_allclose(actual.continuous, wanted.continuous, atol=tolerance.probabilities, rtol=0)
        np.testing.assert_allclose(actual.probabilities, 1 / (1 + np.exp(-actual.logits)), atol=1e-6, rtol=0)
        assert ours.cache == "miss"


@cache
def defined(name: str, positions: Any) -> tuple[Ranker, list[Item], list[Outcome]]:
    """A ranker of this variant or preset, requests of odd sizes, and what the plain definition makes of them: once for all engines."""
    if name in VARIANTS:
        config = random_config(**VARIANTS[name])
        full = config.history_length
        sizes = [(0, 1), (1, 63), (17, 65), (full, 100), (full - 1, 9)]
    else:
        config = with_preset(random_config(width=48, query_heads=4, kv_heads=1), name)
        sizes = [(0, 1), (37, 65)]
    ranker = random_ranker(config)
    items = [Item(*random_request(config, history, count, seed=history)) for history, count in sizes]
    return ranker, items, DenseEngine(ranker, torch.float32, positions).forward(items)


SINUSOIDAL = {name for name in OTHERS if with_preset(random_config(), name).positions == "sinusoidal"}


@ENGINES
@DTYPES
@pytest.mark.parametrize(
    ("name", "positions"),
    [
        *((name, "shared") for name in VARIANTS),
        *((name, "sequential") for name in ("may", "right-anchored, long history")),
        *((name, "sequential" if name in SINUSOIDAL else "shared") for name in OTHERS),
    ],
)
def test_equals_the_plain_definition(build: Build, name: str, dtype: torch.dtype, positions: str) -> None:
    ranker, items, expected = defined(name, positions)
    near(build, ranker, dtype, items, positions, expected)


@pytest.mark.parametrize("build", [native, split, dense])
def test_a_ranker_in_training_is_scored_and_nothing_is_nothing(build: Build) -> None:
    ranker = random_ranker(random_config()).requires_grad_(True)
    engine = build(ranker, torch.float32)
    assert engine.forward([]) == []
    assert np.isfinite(engine.forward([Item(*random_request(ranker.config, 3, 2))])[0].scores.logits).all()
    none = engine.forward([Item(*random_request(ranker.config, 3, 0))])[0].scores
    assert none.logits.shape == (0, ranker.config.actions)


@ENGINES
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, FP32 if place % 2 else BF16) for place, name in enumerate(PRESETS)] + [("grok", FP32)],
)
def test_no_bit_of_a_preset_depends_on_the_batch(build: Build, name: str, dtype: torch.dtype) -> None:
    """Warm-up scores requests together and alone, and says so; then a context comes from the cache, whole and in part."""
    ranker = random_ranker(with_preset(random_config(), name))
    engine = build(ranker, dtype, cache_bytes=10**6)
    engine.warm_up()
    assert engine.info.notes["self_test"]["different_bits"] == 0
    assert engine.info.notes["self_test"]["comparisons"] > 8
    assert engine.cache_stats().bytes == 0
    context, candidates = random_request(ranker.config, 37, 9)
    alone = build(ranker, dtype).forward([Item(context, candidates)])[0].scores
    engine.forward([Item(context.first(21), candidates)])
    results = [engine.forward([Item(context, candidates)])[0] for _ in range(2)]
    assert [result.cache for result in results] == ["miss" if ranker.config.right_anchored else "prefix", "hit"]
    assert all(same_bits(result.scores, alone) for result in results)


@ENGINES
@DTYPES
def test_padding_is_absent(build: Build, dtype: torch.dtype) -> None:
    """Items and users with id 0 influence nothing, and the places of the others stay as they are."""
    config = random_config()
    items = [Item(*random_request(config, history, 9, seed=history)) for history in (20, 20, 5, 0)]
    for item, gaps, user_id in zip(items, ([0, 7, 19], [0], [], []), (None, 0, 0, 0), strict=True):
        item.context.post_ids[gaps] = 0
        if user_id is not None:
            item.context.user_id = user_id
    near(build, random_ranker(config), dtype, items)


@ENGINES
def test_bf16_tables_are_read_as_they_are(build: Build) -> None:
    ranker = random_ranker(random_config())
    ranker.tables.to(torch.bfloat16)
    near(build, ranker, torch.float32, [Item(*random_request(ranker.config, 20, 9))])


NARROW = {
    **{f"width {width}": {"width": width} for width in (5, 6, 7, 9, 10, 11)},
    "queries of 6": {"query_heads": 1, "kv_heads": 1, "head_width": 6},
    "sixteen hashes": {"width": 9, "post_hashes": replace(random_config().post_hashes, scales=tuple(range(3, 19)), biases=(1,) * 16)},
}  # fmt: skip


@DTYPES
@pytest.mark.parametrize("shape", NARROW.values(), ids=NARROW)
def test_auto_serves_a_narrow_trunk_that_native_lacks(shape: dict[str, Any], dtype: torch.dtype) -> None:
    """Products of few columns, whose bits depend on a row's place in some libraries."""
    ranker = random_ranker(random_config(gated=False, layers=1, **shape))
    name = str(dtype).removeprefix("torch.")
    engine = create_engine(ranker, EngineOptions(device="cpu", dtype=name))  # type: ignore[arg-type]
    engine.warm_up()
    assert (engine.info.backend, engine.info.notes["self_test"]["different_bits"]) == ("torch", 0)
    item = Item(*random_request(ranker.config, 20, 90))
    whole = engine.forward([item])[0].scores
    for place in range(0, 90, 7):
        alone = engine.forward([Item(item.context, item.candidates.chunk(place, place + 1))])[0].scores
        assert same_bits(alone, whole.rows(slice(place, place + 1)))
    if dtype is FP32:
        expected = DenseEngine(ranker, dtype).forward([item])[0].scores.logits
        np.testing.assert_allclose(whole.logits, expected, atol=PARITY[dtype].logits, rtol=0)


@ENGINES
@pytest.mark.parametrize("other", [torch.bfloat16, torch.float16])
def test_tables_that_no_engine_reads_are_refused(build: Build, other: torch.dtype) -> None:
    """Not scored as if all had the dtype of the first."""
    ranker = random_ranker(random_config())
    ranker.tables.post.data = ranker.tables.post.data.to(other)
    said = f"tables must all be float32 or all bfloat16, got float32, {str(other).removeprefix('torch.')}, float32"
    with pytest.raises(EngineError, match=said):
        build(ranker)


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize(
    ("build", "compositions", "drawn"),
    [
        (native, 80, {"pool": 24}), (narrow, 40, {"pool": 24}), (split, 8, {"users": 3, "growth": (0, 2, 31, 63), "pool": 4}),
    ],
)  # fmt: skip
def test_no_bit_depends_on_the_batch(build: Build, dtype: torch.dtype, compositions: int, drawn: Any) -> None:
    """Random batches, orders, repeats, chunks, cache hits, grown histories and evictions: the scores of each candidate alone."""
    ranker = random_ranker(small_config())
    draws, engine = Compositions(build(ranker, dtype), 0, **drawn), build(ranker, dtype, cache_bytes=400_000)
    assert sum(draws.check(engine)[1] for _ in range(compositions)) == 0
    stats = engine.cache_stats()
    assert stats.hits > compositions / 10, "the cache was hardly used, so this shows little"
    assert stats.prefixes > compositions / 50, "histories hardly grew, so this shows little"
    assert stats.evictions > 0


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
    assert run(lambda cache_bytes: Leaky(ranker, torch.float32, cache_bytes=cache_bytes), 20, pool=24).different > 0


def test_a_product_that_depends_on_its_row_count_is_caught() -> None:
    """Negative control: the plain definition runs one product over all rows of a request, so its bits depend on the batch."""
    dense = DenseEngine(random_ranker(small_config(width=176, layers=4)), torch.float32)
    with pytest.raises(EngineError, match="isolation is broken"):
        check_isolation(dense)


@ENGINES
@pytest.mark.parametrize("variant", [{"right_anchored": True}, {"context_attention": "bidirectional"}])
def test_no_prefix_where_it_would_not_be_exact(build: Build, variant: dict[str, object]) -> None:
    ranker = random_ranker(random_config(**variant))
    engine = build(ranker, cache_bytes=10**6)
    context, candidates = random_request(ranker.config, 20, 9)
    engine.forward([Item(context.first(13), candidates)])
    assert engine.forward([Item(context, candidates)])[0].cache == "miss"


@ENGINES
def test_equal_contexts_of_one_forward_are_computed_once(build: Build) -> None:
    ranker = random_ranker(random_config())
    engine = build(ranker, cache_bytes=10**6)
    context, candidates = random_request(ranker.config, 20, 9)
    outcomes = engine.forward([Item(context, candidates), Item(context, candidates.chunk(3, 5))])
    assert [outcome.cache for outcome in outcomes] == ["miss", "hit"]
    assert outcomes[0].state is outcomes[1].state
    assert engine.cache_stats().entries == 1
    assert same_bits(outcomes[0].scores.rows(slice(3, 5)), outcomes[1].scores)


@ENGINES
def test_nan_gives_nan_scores_to_its_own_item_alone(build: Build) -> None:
    ranker = random_ranker(random_config())
    (context, good), (_, bad) = random_request(ranker.config, 5, 3), random_request(ranker.config, 5, 3, seed=1)
    ranker.tables.post[hash_rows(bad.post_ids[1:2], ranker.config.post_hashes)[0, 0]] = float("nan")
    for finite in ([True, False], [False, False]):
        outcomes = build(ranker, torch.float32).forward([Item(context, good), Item(context, bad)])
        assert [outcome.scores.is_finite() for outcome in outcomes] == finite
        ranker.trunk.decoder_layers()[0].attention.value.weight[3, 3] = float("nan")


def test_what_an_operator_asks_for_is_what_runs() -> None:
    ranker = random_ranker(random_config())
    context, candidates = random_request(ranker.config, 5, 3)
    for asked, runs in (
        ({}, ("native", None)),
        ({"backend": "native", "dtype": "bfloat16", "threads": 1}, ("native", "bfloat16")),
        ({"backend": "torch"}, ("torch", "float32")),
        ({"backend": "torch", "dtype": "bfloat16", "candidate_positions": "sequential"}, ("torch", "bfloat16")),
        ({"backend": "dense", "dtype": "bfloat16"}, ("dense", "bfloat16")),
        ({"backend": "dense"}, ("dense", "float32")),
    ):
        engine = create_engine(ranker, EngineOptions(**{"device": "cpu", **asked}))  # type: ignore[arg-type]
        backend, dtype = runs
        assert engine.info.backend == backend
        assert engine.info.dtype == (dtype or engine.info.dtype)
        assert engine.info.candidate_positions == asked.get("candidate_positions", "shared")
        assert engine.info.notes.get("threads") == asked.get("threads", engine.info.notes.get("threads"))
        engine.forward([Item(context, candidates, caller="feed")])
        assert engine.forward([Item(context, candidates)])[0].cache == ("miss" if backend == "dense" else "hit")
        engine.close()
    without = create_engine(ranker, EngineOptions(device="cpu", cache_bytes=0))
    assert [without.forward([Item(context, candidates)])[0].cache for _ in range(2)] == ["miss"] * 2


def test_a_device_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(EngineError, match="no CUDA device here"):
        create_engine(random_ranker(random_config()), EngineOptions(device="cuda"))
