"""Loads corpus directories by mapping, with every check, and writes them as a stream, atomically."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor

from model.retrieval.corpus import Corpus, worst_norm
from model.retrieval.inputs import Mark
from weights.checkpoint import Encoder
from weights.corpus.manifest import CODES, TEXTS, VECTORS, CorpusManifest, corpus_tensors
from weights.errors import CheckpointError, reason_of
from weights.format.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, FileEntry, Manifest, TableDtype
from weights.format.reader import MappedFiles, opened, read_manifest, read_tensors
from weights.format.tensorfile import Progress
from weights.format.writer import check_target, refused_writing, write_file, write_files, written_beside
from weights.values import problem_of_codes, problem_of_times

LENGTH_OFF = {"float32": 1e-3, "bfloat16": 1e-2}
"""Tolerance for the length of a vector, which must be 1, by dtype."""


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

    Raises CheckpointError, which names file and reason, for anything that is not exactly what was saved, for vectors that are
    not of unit length, and for vectors made by another encoder than `encoder`, if that is given.
    """
    path, mapped = Path(path), MappedFiles()
    with opened("Corpus", path) as directory:
        manifest = read_manifest(directory, CorpusManifest.from_json)
        if encoder is not None:
            check_encoder(manifest, encoder)
        return StoredCorpus(path, manifest, read_corpus(directory, manifest, mapped, progress, threads), mapped)


def read_corpus(
    directory: int,
    manifest: CorpusManifest,
    mapped: MappedFiles,
    progress: Progress | None = None,
    threads: int | None = None,
) -> Corpus:
    """Read the arrays that a manifest lists from an open directory; mapped files are recorded in `mapped`. Raises CheckpointError as
    `load_corpus` does, but without the path."""
    tensors = read_tensors(directory, manifest, progress, threads, lambda _: True, mapped)
    arrays = {name: tensor.numpy() for name, tensor in tensors.items() if name != VECTORS}
    vectors, stored = tensors[VECTORS].float().numpy(), manifest.tensors
    if stored[VECTORS].dtype != "float32":
        mapped.forget(stored[VECTORS].file)
    worst, length = worst_norm(vectors)
    if not abs(length - 1) <= LENGTH_OFF[stored[VECTORS].dtype]:
        raise CheckpointError(f"{stored[VECTORS].file} holds a vector of length {length:.6g} in row {worst}, not 1")
    # Earlier versions took any number for a time.
    if "created_at" in arrays and (problem := problem_of_times(arrays["created_at"])):
        raise CheckpointError(f"{stored['created_at'].file}, row {problem[0] + 1}: created_at {problem[1]}")
    topics = arrays.get("topics")
    if topics is not None and not (topics.min() >= -1 and topics.max() < len(manifest.topics)):
        raise CheckpointError(f"{stored['topics'].file} holds a topic that the manifest does not name")
    codes = arrays.get(CODES)
    if codes is not None and (problem := problem_of_codes(codes)):
        raise CheckpointError(f"{stored[CODES].file}, row {problem[0] + 1}: codes {problem[1]}")
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
        arrays.get(TEXTS),
        codes,
    )


def check_loads(directory: Path) -> None:
    """Raises CheckpointError, without the path, for a corpus that `load_corpus` refuses: before it is put in place."""
    try:
        load_corpus(directory)
    except CheckpointError as error:
        cause = error.__cause__
        raise CheckpointError(reason_of(cause if isinstance(cause, Exception) else error)) from error


def load_corpus_manifest(path: str | Path) -> CorpusManifest:
    """Read and check only the manifest; the files it lists are not opened. Raises CheckpointError."""
    with opened("Corpus", Path(path)) as directory:
        return read_manifest(directory, CorpusManifest.from_json)


def changes_file(directory: Path, manifest: CorpusManifest) -> Path:
    """Where the changes of this corpus are, if there are any: see `weights.corpus.changes`."""
    return directory / manifest.changes_name


def check_encoder(manifest: CorpusManifest, encoder: Manifest) -> None:
    """Raises CheckpointError if the vectors were not made by this encoder."""
    if manifest.encoder not in (encoder.model_digest, encoder.digest):  # older corpora have the digest of the manifest
        raise CheckpointError(
            f"its vectors were made by {manifest.encoder_name} (digest {manifest.encoder[:12]}…), not by "
            f"{encoder.name} {encoder.version} (digest {encoder.digest[:12]}…): import or build it with the checkpoint that serves"
        )


@dataclass(frozen=True, slots=True)
class CorpusLabels:
    """A corpus's name and version (if empty, a short digest). `position`: of the last feed change that the corpus contains."""

    name: str
    version: str = ""
    position: str = ""


def write_corpus(
    path: str | Path,
    labels: CorpusLabels,
    encoder: Encoder,
    posts: int,
    columns: Sequence[str],
    pieces: Callable[[str], Iterable[Tensor]],
    topics: Callable[[], Sequence[str]] = tuple,
    *,
    dtype: TableDtype = "float32",
    text_width: int = 0,
    code_levels: int = 0,
    replace: bool = False,
    progress: Progress | None = None,
) -> CorpusManifest:
    """Write `path` from `pieces(tensor)`, which gives the elements of `vectors` and each column in order, in pieces of any size.

    `topics` is called for the names after the column has been written; `text_width` is W of the column `texts`, `code_levels` q of `codes`.
    Written to a temporary directory and renamed, so a reader sees all or nothing.
    Raises CheckpointError for values that are not finite, for too many or too few values, for what `load_corpus` would refuse, and for
    a path in use.
    """
    path, made_by = Path(path).absolute(), encoder.manifest
    width = made_by.config.width
    with refused_writing(f"Corpus {path}"):
        check_target(path, replace=replace)
        if path.is_dir() and (path / MANIFEST_NAME).exists():
            old = load_corpus_manifest(path)  # a checkpoint is never replaced by a corpus
            if not labels.position and changes_file(path, old).exists():
                raise CheckpointError(
                    "its posts were changed since it was built, and the changes would be lost; choose another place or, if they come from "
                    "a feed, say which of them the new corpus has (--feed-position)"
                )
        tensors = corpus_tensors(columns, posts, width, dtype, text_width=text_width, code_levels=code_levels)
        described = partial(
            CorpusManifest,
            name=labels.name,
            version=labels.version,
            encoder=made_by.model_digest,
            encoder_name=f"{made_by.name} {made_by.version}",
            posts=posts,
            width=width,
            tensors=tensors,
            mark=Mark(position=labels.position),
            ids=made_by.ids,
        )
        planned = {entry.file: FileEntry("0" * 64, 0) for entry in tensors.values()}
        described(topics=(), files=planned)  # refuses labels before all posts are encoded
        with written_beside(path, replace=replace) as partly:
            files = write_files(partly, tensors, pieces, progress)
            manifest = described(topics=tuple(topics()), files=files).versioned()
            if len(content := manifest.to_json()) > MAX_MANIFEST_BYTES:
                raise CheckpointError(
                    f"its {len(manifest.topics)} topics make {MANIFEST_NAME} longer than {MAX_MANIFEST_BYTES} bytes"
                )
            write_file(partly / MANIFEST_NAME, content)
            check_loads(partly)
        for left in path.glob("changes-*"):  # of the corpus that was replaced
            if not left.name.startswith(changes_file(path, manifest).stem):
                left.unlink(missing_ok=True)
        return manifest
