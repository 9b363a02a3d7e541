"""Two checkpoints that differ, to change one for the other."""

from __future__ import annotations

import shutil
from pathlib import Path

from loadtest.server import DEMO
from weights.checkpoint import load_checkpoint, save_checkpoint


def one_and_two(folder: Path) -> Path:
    """Write the demo as `one` and, with other scores, `two` below the folder, which is returned."""
    shutil.copytree(DEMO, folder / "one", ignore=shutil.ignore_patterns("report"))
    found = load_checkpoint(DEMO)
    manifest = found.manifest
    for parameter in found.ranker.parameters():
        parameter.data.mul_(0.9)
    save_checkpoint(
        folder / "two",
        found.ranker,
        name="two",
        version="two",
        action_names=manifest.action_names,
        continuous=manifest.continuous,
        score_weights=manifest.score_weights,
    )
    return folder
