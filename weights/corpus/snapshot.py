"""Copies a corpus for new replicas to start from: its last compaction, without later changes, which the feed has."""

from __future__ import annotations

import shutil
from pathlib import Path

from weights.corpus.manifest import CorpusManifest
from weights.corpus.store import load_corpus, load_corpus_manifest
from weights.errors import CheckpointError
from weights.format.manifest import MANIFEST_NAME
from weights.format.writer import refused_writing, write_file, written_beside


def publish(directory: Path, out: Path) -> tuple[Path, CorpusManifest]:
    """Copy the corpus to `out/NAME@SEQUENCE` in one step and check it. An existing copy stays. A service may write to it meanwhile.

    Raises CheckpointError.
    """
    while True:
        manifest = load_corpus_manifest(directory)
        target = out / f"{manifest.name}@{manifest.first_mark.sequence}"
        if target.exists():
            there = load_corpus_manifest(target)
            if there.first_mark[:2] != manifest.first_mark[:2]:
                raise CheckpointError(f"Snapshot {target} is not written: one of another corpus is there.")
            return target, there
        with refused_writing(f"Snapshot {target}"):
            out.mkdir(parents=True, exist_ok=True)
            try:
                with written_beside(target) as partial:
                    for name in manifest.files:
                        shutil.copyfile(directory / name, partial / name)
                    write_file(partial / MANIFEST_NAME, manifest.to_json())
                    load_corpus(partial)
                return target, manifest
            except FileNotFoundError:
                if load_corpus_manifest(directory).digest == manifest.digest:
                    raise  # otherwise it was compacted meanwhile: try again
