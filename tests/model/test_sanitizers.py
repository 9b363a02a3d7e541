"""The C++ kernel under the address, undefined-behaviour and thread sanitizers, on random compositions of batches.

Each run is a process of its own, into which the sanitizer is loaded first. The faults that it must see are planted in copies
of the sources.
"""

from __future__ import annotations

import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from loadtest.bits import Compositions, small_config
from model.engine import Item, Outcome
from model.native.engine import NativeEngine
from model.native.kernel import Kernel
from model.presets import with_preset
from model.synthetic import random_ranker
from tests.sanitized import ROOT, run_sanitized

SOURCE = ROOT / "model/native/kernel.cpp"
COMPOSITIONS = 5
GROWTH = (0, 1, 62, 63, 150)  # blocks of 64 keys that are seen whole, and in part

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here")
Sanitized = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def sanitized(tmp_path: Path) -> Sanitized:
    """Compiles the kernel, its sources changed where a fault is planted, and runs the compositions on it."""
    return partial(run_sanitized, tmp_path, SOURCE, "tests.model.test_sanitizers")


class Aside:
    """An engine whose forwards run in the kernel's own thread, as the service has them, while this one waits."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self._descriptor = engine.open()

    def forward(self, items: Sequence[Item]) -> list[Outcome]:
        self._engine.begin(items)
        select.select([self._descriptor], [], [], 60)
        return self._engine.finish()


def compose(library: Path) -> int:
    """Candidates whose bits differ from those alone, over random compositions in both dtypes with three threads and a fourth aside."""
    kernel, config = Kernel(library), small_config(history_length=max(GROWTH))
    uncapped = replace(with_preset(config, "llama"), attention_cap=None)
    different = 0
    for trunk, dtype in ((config, torch.float32), (config, torch.bfloat16), (uncapped, torch.bfloat16)):
        ranker = random_ranker(trunk)
        alone = NativeEngine(ranker, dtype, threads=1, kernel=kernel, cache_bytes=10**7)
        engine = NativeEngine(ranker, dtype, threads=3, kernel=kernel, cache_bytes=10**6)
        draws = Compositions(alone, seed=1, users=2, growth=GROWTH, pool=12)
        aside: Any = Aside(engine)
        different += sum(draws.check(ranks)[1] for _ in range(COMPOSITIONS) for ranks in (engine, aside))
        alone.close()
        engine.close()
    return different


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_the_sanitizers_have_nothing_to_say(sanitized: Sanitized, sanitizers: str) -> None:
    done = sanitized(sanitizers)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert done.stdout == "0 differ\n"
    assert "Sanitizer" not in done.stderr
    assert "runtime error" not in done.stderr


def test_a_write_beyond_a_buffer_is_seen(sanitized: Sanitized) -> None:
    """One more row is copied into a tile than there is."""
    done = sanitized("address", ("kernel.cpp", "for (Index r = 0; r < tile.rows; ++r) {\n        const Index row = job.start",
                                 "for (Index r = 0; r <= tile.rows; ++r) {\n        const Index row = job.start"))  # fmt: skip
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
    assert "context_task" in done.stderr


@pytest.mark.parametrize(
    "plant",
    [
        ("kernel.cpp", "const Index reads = m_.bidirectional ? Index(work.tiles.size()) : index + 1;", "const Index reads = 0;"),
        ("pool.h", "done_.fetch_add(1, std::memory_order_release);", "done_.fetch_add(1, std::memory_order_relaxed);"),
    ],
    ids=["keys that nobody has written yet", "a task is done before its scores are visible"],
)  # fmt: skip
def test_a_race_is_seen(sanitized: Sanitized, plant: tuple[str, str, str]) -> None:
    done = sanitized("thread", plant)
    assert done.returncode == 66
    assert "data race" in done.stderr


if __name__ == "__main__":
    print(f"{compose(Path(sys.argv[1]))} differ")
