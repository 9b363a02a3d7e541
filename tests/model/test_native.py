"""The C++ engine's own ways: threads, vectors, trunks, what it needs, and what it refuses; see `test_engines` too."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loadtest.compositions import Compositions, small_config
from model.batch import hash_rows
from model.config import HashSpec, ModelConfig
from model.create import EngineOptions, create_engine
from model.dense import DenseEngine
from model.engine import EngineError, Item
from model.native import packing
from model.native.build import KernelUnavailable, build_kernel
from model.native.engine import NativeEngine
from model.native.kernel import load_kernel, open_library
from model.native.packing import refusal
from model.presets import with_preset
from model.selftest import check_isolation, same_bits
from model.tolerances import PARITY
from tests.model.builders import random_config, random_ranker, random_request
from tests.model.test_engines import NARROWER, VARIANTS


def test_no_bit_depends_on_threads() -> None:
    ranker = random_ranker(small_config())
    draws = Compositions(NativeEngine(ranker, torch.bfloat16, threads=1), seed=1, pool=24)
    kernel = load_kernel(None, "RANKER_TEST_HOOKS", "RANKER_WORTH_A_THREAD=0")  # else the smallest forwards stay on one
    engine = NativeEngine(ranker, torch.bfloat16, threads=3, cache_bytes=10**6, kernel=kernel)
    assert sum(draws.check(engine)[1] for _ in range(50)) == 0


def test_a_forward_that_was_begun_gives_what_a_forward_gives() -> None:
    config = random_config()
    items = [Item(*random_request(config, history, 65, seed=history)) for history in (37, 5)]
    engine, other = (
        NativeEngine(random_ranker(config), torch.bfloat16, threads=2, cache_bytes=10**6) for _ in range(2)
    )
    descriptor = engine.open()
    assert descriptor == engine.open()
    for some in (items, items[:1], items):  # the last from the cache
        engine.begin(some)
        assert select.select([descriptor], [], [], 10)[0]
        for ours, theirs in zip(engine.finish(), other.forward(some), strict=True):
            assert same_bits(ours.scores, theirs.scores)
            assert ours.cache == theirs.cache
        assert not select.select([descriptor], [], [], 0)[0]
    assert engine.cache_stats() == other.cache_stats()
    engine.begin(items)
    running = len(os.listdir("/proc/self/task"))
    engine.close()  # waits for what was begun
    assert len(os.listdir("/proc/self/task")) < running
    with pytest.raises(EngineError, match="closed"):
        engine.begin(items)


def test_threads_share_the_work_and_sleep_without_any() -> None:
    config = random_config()
    ranker = random_ranker(config)
    NativeEngine(ranker, torch.float32, threads=1).close()  # starts what torch uses to pack weights
    before = set(os.listdir("/proc/self/task"))
    engine = NativeEngine(ranker, torch.float32, threads=3)
    workers = set(os.listdir("/proc/self/task")) - before
    assert len(workers) == 2

    def helped() -> float:
        return sum(int(Path(f"/proc/self/task/{one}/schedstat").read_text().split()[0]) for one in workers) / 1e9

    began, own = helped(), time.thread_time()
    for _ in range(20):
        engine.forward([Item(*random_request(config, 30, 400))])
    assert helped() - began > 0.1 * (time.thread_time() - own)
    time.sleep(0.05)
    began = helped()
    time.sleep(0.2)
    assert helped() - began < 0.05
    engine.close()


def test_a_context_of_another_checkpoint_is_refused() -> None:
    engine = NativeEngine(random_ranker(config := random_config()))
    context, candidates = random_request(config, 5, 3)
    with pytest.raises(EngineError, match="do not have the checkpoint"):
        engine.forward([Item(replace(context, actions=context.actions[:, :-1]), candidates)])


@pytest.fixture(scope="module")
def hooks() -> Any:
    """The library with what tests call: the one that other tests build too."""
    return load_kernel(None, "RANKER_TEST_HOOKS", "RANKER_WORTH_A_THREAD=0").library


@given(
    st.lists(st.sampled_from([0, 1, 2**63 - 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1), min_size=1, max_size=20),
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), min_size=1, max_size=3),
    st.integers(1, 2**63 - 1),
    st.integers(2, 2**31 - 1),
)
def test_ids_are_hashed_as_the_definition_hashes_them(
    hooks: Any, ids: list[int], functions: list[tuple[int, int]], modulus: int, vocab_size: int
) -> None:
    spec = HashSpec(tuple(s for s, _ in functions), tuple(b for _, b in functions), modulus, vocab_size)
    packed = packing.Packed(packing.Model())
    entity = packing.entity(torch.empty(0), spec, packed)
    given_ids = np.array(ids, np.uint64)
    rows = np.empty((len(ids), spec.count), np.int64)
    hooks.ranker_hash_rows(ctypes.byref(entity), given_ids.ctypes, ctypes.c_int64(len(ids)), rows.ctypes)
    assert rows.tolist() == hash_rows(given_ids, spec).tolist()


def test_a_number_halfway_between_two_is_rounded_to_the_even_one() -> None:
    config = random_config()
    ranker = random_ranker(config)
    item = Item(*random_request(config, 0, 3))
    with torch.no_grad():  # a user's token is the first of its rows as it is
        ranker.tokens.user_projection.zero_()[: config.width] = torch.eye(config.width)
        ranker.tables.user[:] = 1 + torch.arange(config.width) / 128 + 1 / 256
    found = NativeEngine(ranker, torch.bfloat16, threads=1).forward([item])[0].scores
    with torch.no_grad():
        ranker.tables.user[:] = ranker.tables.user.bfloat16().float()
    assert same_bits(found, NativeEngine(ranker, torch.bfloat16, threads=1).forward([item])[0].scores)


# vectors


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


@pytest.mark.parametrize("variant", ["may", "odd widths", "wide heads, long history"])
def test_fp32_has_the_same_bits_at_every_width_of_vectors(variant: str) -> None:
    """A product is one chain of fma, a sum along a row sixteen running sums, whatever the width."""
    ranker = random_ranker(random_config(**VARIANTS[variant]))
    widest, narrower = NativeEngine(ranker, torch.float32), NativeEngine(ranker, torch.float32, vectors=NARROWER)
    assert narrower.info.notes["vectors"] == NARROWER
    for count in (1, 7, 100):
        item = Item(*random_request(ranker.config, ranker.config.history_length, count))
        ours, theirs = narrower.forward([item])[0], widest.forward([item])[0]
        assert same_bits(ours.scores, theirs.scores)


@pytest.mark.usefixtures("before_avx2")
def test_without_wide_vectors_auto_takes_the_torch_engine() -> None:
    """Who asks for the kernel has it all the same, with the same numbers."""
    ranker = random_ranker(random_config())
    engine = create_engine(ranker, EngineOptions(device="cpu"))
    assert engine.info.backend == "torch"
    assert "AVX2" in engine.info.notes["fallback"]
    asked = create_engine(ranker, EngineOptions(device="cpu", backend="native", dtype="float32"))
    assert asked.info.notes["vectors"] == "plain"
    item = Item(*random_request(ranker.config, 17, 9))
    expected, actual = DenseEngine(ranker, torch.float32).forward([item])[0].scores, asked.forward([item])[0].scores
    np.testing.assert_allclose(actual.logits, expected.logits, atol=PARITY[torch.float32].logits, rtol=0)


def test_vectors_that_the_processor_lacks_are_refused_by_name() -> None:
    """Before anything is compiled for them: an unknown instruction would end the process."""
    other, lacking = ("neon", "asimd") if NARROWER == "avx2" else ("avx2", "avx2, bmi2, fma")
    ranker = random_ranker(random_config())
    with pytest.raises(KernelUnavailable, match=f"no {other} vectors: it lacks {lacking}"):
        create_engine(ranker, EngineOptions(device="cpu", backend="native", vectors=other))  # type: ignore[arg-type]
    engine = create_engine(ranker, EngineOptions(device="cpu", vectors=other))  # type: ignore[arg-type]
    assert (engine.info.backend, f"no {other} vectors" in engine.info.notes["fallback"]) == ("torch", True)


# trunks

SHAPE = random_config(history_length=150)
TRUNKS = {
    "gemma": with_preset(replace(SHAPE, kv_heads=1, head_width=256), "gemma"),
    "no cap, steep": replace(SHAPE, attention_cap=None, attention_multiplier=-4.0, sandwich=False),
    "a cap beyond what exp holds": replace(SHAPE, attention_cap=80.0, attention_multiplier=2.0, activation="silu"),
    "bidirectional, no cap": replace(SHAPE, attention_cap=None, context_attention="bidirectional", input_scale=3.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("config", TRUNKS.values(), ids=TRUNKS)
def test_other_trunks_equal_the_definition_in_any_batch(config: ModelConfig, dtype: torch.dtype) -> None:
    ranker = random_ranker(config)
    item = Item(*random_request(config, config.history_length, 40))
    expected = DenseEngine(ranker, torch.float32).forward([item])[0].scores
    tolerance = PARITY[dtype].logits
    if dtype is torch.bfloat16:  # where steep logits amplify its rounding, twice what the definition has
        rounded = DenseEngine(ranker, dtype).forward([item])[0].scores.logits
        tolerance = max(tolerance, 2 * float(np.abs(rounded - expected.logits).max()))
    scores = []
    for vectors in ("auto", NARROWER):
        engine = NativeEngine(ranker, dtype, cache_bytes=10**6, vectors=vectors)
        scores.append(engine.forward([item])[0].scores)
        np.testing.assert_allclose(scores[-1].logits, expected.logits, atol=tolerance, rtol=0)
        draws = Compositions(
            NativeEngine(ranker, dtype, threads=1, vectors=vectors), 1, users=2, growth=(1, 37, 64, 150), pool=12
        )
        assert sum(draws.check(engine)[1] for _ in range(5)) == 0
    assert dtype is torch.bfloat16 or same_bits(*scores)


@pytest.mark.parametrize(
    ("cap", "multiplier"),
    [(99.0, 0.125), (101.0, 0.125), (101.0, 8.0), (1e3, 0.125), (1e3, 40.0), (1e4, 2.0), (1e6, 0.125), (1e30, 0.125)],
)
def test_a_large_cap_bounds_logits_and_flattens_none(cap: float, multiplier: float) -> None:
    """Those far below the cap and, with a large multiplier, those that it bounds."""
    ranker = random_ranker(random_config(attention_cap=cap, attention_multiplier=multiplier))
    item = Item(*random_request(ranker.config, 37, 40))
    expected = DenseEngine(ranker, torch.float64).forward([item])[0].scores.logits
    for vectors in ("auto", NARROWER):
        actual = NativeEngine(ranker, torch.float32, vectors=vectors, threads=1).forward([item])[0].scores.logits
        np.testing.assert_allclose(actual, expected, atol=PARITY[torch.float32].logits, rtol=0)


def test_a_trunk_unknown_to_the_kernel_goes_to_torch_with_why() -> None:
    vanilla = with_preset(random_config(), "vanilla")
    assert refusal(random_config()) is None
    assert refusal(vanilla) == "the native kernel does not know this trunk's norm, positions, activation, gated, biases"
    ranker = random_ranker(vanilla)
    engine = create_engine(ranker, EngineOptions(device="cpu"))
    assert engine.info.backend == "torch"
    assert engine.info.notes["fallback"] == refusal(vanilla)
    for make in (NativeEngine, lambda ranker: create_engine(ranker, EngineOptions(device="cpu", backend="native"))):
        with pytest.raises(KernelUnavailable, match="norm, positions, activation"):
            make(ranker)


# what it needs


@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No compiler on the path; a directory for kernels that is empty."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "kernels"


def test_without_a_compiler_auto_takes_the_torch_engine(bare_machine: Path) -> None:
    ranker = random_ranker(random_config())
    engine = create_engine(ranker, EngineOptions(device="cpu", kernel_directory=bare_machine))
    assert (engine.info.backend, "install g++" in engine.info.notes["fallback"]) == ("torch", True)
    with pytest.raises(KernelUnavailable, match=r"install g\+\+"):
        create_engine(ranker, EngineOptions(device="cpu", backend="native", kernel_directory=bare_machine))


@pytest.mark.parametrize(
    ("struct", "members", "named"),
    [
        ("CandidateJob", "rows first_slot first keys_count blocks context keys", "CandidateJob.first, CandidateJob.first_slot$"),
        ("Entity", "table scales biases hashes modulus vocab_size unused", "Entity, Entity.unused$"),
    ],
)  # fmt: skip
def test_structs_that_are_not_the_kernels_are_refused(struct: str, members: str, named: str) -> None:
    """Two members that changed places, one too many."""
    planted, library = packing.structure(struct, (packing.Int64, members)), build_kernel().path
    open_library(library, packing.STRUCTS)
    structs = [planted if known.__name__ == struct else known for known in packing.STRUCTS]
    with pytest.raises(EngineError, match=f"do not agree on {named}"):
        open_library(library, structs)


def test_an_engine_for_which_there_is_no_room_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2**20, resource.RLIM_INFINITY))
    with pytest.raises(EngineError, match=r"does not fit: \d+ MiB of memory are needed, and 0 MiB are free"):
        create_engine(random_ranker(random_config()), EngineOptions(device="cpu"))


@pytest.mark.slow
def test_engines_of_a_busy_machine_have_the_dtype_of_the_processor() -> None:
    """Each reload and each replica makes an engine. The dtype decides the bits, so it must not depend on what else runs.

    Chance decides whether a machine is ever busy enough: engines that chose with a stopwatch failed here in one run of three.
    """
    words = set(Path("/proc/cpuinfo").read_text().split())
    expected = "bfloat16" if words & {"avx512_bf16", "bf16"} else "float32"
    ranker = random_ranker(small_config())
    with contextlib.ExitStack() as stack:
        for _ in range(2 * (os.cpu_count() or 1)):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        for _ in range(150):
            engine = NativeEngine(ranker)
            assert engine.info.dtype == expected
            engine.close()
