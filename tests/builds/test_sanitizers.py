"""The C++ kernel under the address, undefined-behaviour and thread sanitizers, on random compositions of batches."""

from __future__ import annotations

import select
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from loadtest.compositions import Compositions, small_config
from model.engine import Item, Outcome
from model.native.engine import NativeEngine
from model.native.kernel import Kernel
from model.presets import with_preset
from model.synthetic import random_ranker
from tests.builds.sanitized import AS_IT_IS, ROOT, Plant, run_sanitized

SOURCE = ROOT / "model/native/kernel.cpp"
COMPOSITIONS = 5
# Events: with the user two full tiles of 72 rows, then blocks of 64 keys that are seen whole, and in part.
GROWTH = (143, 0, 1, 62, 63)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here"),
    pytest.mark.timeout(600),  # a busy machine; the first test of each process waits for all its libraries
]
PLANTS: dict[str, dict[str, Plant]] = {  # by the sanitizers that must see them
    "address,undefined": {
        "one more row is copied into a tile than there is": Plant(
            "kernel.cpp", "r < tile.rows", "r <= tile.rows", "; ++r) {\n        const Index row = job.start"),
    },
    "thread": {
        "keys that nobody has written yet": Plant(
            "kernel.cpp", "m_.bidirectional ? Index(work.tiles.size()) : index + 1", "0", ";\n        for (Index t = 0; t < reads"),
        "a task is done before its scores are visible": Plant(
            "pool.h", "done_.fetch_add(1, std::memory_order_release)", "done_.fetch_add(1, std::memory_order_relaxed)"),
    },
}  # fmt: skip
Ended = Callable[[str, str], tuple[int, str]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The exit code of the compositions under some sanitizers with what is planted, and what they printed."""

    @cache
    def run_all(sanitizers: str) -> dict[str, tuple[int, str]]:
        directory = tmp_path_factory.mktemp("sanitized")
        return run_sanitized(directory, SOURCE, "tests.builds.test_sanitizers", sanitizers, PLANTS[sanitizers])

    return lambda sanitizers, name: run_all(sanitizers)[name]


class Aside:
    """An engine whose forwards run in the kernel's own thread, as the service has them, while this one waits."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self._descriptor = engine.open()

    def forward(self, items: Sequence[Item]) -> list[Outcome]:
        self._engine.begin(items)
        select.select([self._descriptor], [], [], 60)
        return self._engine.finish()


def differing_in_all(library: Path) -> int:
    """Candidates whose bits differ from those alone, over random compositions in both dtypes with three threads and a fourth aside."""
    kernel, config = Kernel(library), small_config(history_length=max(GROWTH), width=40)
    uncapped = replace(with_preset(config, "llama"), attention_cap=None)
    different = 0
    for trunk, dtype in ((config, torch.float32), (config, torch.bfloat16), (uncapped, torch.bfloat16)):
        ranker = random_ranker(trunk)
        alone = NativeEngine(ranker, dtype, threads=1, kernel=kernel, cache_bytes=10**7)
        engine = NativeEngine(ranker, dtype, threads=3, kernel=kernel, cache_bytes=10**6)
        draws = Compositions(alone, seed=1, users=2, growth=GROWTH, pool=4)
        aside: Any = Aside(engine)
        different += sum(draws.check(ranks)[1] for _ in range(COMPOSITIONS) for ranks in (engine, aside))
        alone.close()
        engine.close()
    return different


@pytest.mark.parametrize("sanitizers", PLANTS)
def test_the_sanitizers_have_nothing_to_say(ended: Ended, sanitizers: str) -> None:
    assert ended(sanitizers, AS_IT_IS) == (0, "0 differ\n")


def test_a_write_beyond_a_buffer_is_seen(ended: Ended) -> None:
    code, told = ended("address,undefined", "one more row is copied into a tile than there is")
    assert code != 0
    assert "heap-buffer-overflow" in told
    assert "context_task" in told


@pytest.mark.parametrize("plant", PLANTS["thread"])
def test_a_race_is_seen(ended: Ended, plant: str) -> None:
    code, told = ended("thread", plant)
    assert code == 66
    assert "data race" in told
