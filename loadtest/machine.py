"""The machine and commit that figures were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def machine() -> dict[str, Any]:
    """What figures depend on besides the server: commit, processor, cores, load average, versions."""
    return {
        "commit": commit(),
        "host": platform.node(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_average_1m": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


@cache
def commit(root: Path = ROOT) -> str:
    """Short hash of the checkout, with `+` if tracked files are modified; `unknown` outside git. Cached per process."""
    command = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
