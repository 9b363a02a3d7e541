"""Writes a checkpoint directory as a stream, then renames it into place."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from model.config import ModelConfig
from weights.errors import CheckpointError, reason_of
from weights.format.layout import expected_shapes, file_of, is_table
from weights.format.manifest import (
    MANIFEST_NAME,
    ActionCalibration,
    ContinuousOutput,
    FileEntry,
    Manifest,
    TableDtype,
    TensorEntry,
)
from weights.format.tensorfile import Progress, StoredTensor, advancing, write_tensors
from weights.text_ids import IdKind

MOST_ATTEMPTS = 20  # to make a directory that no other process takes for an abandoned one


@dataclass(frozen=True, slots=True)
class Labels:
    """What people call a checkpoint and its outputs; an empty `version` becomes a short digest. Fields as in Manifest."""

    name: str
    action_names: tuple[str, ...]
    continuous: tuple[ContinuousOutput, ...] = ()
    score_weights: Mapping[str, float] = field(default_factory=dict)
    version: str = ""
    ids: IdKind = "uint64"
    training: dict[str, Any] = field(default_factory=dict)
    calibration: Mapping[str, ActionCalibration] = field(default_factory=dict)


def write_checkpoint(
    path: str | Path,
    config: ModelConfig,
    pieces: Callable[[str], Iterable[Tensor]],
    labels: Labels,
    *,
    table_dtype: TableDtype = "float32",
    extras: Mapping[str, bytes] | None = None,
    replace: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Write `path` from `pieces(name)`, which gives the elements of a tensor in order, in pieces of any size.

    Written to a temporary directory and renamed, so a reader sees all or nothing. `extras` are further files, such as an example.
    An existing checkpoint is replaced only with `replace`; other files in its directory are kept.
    Raises CheckpointError for values that are not finite, for too many or too few values, and for a path in use.
    """
    path = Path(path).absolute()
    with refused_writing(f"Checkpoint {path}"):
        check_target(path, replace=replace)
        values = {field.name: getattr(labels, field.name) for field in fields(labels)} | {"config": config}
        Manifest(**values, files={}, tensors={})  # refuses bad names before gigabytes are written
        tensors = {
            name: TensorEntry(file_of(name), table_dtype if is_table(name) else "float32", shape)
            for name, shape in expected_shapes(config).items()
        }
        with written_beside(path, replace=replace) as partial:
            manifest = Manifest(**values, files=write_files(partial, tensors, pieces, progress), tensors=tensors)
            manifest = manifest.versioned()
            for name, content in {**(extras or {}), MANIFEST_NAME: manifest.to_json()}.items():
                write_file(partial / name, content)
        return manifest


def replace_manifest(path: str | Path, manifest: Manifest) -> None:
    """Replace the manifest of the checkpoint at `path` in one step; the weights stay. Raises CheckpointError."""
    path = Path(path)
    with refused_writing(f"Checkpoint {path}"):
        write_all(path, {MANIFEST_NAME: lambda new: new.write_bytes(manifest.to_json())})
        sync(path)


@contextmanager
def refused_writing(what: str) -> Iterator[None]:
    """Turn an OSError or CheckpointError into a CheckpointError that says that `what` is not written."""
    try:
        yield
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"{what} is not written: {reason_of(error)}.") from error


@contextmanager
def written_beside(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a new directory to fill. On success it becomes `path` in one step; on an error it is removed, and what killed processes
    left of theirs is removed now. Without `replace`, raises FileExistsError where another process has written `path` meanwhile."""
    remove_unfinished(path.parent, glob.escape(path.name))
    with _locked_beside(path) as partial:
        try:
            yield partial
            sync(partial)
            _put_in_place(partial, path, replace=replace)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _locked_beside(path: Path) -> Iterator[Path]:
    """Yield a new directory that this process holds a lock on. It has no lock yet when it is made, so another process may take it for what
    a killed one left, and remove it: then there is another one."""
    for attempt in range(1, MOST_ATTEMPTS + 1):
        fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}.fresh")
        with ExitStack() as lock:
            try:
                lock.enter_context(alone_in(fresh))
                partial = fresh.rename(fresh.with_suffix(".partial"))
            except (BlockingIOError, FileNotFoundError):
                if attempt == MOST_ATTEMPTS:
                    raise
                continue
            yield partial
            return


def remove_unfinished(directory: Path, names: str) -> None:
    """Remove what nobody fills any more, and end what a kill interrupted: a process holds a lock on its own as long as it lives. `names`
    is a glob pattern of what was to be written in the directory."""
    ours = f".{names}.{'[0-9a-f]' * 8}"
    for unfinished in (file for kind in ("fresh", "partial", "old") for file in directory.glob(f"{ours}.{kind}")):
        with suppress(OSError):
            held = os.open(unfinished, os.O_RDONLY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if unfinished.suffix == ".fresh":
                    unfinished.rmdir()
                elif unfinished.suffix == ".partial":
                    shutil.rmtree(unfinished)
                else:
                    _retire(unfinished, directory / unfinished.with_suffix("").stem[1:])
            finally:
                os.close(held)


def check_target(path: Path, *, replace: bool | None) -> None:
    """Raises CheckpointError if `path` holds something that must not be replaced; `replace` None: where the caller cannot ask for it."""
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_dir():
        raise CheckpointError("it is not a directory; choose another place")
    if not any(path.iterdir()):
        return
    if not (path / MANIFEST_NAME).exists():
        raise CheckpointError("the directory is not empty and holds no checkpoint; choose another place")
    if not replace:
        ask = "" if replace is None else " or ask to replace it (--replace)"
        raise CheckpointError(f"it holds a checkpoint or a corpus already; choose another place{ask}")
    if path.is_symlink():
        raise CheckpointError("it is a symbolic link; name the directory itself to replace it")


def write_files(
    directory: Path,
    tensors: Mapping[str, TensorEntry],
    pieces: Callable[[str], Iterable[Tensor]],
    progress: Progress | None = None,
) -> dict[str, FileEntry]:
    """Write the files of these tensors and sync them to disk; `pieces` as in `write_checkpoint`."""
    files = {}
    advance = advancing(progress, sum(StoredTensor(entry.dtype, entry.shape, 0).bytes for entry in tensors.values()))
    for file in sorted({entry.file for entry in tensors.values()}):
        inside = {name: (entry.dtype, entry.shape) for name, entry in tensors.items() if entry.file == file}
        files[file] = write_tensors(directory / file, inside, pieces, advance)
    return files


def write_file(path: Path, content: bytes) -> None:
    """Write a new file and sync it to disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """`write_all` of one file. A link stays, and where it leads is written. What is no file, such as /dev/stdout, is written as it is."""
    if path.exists() and not path.is_file():
        write(path)
    else:
        place = path.resolve()
        write_all(place.parent, {place.name: write})


def write_all(directory: Path, writes: Mapping[str, Callable[[Path], object]]) -> None:
    """Let each function write the file of its name, in a hidden directory, then rename them into `directory`, which is made if need be.

    Each is complete or as before, even after a power cut, and all are as before if one cannot be written. What killed processes left of
    theirs is removed. Raises OSError, which names the file.
    """
    first = directory / next(iter(writes))
    remove_unfinished(first.parent, glob.escape(first.name))
    with _locked_beside(first) as partial:
        try:
            for name, write in writes.items():
                with named(directory / name):
                    write(partial / name)
                    sync(partial / name)
            for name in writes:
                with named(directory / name):
                    (partial / name).replace(directory / name)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def named(path: Path, left: str = "; the file is as before") -> Iterator[None]:
    """Let an OSError say that it was `path` that could not be written, whatever it named, and what that left."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno) + left, str(path)) from error


def name_whole(directory: Path, path: Path) -> None:
    """Rename a directory of finished files to `path`: all of them are there or none, even after a power cut."""
    for place in (*directory.iterdir(), directory):
        sync(place)
    directory.rename(path)


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Make a directory and keep other processes that ask for it out. Raises BlockingIOError, a sentence, if one of them is in it."""
    directory.mkdir(parents=True, exist_ok=True)
    held = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError):  # others: the file system has no locks for directories
                raise BlockingIOError(f"{directory} is being written by another process: wait for its end") from None
        yield
    finally:
        os.close(held)


def _put_in_place(partial: Path, path: Path, *, replace: bool) -> None:
    """Rename into place. An old checkpoint is moved aside first; its other files (not tensors) that the new one lacks are kept."""
    old, is_there = partial.with_suffix(".old"), replace and path.is_dir() and any(path.iterdir())
    with alone_in(path) if is_there else nullcontext():
        try:
            if is_there:
                path.rename(old)
            partial.rename(path)
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:
                raise FileExistsError(errno.EEXIST, "another process has written it meanwhile") from error
            raise
        finally:
            if old.exists():
                _retire(old, path)
    sync(path.parent)


def _retire(old: Path, path: Path) -> None:
    """Put what was moved aside back if nothing took its place at `path`, else keep its other files and remove it."""
    if not path.exists():
        old.rename(path)
    else:
        for entry in old.iterdir():
            if entry.suffix != ".safetensors" and not (path / entry.name).exists():
                entry.rename(path / entry.name)
        shutil.rmtree(old, ignore_errors=True)  # the next run removes what stays


def sync(path: Path) -> None:
    """Sync a file, or a directory, so that files created or renamed in it survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
