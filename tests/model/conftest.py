"""A compiler that knows no wide vectors."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

COMPILER = """#!/bin/sh
[ "$1" = --version ] && { "REAL" --version; echo for the first x86-64; exit; }
for argument; do
    shift
    [ "$argument" = -march=native ] && argument=-march=x86-64
    set -- "$@" "$argument"
done
exec "REAL" "$@"
"""


@pytest.fixture
def before_avx2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this processor one of before AVX2 as far as the compiler on the path knows. By its version its kernels are kept apart from
    the others, so that they are compiled once on a machine."""
    real = shutil.which("g++") or shutil.which("clang++")
    compiler = tmp_path / "tools/g++"
    compiler.parent.mkdir()
    compiler.write_text(COMPILER.replace("REAL", str(real)))
    compiler.chmod(0o700)
    monkeypatch.setenv("PATH", str(compiler.parent), prepend=os.pathsep)
