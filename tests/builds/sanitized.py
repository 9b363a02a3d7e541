"""Compiles a C++ source of the project under sanitizers, once with all its planted faults, and runs a test module on it. Not a test itself.

A fault sleeps until its number stands in the environment. A sanitizer is loaded into one process before all else; the library as it is
and each fault run in forks of it, since to import torch there takes longer than the runs.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from model.native.build import FLAGS, MARCH

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = {"address,undefined": ("asan", "ubsan", "stdc++"), "thread": ("tsan",)}
PLANTED = """#pragma once
#include <cstdlib>
static const int planted = std::getenv("PLANTED") ? std::atoi(std::getenv("PLANTED")) : 0;
"""
AS_IT_IS = "as it is"


class Plant(NamedTuple):
    """A file beside the source, an expression that stands there once before some text, and what stands there instead."""

    file: str
    honest: str
    fault: str
    text: str = ""


def run_sanitized(
    directory: Path, source: Path, module: str, sanitizers: str, plants: Mapping[str, Plant]
) -> dict[str, tuple[int, str]]:
    """The exit code and the output of what the module does with the library, as it is and with each planted fault."""
    library = build_sanitized(directory, source, sanitizers, plants)
    done = run_on(module, sanitizers, library, len(plants))
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    codes = map(int, done.stdout.split())
    return {
        name: (code, told_in(library, number).read_text())
        for number, (name, code) in enumerate(zip((AS_IT_IS, *plants), codes, strict=True))
    }


def build_sanitized(directory: Path, source: Path, sanitizers: str, plants: Mapping[str, Plant]) -> Path:
    """The library, compiled in `directory`."""
    sources, library = directory / "sources", directory / "library.so"
    shutil.copytree(source.parent, sources)
    (sources / "planted.h").write_text(PLANTED)
    for number, (file, honest, fault, text) in enumerate(plants.values(), 1):
        content = (sources / file).read_text()
        assert content.count(honest + text) == 1, "the place for the planted fault has gone"
        either = f"(planted == {number} ? {fault} : {honest}){text}"
        (sources / file).write_text('#include "planted.h"\n' + content.replace(honest + text, either))
    # not -O0: it inlines nothing, so the memory orders that functions pass on would not be constants
    level = "-O1" if sanitizers == "thread" else "-Og"
    flags = (*FLAGS, MARCH["auto"], level, "-g1", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=undefined")
    subprocess.run(["g++", *flags, sources / source.name, "-o", library], check=True, timeout=280)
    return library


def run_on(module: str, sanitizers: str, library: Path, plants: int) -> subprocess.CompletedProcess[str]:
    """Runs this file on the module and the library with the sanitizers loaded first."""
    found = [
        subprocess.run(["g++", f"-print-file-name=lib{name}.so"], capture_output=True, text=True).stdout.strip()
        for name in LIBRARIES[sanitizers]
    ]
    options = {
        "LD_PRELOAD": ":".join(found), "OMP_NUM_THREADS": "1", "PYTHONMALLOC": "malloc",  # each object between guards of its own
        "ASAN_OPTIONS": "detect_leaks=0 malloc_context_size=0",  # the interpreter's own memory is not ours, and who asked is dear
        "TSAN_OPTIONS": "exitcode=66 halt_on_error=1",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.builds.sanitized", module, str(library), str(plants)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | options, capture_output=True, text=True, timeout=280)


def told_in(library: Path, number: int) -> Path:
    """The file with the output of a run, as of which fault is planted."""
    return library.with_suffix(f".{number}.txt")


def run_each(module: str, library: Path, plants: int) -> None:
    """In the sanitized process: a fork for the library as it is and for each fault; prints the exit codes.

    Torch's rules for tensors without memory, which nothing here needs, take as long to import as all the rest of it. No process
    frees what was imported, which takes as long again.
    """
    gc.disable()
    sys.modules["torch._meta_registrations"] = ModuleType("left out")
    differing = import_module(module).differing_in_all
    if hasattr(torch := sys.modules.get("torch"), "_opaque_base"):  # not before torch 2.12
        torch._C._set_generator_metaclass(torch._opaque_base.OpaqueBaseMeta)  # as what was left out does
    for number in range(1 + plants):
        if not (child := os.fork()):
            os.environ["PLANTED"] = str(number)
            for descriptor in (1, 2):
                os.dup2(os.open(told_in(library, number), os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
            print(f"{differing(library)} differ")
            break
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    run_each(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
