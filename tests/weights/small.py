"""A small checkpoint, and how a forger signs one. Not a test itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from weights.format.manifest import signed
from weights.format.writer import write_checkpoint
from weights.published.importer import labels_for
from weights.synthetic.random_weights import mini_config, random_pieces


def write_small(path: Path, seed: int) -> None:
    """A small valid checkpoint. Two of its tables have the same shape, so that no check of shapes tells them apart."""
    config = replace(mini_config(seed, (40, 40, 41), continuous_actions=2), width=16, layers=1, head_width=4)
    write_checkpoint(path, config, random_pieces(config, seed), labels_for(config, "small"))


def sign(path: Path, change: Callable[[dict[str, Any]], object] = lambda manifest: None) -> None:
    """Correct lengths and digests of the files and the manifest's own digest, as a skilled forger would."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["digest"]
    for name in manifest["files"]:
        raw = (path / name).read_bytes()
        manifest["files"][name] = {"sha256": sha256(raw).hexdigest(), "bytes": len(raw)}
    change(manifest)
    (path / "manifest.json").write_bytes(signed(manifest))
