"""Loads checkpoint directories with every check and saves them atomically. `weights.published` reads the published layout.

A directory holds `manifest.json`, `params.safetensors` (fp32, read into memory) and one `tables.*.safetensors` per embedding
table (fp32 or bf16; longer ones are mapped, never copied on CPU). To replace a served checkpoint, rename another directory over it,
as `save_checkpoint` does: writing to a mapped file changes the model being served, and the server then answers 503.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.config import RetrievalConfig
from model.ranker import Ranker
from model.retrieval.towers import Towers
from weights.errors import CheckpointError
from weights.format.layout import model_for
from weights.format.manifest import ActionCalibration, ContinuousOutput, Manifest, TableDtype
from weights.format.reader import MappedFiles, opened, read_manifest, read_tensors
from weights.format.tensorfile import Progress
from weights.format.writer import Labels, write_checkpoint
from weights.text_ids import IdKind

ROWS_PER_PIECE = 16384
"""Rows of a table converted at once while saving."""


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A verified checkpoint: its path, its manifest, and the ranker with its weights on the CPU, without gradients."""

    path: Path
    manifest: Manifest
    ranker: Ranker
    mapped: MappedFiles = field(default_factory=MappedFiles)


@dataclass(frozen=True, slots=True, eq=False)
class Encoder:
    """A verified retrieval checkpoint: its path, its manifest, and both towers on the CPU, without gradients."""

    path: Path
    manifest: Manifest
    towers: Towers
    mapped: MappedFiles = field(default_factory=MappedFiles)


def load_checkpoint(path: str | Path, progress: Progress | None = None, *, threads: int | None = None) -> Checkpoint:
    """`load_any` for a checkpoint that ranks; raises CheckpointError for one that retrieves."""
    loaded = load_any(path, progress, threads=threads)
    check_ranks(path, loaded.manifest)
    assert isinstance(loaded, Checkpoint)
    return loaded


def check_ranks(path: str | Path, manifest: Manifest) -> None:
    """Raises CheckpointError for the manifest of a checkpoint that retrieves."""
    if isinstance(manifest.config, RetrievalConfig):
        raise CheckpointError(f"Checkpoint {path} is refused: it is a retrieval model (two towers), which cannot rank.")


def check_changeable(path: Path, manifest: Manifest, command: str) -> None:
    """Raises CheckpointError for a directory that is named NAME@VERSION after what it holds, which a `command` is to change in place."""
    name = path.resolve().name
    if name == f"{manifest.name}@{manifest.version}":
        raise CheckpointError(
            f"Checkpoint {path} is not written: its directory is named {name} for what it holds, as `fetch` names it: {command} a copy "
            "that has another name, and fetch that."
        )


def load_encoder(path: str | Path, progress: Progress | None = None, *, threads: int | None = None) -> Encoder:
    """`load_any` for a checkpoint that retrieves; raises CheckpointError for one that ranks."""
    loaded = load_any(path, progress, threads=threads)
    if isinstance(loaded, Checkpoint):
        raise CheckpointError(f"Checkpoint {path} is refused: it is a ranker, which has no towers to retrieve with.")
    return loaded


def load_any(path: str | Path, progress: Progress | None = None, *, threads: int | None = None) -> Checkpoint | Encoder:
    """Verify everything and build the model: parameters in memory, tables mapped.

    `threads` threads read the files in parallel, by default one per core (at most 8); 1 leaves the other cores to a model that is serving.

    Raises CheckpointError, which names file and reason, for anything that is not exactly what was saved: format
    version, manifest, digests, tensor names, shapes, dtypes, NaN or infinity, links, or a file that changes while it is read.
    """
    path, mapped = Path(path), MappedFiles()
    with opened("Checkpoint", path) as directory:
        manifest = read_manifest(directory, Manifest.from_json)
        model = model_for(manifest)
        tensors = read_tensors(directory, manifest, progress, threads, mapped=mapped)
    model.load_state_dict(tensors, assign=True)
    model.requires_grad_(False).eval()
    source = path, manifest
    return Encoder(*source, model, mapped) if isinstance(model, Towers) else Checkpoint(*source, model, mapped)


def check_any(path: str | Path, progress: Progress | None = None, *, threads: int | None = None) -> Manifest:
    """Every check of `load_any`, which it takes the arguments of, in little memory: a large file is read in pieces, and none is kept.
    Raises CheckpointError."""
    with opened("Checkpoint", Path(path)) as directory:
        manifest = read_manifest(directory, Manifest.from_json)
        model_for(manifest)
        read_tensors(directory, manifest, progress, threads, is_mapped=lambda _: True)
    return manifest


def load_manifest(path: str | Path) -> Manifest:
    """Read and check only the manifest; the files it lists are not opened. Raises CheckpointError."""
    with opened("Checkpoint", Path(path)) as directory:
        return read_manifest(directory, Manifest.from_json)


def save_checkpoint(
    path: str | Path,
    model: Ranker | Towers,
    *,
    name: str,
    action_names: Sequence[str],
    continuous: Sequence[ContinuousOutput] = (),
    score_weights: Mapping[str, float] | None = None,
    version: str = "",
    ids: IdKind = "uint64",
    table_dtype: TableDtype = "float32",
    training: Mapping[str, Any] | None = None,
    calibration: Mapping[str, ActionCalibration] | None = None,
    extras: Mapping[str, bytes] | None = None,
    replace: bool = False,
) -> Manifest:
    """Write a model on any device and of any dtype as a checkpoint directory; parameters become fp32, tables `table_dtype`.

    An empty `version` becomes a short digest. `training` says what was decided from the log, `calibration` how probabilities are corrected:
    see `Manifest`. `extras` are further files,
    such as `example.json`. Written to a temporary directory and renamed, so a reader sees all or nothing.
    Raises CheckpointError for values that are not finite, names that do not fit the outputs, or a path in use (an existing checkpoint is
    overwritten only with `replace`).
    """
    state = model.state_dict()

    def pieces(tensor: str) -> Iterable[Tensor]:
        return iter(torch.split(state[tensor], ROWS_PER_PIECE))

    labels = Labels(
        name,
        tuple(action_names),
        tuple(continuous),
        dict(score_weights or {}),
        version,
        ids,
        dict(training or {}),
        dict(calibration or {}),
    )
    return write_checkpoint(path, model.config, pieces, labels, table_dtype=table_dtype, extras=extras, replace=replace)
