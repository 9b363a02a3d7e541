"""Compiles the kernel for this machine once and keeps it; a later start only loads it. Knows nothing of models."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from model.engine import EngineError

# Contraction is off so that only the fused multiply-adds written in the source are fused: the same bits in every tile.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")


class KernelUnavailable(EngineError):
    """The kernel cannot be built or loaded here; the text says what is missing."""


def load_kernel(directory: Path | None = None, *defines: str) -> ctypes.CDLL:
    """The compiled kernel, from `directory` (default: the user's cache) or built into it, which takes about ten seconds.

    `defines` are preprocessor symbols, for tests and profiles. Raises KernelUnavailable without a C++ compiler or where the
    result does not load.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise KernelUnavailable("no C++ compiler found: install g++ to use the native CPU engine")
    directory = directory or Path.home() / ".cache" / "phoenix-ranking-server"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(directory, os.W_OK):
            raise PermissionError(directory)
    except OSError:
        directory = Path(tempfile.mkdtemp(prefix="phoenix-ranking-server-"))
    flags = (*FLAGS, *(f"-D{define}" for define in defines))
    library = directory / f"kernel-{_fingerprint(compiler, flags)}.so"
    if not library.exists():
        _compile(compiler, flags, library)
    try:
        kernel = ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelUnavailable(f"the compiled kernel {library} does not load: {error}") from error
    kernel.ranker_create.restype = ctypes.c_void_p
    kernel.ranker_vector_bits.restype = kernel.ranker_enable_amx.restype = ctypes.c_int64
    kernel.ranker_probe.restype = ctypes.c_double
    return kernel


def probe(kernel: ctypes.CDLL) -> dict[str, float]:
    """Milliseconds of one matrix product on one core, by dtype: which of the two this processor is faster at."""
    return {name: 1e3 * kernel.ranker_probe(ctypes.c_int64(bf16)) for name, bf16 in (("float32", 0), ("bfloat16", 1))}


def _fingerprint(compiler: str, flags: tuple[str, ...]) -> str:
    """Names what the binary depends on: sources, flags, compiler, processor."""
    here = Path(__file__).parent
    hashed = hashlib.sha256(" ".join(flags).encode())
    for source in sorted([*here.glob("*.cpp"), *here.glob("*.h")]):
        hashed.update(source.read_bytes())
    hashed.update(subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout)
    hashed.update(_processor().encode())
    return hashed.hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(compiler: str, flags: tuple[str, ...], library: Path) -> None:
    source = Path(__file__).parent / "kernel.cpp"
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        built = Path(scratch) / library.name
        command = [compiler, *flags, str(source), "-o", str(built)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise KernelUnavailable(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")
        built.replace(library)  # atomic: a process that starts at the same time sees all of it or nothing
