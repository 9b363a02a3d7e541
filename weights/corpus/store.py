"""Corpus directories: load with every check, by mapping; write as a stream, in one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from model.retrieval.corpus import Corpus, worst_norm
from weights.checkpoint import Encoder
from weights.corpus.manifest import COLUMNS, VECTORS, CorpusManifest, file_of
from weights.errors import CheckpointError
from weights.format.manifest import MANIFEST_NAME, FileEntry, Manifest, TensorEntry
from weights.format.reader import MappedFiles, Progress, open_directory, read_manifest, read_tensors
from weights.format.tensorfile import write_tensors
from weights.format.writer import TableDtype, check_target, write_file, written_beside

LENGTH_OFF = {"float32": 1e-3, "bfloat16": 1e-2}
"""How far the length of a vector may be from 1."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredCorpus:
    """A verified corpus: its path, its manifest, and its arrays, mapped."""

    path: Path
    manifest: CorpusManifest
    corpus: Corpus
    mapped: MappedFiles


def load_corpus(
    path: str | Path, encoder: Manifest | None = None, progress: Progress | None = None, *, threads: int | None = None
) -> StoredCorpus:
    """Verify everything and map the arrays; bf16 vectors are widened into memory.

    Raises CheckpointError, whose sentence names file and reason, for anything that is not exactly what was saved, for vectors
    that are not of unit length, and where `encoder` is given for vectors that another one made.
    """
    path, mapped = Path(path), MappedFiles()
    try:
        with open_directory(path) as directory:
            manifest = read_manifest(directory, CorpusManifest.from_json)
            if encoder is not None:
                check_encoder(manifest, encoder)
            return StoredCorpus(path, manifest, read_corpus(directory, manifest, mapped, progress, threads), mapped)
    except (CheckpointError, OSError, MemoryError) as error:
        raise _refusal(path, error) from error


def read_corpus(
    directory: int,
    manifest: CorpusManifest,
    mapped: MappedFiles,
    progress: Progress | None = None,
    threads: int | None = None,
) -> Corpus:
    """The arrays that a manifest lists, of an open directory; those that are mapped are noted. Raises CheckpointError, as `load_corpus`
    but for the path."""
    tensors = read_tensors(directory, manifest, progress, threads, lambda _: True, mapped)
    arrays = {name: tensor.numpy() for name, tensor in tensors.items() if name != VECTORS}
    vectors, stored = tensors[VECTORS].float().numpy(), manifest.tensors
    if stored[VECTORS].dtype != "float32":
        mapped.forget(stored[VECTORS].file)
    worst, length = worst_norm(vectors)
    if not abs(length - 1) <= LENGTH_OFF[stored[VECTORS].dtype]:
        raise CheckpointError(f"{stored[VECTORS].file} holds a vector of length {length:.6g} in row {worst}, not 1")
    topics = arrays.get("topics")
    if topics is not None and not (topics.min() >= -1 and topics.max() < len(manifest.topics)):
        raise CheckpointError(f"{stored['topics'].file} holds a topic that the manifest does not name")
    return Corpus(
        manifest.name,
        manifest.version,
        manifest.encoder,
        arrays["post_ids"].view(np.uint64),
        arrays["author_ids"].view(np.uint64),
        vectors,
        arrays.get("created_at"),
        topics,
        manifest.topics,
    )


def load_corpus_manifest(path: str | Path) -> CorpusManifest:
    """The manifest alone, checked in itself; the files it lists are not opened. Raises CheckpointError."""
    path = Path(path)
    try:
        with open_directory(path) as directory:
            return read_manifest(directory, CorpusManifest.from_json)
    except (CheckpointError, OSError) as error:
        raise _refusal(path, error) from error


def check_encoder(manifest: CorpusManifest, encoder: Manifest) -> None:
    """Raises CheckpointError where the vectors are not this encoder's."""
    if manifest.encoder != encoder.digest:
        raise CheckpointError(
            f"its vectors were made by {manifest.encoder_name} (digest {manifest.encoder[:12]}…), not by "
            f"{encoder.name} {encoder.version} (digest {encoder.digest[:12]}…): import or build it with the checkpoint that serves"
        )


@dataclass(frozen=True, slots=True)
class CorpusLabels:
    """What people call a corpus; an empty `version` becomes a short digest."""

    name: str
    version: str = ""


def write_corpus(
    path: str | Path,
    labels: CorpusLabels,
    encoder: Encoder,
    posts: int,
    columns: Sequence[str],
    chunks: Callable[[str], Iterable[Tensor]],
    topics: Callable[[], Sequence[str]] = tuple,
    *,
    dtype: TableDtype = "float32",
    replace: bool = False,
) -> CorpusManifest:
    """Write `path` from `chunks(tensor)`, the elements of `vectors` and of each column in order, in chunks of any size.

    `topics` is asked for the names once the column has been written. Written beside and renamed: a reader sees all or nothing.
    Raises CheckpointError for values that are not finite or not as many as `posts`, and for a path in use.
    """
    path, width = Path(path).absolute(), encoder.manifest.config.width
    try:
        check_target(path, replace=replace)
        if path.is_dir() and (path / MANIFEST_NAME).exists():
            load_corpus_manifest(path)  # a checkpoint is never replaced by a corpus
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: TensorEntry(file_of(name), COLUMNS[name], (posts,)) for name in columns}
        tensors[VECTORS] = TensorEntry(file_of(VECTORS), dtype, (posts, width))
        with written_beside(path) as partial:
            files = write_files(partial, tensors, chunks)
            made_by = encoder.manifest
            manifest = CorpusManifest(
                name=labels.name,
                version=labels.version,
                encoder=made_by.digest,
                encoder_name=f"{made_by.name} {made_by.version}",
                posts=posts,
                width=width,
                topics=tuple(topics()),
                files=files,
                tensors=tensors,
            )
            write_file(partial / MANIFEST_NAME, manifest.to_json())
        return manifest
    except OSError as error:
        raise CheckpointError(f"Corpus {path} is not written: {error.strerror or error}.") from error
    except CheckpointError as error:
        raise CheckpointError(f"Corpus {path} is not written: {str(error).rstrip('.')}.") from error


def write_files(
    directory: Path, tensors: Mapping[str, TensorEntry], chunks: Callable[[str], Iterable[Tensor]]
) -> dict[str, FileEntry]:
    """Write the files of these tensors, which are on the disk when this returns; `chunks` as in `write_corpus`."""
    files = {}
    for file in sorted({entry.file for entry in tensors.values()}):
        inside = {name: (entry.dtype, entry.shape) for name, entry in tensors.items() if entry.file == file}
        files[file] = write_tensors(directory / file, inside, chunks)
    return files


def _refusal(path: Path, error: Exception) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return CheckpointError(f"Corpus {path} is refused: {error}.")
    reason = getattr(error, "strerror", None) or str(error) or "not enough memory"
    return CheckpointError(f"Corpus {path} cannot be read: {reason}.")
