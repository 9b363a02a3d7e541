"""Reads and checks the files of a checkpoint directory, each through one descriptor. Builds no model."""

from __future__ import annotations

import mmap
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BufferedReader, FileIO
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from model.memory import shortage
from weights.errors import CheckpointError, reason_of
from weights.format.layout import is_table
from weights.format.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Document, TensorEntry
from weights.format.tensorfile import Buffer, Progress, StoredTensor, advancing, scan, stored_tensors
from weights.git_lfs import HEAD_BYTES, pointer_problem

COPIED_BYTES = 16 * 2**20
"""Files up to this length are copied into memory, not mapped, so later changes to them do not reach the served model."""

_CLOCK_STEP_SECONDS = 0.02  # longer than a tick of the kernel's clock for file times

T = TypeVar("T")


class MappedFiles:
    """The files that tensors are mapped from, each with its own descriptor and its status when checked. For any thread."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[FileIO, os.stat_result]] = {}

    def add(self, name: str, file: FileIO, status: os.stat_result) -> None:
        """Record that this open file is mapped; `status` is its status when checked."""
        self._files[name] = FileIO(os.dup(file.fileno())), status

    def forget(self, name: str) -> None:
        """Stop watching a file that is no longer read."""
        if name in self._files:
            self._files.pop(name)[0].close()

    def changed(self) -> str:
        """A sentence if a file was written to or truncated since, else an empty string. Takes a microsecond a file."""
        for name, (file, before) in self._files.items():
            try:
                after = os.fstat(file.fileno())
            except OSError as error:
                return f"{name} can no longer be checked: {error.strerror}."
            if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                return f"{name} was written to while it was served: load what is to serve from a directory of its own."
        return ""

    def __del__(self) -> None:
        for name in list(self._files):
            self.forget(name)


@contextmanager
def opened(what: str, path: Path) -> Iterator[int]:
    """Yield a descriptor of a directory, so that every file comes from this one even if another is renamed over it meanwhile.

    Errors inside the block become a CheckpointError that says that `what` is refused or cannot be read.
    """
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield directory
        finally:
            os.close(directory)
    except CheckpointError as error:
        raise CheckpointError(f"{what} {path} is refused: {error}.") from error
    except (OSError, MemoryError) as error:
        raise CheckpointError(f"{what} {path} cannot be read: {reason_of(error)}.") from error


def read_manifest(directory: int, parse: Callable[[bytes], T]) -> T:
    """Read `manifest.json` from an open directory and let `parse` check it. Raises CheckpointError."""
    try:
        with _open_file(directory, MANIFEST_NAME) as file:
            raw = BufferedReader(file).read(MAX_MANIFEST_BYTES + 1)
        if len(raw) > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"is longer than {MAX_MANIFEST_BYTES} bytes")
        return parse(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{MANIFEST_NAME} {error}") from error


def read_tensors(
    directory: int,
    manifest: Document,
    progress: Progress | None,
    threads: int | None,
    is_mapped: Callable[[str], bool] = is_table,
    mapped: MappedFiles | None = None,
) -> dict[str, Tensor]:
    """Every tensor by name; `threads` threads (if None, one per core, at most 8) read the files in parallel.

    A file is mapped, and recorded in `mapped`, if all its tensors are `is_mapped` and it is not short; others are read into memory.
    Raises CheckpointError; with several bad files, for the first.
    """
    advance = advancing(progress, sum(entry.bytes for entry in manifest.files.values()))

    def read(name: str) -> dict[str, Tensor]:
        try:
            return _read_file(directory, name, manifest, advance, is_mapped, mapped or MappedFiles())
        except CheckpointError as error:
            raise CheckpointError(f"{name} {error}") from error

    tensors: dict[str, Tensor] = {}
    with ThreadPoolExecutor(max_workers=threads or min(8, os.cpu_count() or 1), thread_name_prefix="verify") as pool:
        for loaded in pool.map(read, sorted(manifest.files)):
            tensors.update(loaded)
    return tensors


def _check_stored(stored: Mapping[str, StoredTensor], listed: Mapping[str, TensorEntry]) -> None:
    """Compare the tensors in a file with those that the manifest lists for it. Raises CheckpointError."""
    missing, unknown = sorted(set(listed) - set(stored)), sorted(set(stored) - set(listed))
    if missing:
        raise CheckpointError(f"lacks tensor {missing[0]}, which the manifest lists")
    if unknown:
        raise CheckpointError(f"holds tensor {unknown[0][:100]}, which the manifest does not list")
    for name, tensor in stored.items():
        entry = listed[name]
        if (tensor.dtype, tensor.shape) != (entry.dtype, entry.shape):
            raise CheckpointError(
                f"holds tensor {name} as {tensor.dtype} {list(tensor.shape)}, the manifest says {entry.dtype} {list(entry.shape)}"
            )


def _check_unchanged(before: os.stat_result, after: os.stat_result) -> None:
    """Raises CheckpointError if an open file was written to between two calls of fstat."""
    if any(getattr(before, name) != getattr(after, name) for name in ("st_size", "st_mtime_ns", "st_ctime_ns")):
        raise CheckpointError("changed while it was being read")


def _read_file(
    directory: int,
    name: str,
    manifest: Document,
    advance: Callable[[int], None],
    is_mapped: Callable[[str], bool],
    mapped: MappedFiles,
) -> dict[str, Tensor]:
    entry = manifest.files[name]
    listed = {key: tensor for key, tensor in manifest.tensors.items() if tensor.file == name}
    with _open_file(directory, name) as file:
        before = _settled(file)
        if problem := pointer_problem(file.read(HEAD_BYTES)):
            raise CheckpointError(problem)
        if before.st_size != entry.bytes:
            raise CheckpointError(
                f"is {before.st_size} bytes long instead of {entry.bytes}: it was cut, changed or copied in part"
            )
        stored = stored_tensors(file, before.st_size)
        _check_stored(stored, listed)
        params = None if before.st_size > COPIED_BYTES and all(map(is_mapped, listed)) else _room(before.st_size)
        digest, corrupted = scan(file, stored, params, advance)
        buffer: Buffer = params or _map(file, before.st_size)
        if params is None:
            mapped.add(name, file, before)
        _check_unchanged(before, os.fstat(file.fileno()))
    if digest != entry.sha256:
        raise CheckpointError(f"has SHA-256 {digest[:12]}… instead of {entry.sha256[:12]}…: its content was changed")
    if corrupted is not None:
        raise CheckpointError(f"holds a NaN or an infinity in tensor {corrupted}")
    return {key: tensor.view(buffer) for key, tensor in stored.items()}


def _room(length: int) -> mmap.mmap:
    """Allocate private, page-aligned memory, aligned like a mapped file. Raises CheckpointError if too little is free."""
    if problem := shortage(length):
        raise CheckpointError(f"does not fit into memory: {problem}")
    return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _map(file: FileIO, length: int) -> mmap.mmap:
    try:
        # A private mapping: a stray write never reaches the file.
        return mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY)
    except ValueError as error:
        raise CheckpointError("became shorter while it was being read") from error


def _settled(file: FileIO) -> os.stat_result:
    """The file's status. Waits until any later write must change the file times, whose clock is coarse.

    Raises CheckpointError if a recently changed file changes during the wait.
    """
    status = os.fstat(file.fileno())
    age_seconds = time.time() - status.st_ctime
    if 0 <= age_seconds < _CLOCK_STEP_SECONDS:
        time.sleep(_CLOCK_STEP_SECONDS - age_seconds)
        _check_unchanged(status, os.fstat(file.fileno()))
    return status


@contextmanager
def _open_file(directory: int, name: str) -> Iterator[FileIO]:
    """Open a regular file of the directory, unbuffered; links are not followed. Raises CheckpointError."""
    # O_NONBLOCK: opening a pipe must not hang
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, dir_fd=directory)
    except FileNotFoundError as error:
        raise CheckpointError("is missing") from error
    except OSError as error:
        raise CheckpointError(f"cannot be opened, or is a symbolic link ({error.strerror})") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError("is not a regular file")
    except BaseException:
        os.close(descriptor)
        raise
    with FileIO(descriptor) as file:
        yield file
