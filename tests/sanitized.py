"""Compiles a C++ source of the project under a sanitizer and runs a test module on it, in a process of its own. Not a test itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from model.native.build import FLAGS, MARCH

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = {"address,undefined": ("asan", "ubsan", "stdc++"), "address": ("asan", "stdc++"), "thread": ("tsan",)}

Plant = tuple[str, str, str]
"""A file beside the source, a text that stands there once, and what stands there instead."""


def run_sanitized(
    directory: Path, source: Path, module: str, sanitizers: str, plant: Plant | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m module LIBRARY`, with the library compiled in `directory` and the sanitizers loaded first."""
    return run_on(module, sanitizers, build_sanitized(directory, source, sanitizers, plant))


def build_sanitized(directory: Path, source: Path, sanitizers: str, plant: Plant | None = None) -> Path:
    """The library, compiled in `directory`."""
    sources, library = directory / "sources", directory / "library.so"
    shutil.copytree(source.parent, sources)
    if plant is not None:
        file, before, after = plant
        text = (sources / file).read_text()
        assert text.count(before) == 1, "the place for the planted fault has gone"
        (sources / file).write_text(text.replace(before, after))
    # a planted fault shows at -O0 too, and is built in a third of the time; the codec is not slow there
    level = "-O0" if (plant and sanitizers == "address") or source.name == "codec.cpp" else "-O1"
    flags = (*FLAGS, MARCH["auto"], level, "-g1", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=undefined")
    subprocess.run(["g++", *flags, sources / source.name, "-o", library], check=True, timeout=110)
    return library


def run_on(module: str, sanitizers: str, *libraries: Path) -> subprocess.CompletedProcess[str]:
    """Runs `python -m module LIBRARY ...` with the sanitizers loaded first."""
    found = [
        subprocess.run(["g++", f"-print-file-name=lib{name}.so"], capture_output=True, text=True).stdout.strip()
        for name in LIBRARIES[sanitizers]
    ]
    options = {
        "LD_PRELOAD": ":".join(found), "OMP_NUM_THREADS": "1", "PYTHONMALLOC": "malloc",  # each object between guards of its own
        "ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "exitcode=66 halt_on_error=1",  # the interpreter's own memory is not ours
    }  # fmt: skip
    command = [sys.executable, "-m", module, *map(str, libraries)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | options, capture_output=True, text=True, timeout=110)
