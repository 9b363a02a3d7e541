"""Copies a corpus with its changes, for a new replica to start from, while a service may be changing it."""

from __future__ import annotations

import shutil
from pathlib import Path

from model.retrieval.inputs import Change
from weights.corpus.changes import copy_changes, read_changes, refuse_old_log
from weights.corpus.manifest import CorpusManifest
from weights.corpus.store import load_corpus, load_corpus_manifest
from weights.errors import CheckpointError
from weights.format.manifest import MANIFEST_NAME
from weights.format.writer import refused_writing, write_file, written_beside


def write_snapshot(directory: Path, out: Path) -> tuple[CorpusManifest, Change]:
    """Copy the corpus and its changes to `out`, which must not exist, in one step, and check the copy. Raises CheckpointError."""
    with refused_writing(f"Snapshot {out}"):
        if out.exists():
            raise CheckpointError("there is something already; choose another place")
        manifest = load_corpus_manifest(directory)
        refuse_old_log(directory, manifest)
        with written_beside(out) as partial:
            for name in manifest.files:
                shutil.copyfile(directory / name, partial / name)
            write_file(partial / MANIFEST_NAME, manifest.to_json())
            load_corpus(partial)
            copy_changes(directory, manifest, partial)
            return manifest, read_changes(partial, manifest)
