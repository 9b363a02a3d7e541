"""Row of the thin path: what one process imports before it serves, beside another commit."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from loadtest.bench.table import Row
from loadtest.machine import ROOT
from loadtest.servers.launch import APP, ranking_server
from loadtest.timing import Figure

OWN = {"app", "model", "weights", "loadtest"}
IMPORTED = re.compile(r"^import time:\s+\d+ \|\s+\d+ \|\s+([\w.]+)$", re.MULTILINE)


def packages(root: Path, **settings: Any) -> set[str]:
    """The packages, without Python's own and ours, that a service has imported when it is ready."""
    command = (APP[0], "-X", "importtime", *APP[1:])
    with ranking_server(*command, root=root, **settings) as server:
        found = {name.partition(".")[0] for name in IMPORTED.findall(server.raw)}
    return {name for name in found - OWN - sys.stdlib_module_names if not name.startswith("_")}


def start_row(before: Path, **settings: Any) -> Row:
    """How many of them were not imported before."""
    more = sorted(packages(ROOT, **settings) - packages(before, **settings))
    named = f" ({', '.join(more)})" if more else ""
    count = float(len(more))
    return Row(
        f"packages that a start of one process imports, and did not before{named}",
        Figure(count, count, count),
        "",
        0,
        at_least=False,
    )
