"""`python -m app` as a real process on a free port. Not a test itself."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from loadtest.machine import ROOT
from loadtest.servers.launch import Server, ranking_server

__all__ = ["DEMO", "ROOT", "Server", "serving"]

DEMO = ROOT / "weights" / "demo"


def serving(checkpoint: Path | str, *command: str, **settings: Any) -> AbstractContextManager[Server]:
    """A ready server of a checkpoint; settings by their names without the prefix, such as `queue__max_candidates`."""
    return ranking_server(
        *command, checkpoint=checkpoint, logs__format="json", environment={"OMP_NUM_THREADS": "1"}, **settings
    )
