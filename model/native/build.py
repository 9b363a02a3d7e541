"""Finds the kernels for this machine among those that a wheel contains, or compiles them once and keeps them. Knows nothing of models."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from model.engine import EngineError

# Contraction is off so that the compiler adds no fma to those written in the source: the same bits in every tile.
FLAGS: tuple[str, ...] = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
Vectors = Literal["auto", "avx2", "neon"]  # `auto` is the widest that the processor has
MARCH: dict[Vectors, str] = {"auto": "-march=native", "avx2": "-march=x86-64-v3", "neon": "-march=armv8-a"}
NEEDED: dict[Vectors, set[str]] = {
    "auto": set(),
    "avx2": {"avx2", "fma", "bmi2"},
    "neon": {"asimd"},
}  # as spelled in /proc/cpuinfo
COMPILE_SECONDS = 300
PREBUILT = "prebuilt"  # the folder beside a source where a wheel has its kernels
DIGEST_BYTES = 32
UNFINISHED = "unfinished-kernel-"  # how the name of a directory begins in which a kernel is being built
HERE = Path(__file__).parent

V3, V4 = (
    {"avx2", "fma", "bmi1", "bmi2", "f16c", "abm", "movbe"},
    {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
)

_one_build = threading.Lock()


class KernelUnavailable(EngineError):
    """The kernel cannot be built or loaded here; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class BuiltKernel:
    """A shared library that is complete and trusted. `note` tells people what was unusual about it, else it is empty."""

    path: Path
    note: str


@dataclass(frozen=True, slots=True)
class Level:
    """A kind of processor that a wheel's kernels are compiled for: the compiler's flags, the words that /proc/cpuinfo must have, and
    the sources that gain from it."""

    name: str
    machine: str
    march: str
    words: frozenset[str]
    sources: tuple[str, ...] = ("kernel", "search")


LEVELS = (
    Level("amx", "x86_64", "-march=x86-64-v4 -mavx512vnni -mavx512bf16 -mamx-tile -mamx-bf16",
          frozenset(V3 | V4 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"}), ("kernel",)),
    Level("avx512bf16", "x86_64", "-march=x86-64-v4 -mavx512vnni -mavx512bf16",
          frozenset(V3 | V4 | {"avx512_vnni", "avx512_bf16"}), ("kernel",)),
    Level("avx512vnni", "x86_64", "-march=x86-64-v4 -mavx512vnni", frozenset(V3 | V4 | {"avx512_vnni"}), ("search",)),
    Level("avx512", "x86_64", "-march=x86-64-v4", frozenset(V3 | V4)),
    Level("avx2", "x86_64", "-march=x86-64-v3", frozenset(V3)),
    Level("bf16", "aarch64", "-march=armv8.2-a+bf16", frozenset({"asimd", "atomics", "asimdrdm", "bf16"}), ("kernel",)),
    Level("neon", "aarch64", "-march=armv8-a", frozenset({"asimd"})),
)  # fmt: skip
"""The widest first."""


def find_prebuilt(
    source: Path, vectors: Vectors = "auto", *, machine: str = "", words: Iterable[str] | None = None
) -> Path | None:
    """The widest kernel of exactly this source that the wheel contains and this processor can run; None if there is none.

    `machine` and `words`, by default this processor's: the name of its architecture, and what /proc/cpuinfo says of it.
    """
    if not (source.parent / PREBUILT).is_dir():
        return None
    processor_words, digest = _processor_words() if words is None else set(words), source_digest(source)
    for level in LEVELS:
        if (
            vectors in ("auto", level.name)
            and level.machine == (machine or platform.machine())
            and level.words <= processor_words
        ):
            library = source.parent / PREBUILT / f"{source.stem}-{level.name}-{digest}.so"
            if _is_whole(library, ours=False):
                return library
    return None


def source_digest(source: Path) -> str:
    """A digest of a source and its headers, so that a kernel of other sources is never mistaken for it."""
    hashed = hashlib.sha256()
    for file in sorted([source, *source.parent.glob("*.h")]):
        hashed.update(file.read_bytes())
    return hashed.hexdigest()[:16]


def seal(library: Path) -> None:
    """Append the SHA-256 of the library's bytes to it. A loader ignores what follows a library's sections."""
    with library.open("r+b") as output:
        output.write(hashlib.sha256(output.read()).digest())
    library.chmod(0o500)


def build_kernel(
    directory: Path | None = None, *defines: str, source: Path = HERE / "kernel.cpp", vectors: Vectors = "auto"
) -> BuiltKernel:
    """The compiled `source` from the wheel, else from `directory` (default: the user's cache), else built into it: about ten
    seconds for the ranker. With a `directory` or `defines` the wheel's kernel is never used.

    A file that is truncated, empty, a link, or another user's is replaced. A directory that others may write to or replace, that
    cannot be written, or that is mounted noexec, is not used: a private temporary one takes its place, the same for the whole process.
    `defines` are preprocessor symbols, for tests and profiles. Raises KernelUnavailable without a C++ compiler, if the disk is full, if
    the temporary directory is mounted noexec too, and if the processor lacks the `vectors`.
    """
    if missing := NEEDED[vectors] - _processor_words():
        raise KernelUnavailable(f"this processor has no {vectors} vectors: it lacks {', '.join(sorted(missing))}")
    if directory is None and not defines and (prebuilt := find_prebuilt(source, vectors)):
        return BuiltKernel(prebuilt, "")
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise KernelUnavailable("no C++ compiler found: install g++ to use the native CPU engine")
    flags = (*FLAGS, MARCH[vectors], *(f"-D{define}" for define in defines))
    try:
        with _one_build:
            return _kept_or_built(directory, compiler, flags, source)
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelUnavailable(f"the kernel could not be built: {error}") from error


def _kept_or_built(directory: Path | None, compiler: str, flags: tuple[str, ...], source: Path) -> BuiltKernel:
    name, note = f"{source.stem}-{_fingerprint(compiler, flags, source)}.so", ""
    directory, problem = _usable(directory)
    if directory is not None and not _is_whole(directory / name) and not os.access(directory, os.W_OK):
        directory, problem = None, f"{directory} cannot be written"
    if directory is None:
        directory, note = Path(_private_directory().name), f"{problem}: the kernel is kept in a temporary directory"
        if _is_noexec(directory):
            raise KernelUnavailable(f"no kernel can be loaded: {problem}, and {directory} is mounted noexec")
    library = directory / name
    if not _is_whole(library):
        if os.path.lexists(library):
            note = f"{library} was not what had been written there: built again"
        _compile(compiler, flags, source, library)
    return BuiltKernel(library, note)


def _usable(directory: Path | None) -> tuple[Path | None, str]:
    """The directory, by default the user's cache, made if it does not exist; or None and why a kernel there cannot be trusted."""
    try:
        directory = directory or Path.home() / ".cache" / "phoenix-ranking-server"
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = directory.lstat()
        above = [(path, path.stat()) for path in directory.resolve().parents]
    except RuntimeError as error:  # no home directory
        return None, str(error)
    except OSError as error:
        return None, f"{directory} cannot be made: {error.strerror}"
    problem = f"{directory} is a link" if stat.S_ISLNK(status.st_mode) else _foreign(directory, status)
    problem = problem or next(filter(None, (_replaceable(path, at) for path, at in above)), "")
    if not problem and _is_noexec(directory):
        problem = f"{directory} is mounted noexec"
    return (None, problem) if problem else (directory.resolve(), "")


def _is_noexec(directory: Path) -> bool:
    """Whether no library in it can be mapped."""
    return bool(os.statvfs(directory).f_flag & os.ST_NOEXEC)


def _foreign(path: Path, status: os.stat_result) -> str:
    """Why another user may have written this; empty if only we or root can have."""
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} can be written by other users"
    return ""


def _replaceable(path: Path, status: os.stat_result) -> str:
    """Why another user may replace a directory below this one, as `_foreign`. In one that is sticky, such as /tmp, only its owner may."""
    is_sticky = status.st_uid in (0, os.geteuid()) and bool(status.st_mode & stat.S_ISVTX)
    return "" if is_sticky else _foreign(path, status)


@functools.cache
def _private_directory() -> tempfile.TemporaryDirectory[str]:
    """A temporary directory for this process, removed when it ends."""
    return tempfile.TemporaryDirectory(prefix="phoenix-ranking-server-")


def _is_whole(library: Path, *, ours: bool = True) -> bool:
    """Whether this is a regular file that ends with the SHA-256 of all before it, as `seal` leaves it. `ours`: it also passes `_foreign`.

    A library is checked before it is mapped, because a missing page would kill the process.
    """
    try:
        with open(os.open(library, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or (ours and _foreign(library, status)):
                return False
            content = file.read()
    except OSError:
        return False
    body, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    return len(body) > 0 and hashlib.sha256(body).digest() == digest


def _fingerprint(compiler: str, flags: tuple[str, ...], source: Path) -> str:
    """A digest of what the binary depends on: sources, flags, compiler, processor."""
    hashed = hashlib.sha256(" ".join(flags).encode())
    for file in sorted([source, *source.parent.glob("*.h"), Path(__file__)]):
        hashed.update(file.read_bytes())
    hashed.update(_version(compiler))
    hashed.update(_processor().encode())
    return hashed.hexdigest()[:16]


@functools.cache
def _version(compiler: str) -> bytes:
    """What the compiler says of itself, asked once in a process."""
    return subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    labels = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(labels)}))


def _processor_words() -> set[str]:
    return set(_processor().replace(":", " ").split())


def _compile(compiler: str, flags: tuple[str, ...], source: Path, library: Path) -> None:
    """Build and seal the library, and rename it into place once it is on the disk."""
    with _unfinished(library.parent) as scratch:
        built = scratch / library.name
        command = [compiler, *flags, str(source), "-o", str(built)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILE_SECONDS)
        if result.returncode:
            raise KernelUnavailable(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")
        seal(built)
        built.replace(library)  # atomic: a process that starts at the same time sees all of it or nothing


@contextlib.contextmanager
def _unfinished(directory: Path) -> Iterator[Path]:
    """A directory to build in. If nobody else builds beside it, those are removed first that processes left which were killed."""
    lock = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # another build is under way, or the file system has no locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in directory.glob(f"{UNFINISHED}*"):
                shutil.rmtree(left, ignore_errors=True)
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH)
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=directory) as scratch:
            yield Path(scratch)
    finally:
        os.close(lock)
