"""The C++ kernel under the address, undefined-behaviour and thread sanitizers, on random compositions of batches.

Each run is a process of its own, into which the sanitizer is loaded first. The faults that it must see are planted in copies
of the sources.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loadtest.bits import Compositions, small_config
from model.engine import Item, Outcome
from model.native.build import FLAGS, MARCH
from model.native.engine import NativeEngine
from model.native.kernel import Kernel
from model.presets import with_preset
from model.synthetic import random_ranker

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "model/native"
LIBRARIES = {"address,undefined": ("asan", "ubsan"), "address": ("asan",), "thread": ("tsan",)}
COMPOSITIONS = 5
GROWTH = (0, 1, 62, 63, 150)  # blocks of 64 keys that are seen whole, and in part

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here")
Sanitized = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def sanitized(tmp_path: Path) -> Sanitized:
    """Compiles the kernel, its sources changed where `plant` says so, and runs the compositions on it."""

    def run(sanitizers: str, plant: tuple[str, str, str] | None = None) -> subprocess.CompletedProcess[str]:
        sources, library = tmp_path / "sources", tmp_path / "kernel.so"
        shutil.copytree(SOURCES, sources)
        if plant is not None:
            file, before, after = plant
            text = (sources / file).read_text()
            assert text.count(before) == 1, "the place for the planted fault has gone"
            (sources / file).write_text(text.replace(before, after))
        command = [
            "g++",
            *FLAGS,
            MARCH["auto"],
            "-O1",
            "-g",
            f"-fsanitize={sanitizers}",
            "-fno-sanitize-recover=undefined",
        ]
        subprocess.run([*command, sources / "kernel.cpp", "-o", library], check=True, timeout=110)
        found = [
            subprocess.run(["g++", f"-print-file-name=lib{name}.so"], capture_output=True, text=True).stdout.strip()
            for name in LIBRARIES[sanitizers]
        ]
        options = {
            "LD_PRELOAD": ":".join(found), "OMP_NUM_THREADS": "1",
            "ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "exitcode=66 halt_on_error=1",  # the interpreter's own memory is not ours
        }  # fmt: skip
        script = [sys.executable, "-m", "tests.model.test_sanitizers", str(library)]
        return subprocess.run(script, cwd=ROOT, env=os.environ | options, capture_output=True, text=True, timeout=110)

    return run


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
