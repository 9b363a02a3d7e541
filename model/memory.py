"""How much memory a model needs and how much is free, so that a model that needs too much is refused before it takes any. Also how many
threads to use."""

from __future__ import annotations

import contextlib
import re
import resource
from pathlib import Path

import torch

from model.engine import EngineError
from model.ranker import Ranker

# Address space kept free, where it is limited (RLIMIT_AS), for stacks and thread-local data of a load's threads. A C library that finds no
# room for thread-local data ends the process. A load of the demo took 20 MiB in all.
RESERVED_BYTES = 32 * 2**20


def engine_bytes(ranker: Ranker) -> int:
    """Bytes that an engine needs besides the tables: its parameters, rotations, and the contexts of its self-test, all in float32."""
    config = ranker.config
    own = sum(values.numel() for name, values in ranker.named_parameters() if not name.startswith("tables."))
    positions = 1 + config.history_length
    rotations = 2 * (positions + config.candidate_length) * config.head_width
    token = (
        2 * config.layers * config.kv_heads * config.head_width + config.query_heads * config.head_width + config.width
    )
    return 4 * (own + rotations + 2 * positions * token)  # the lengths of the self-test add up to two full contexts


def shortage(needed_bytes: int, device: torch.device | None = None) -> str:
    """A clause that says how much is needed and how much is free, empty if there is enough: on a CUDA device, else for this process."""
    free = torch.cuda.mem_get_info(device)[0] if device is not None and device.type == "cuda" else free_bytes()
    if needed_bytes <= free:
        return ""
    return f"{_amount(needed_bytes)} of memory are needed, and {_amount(max(free, 0))} are free"


def require_room(needed_bytes: int, device: torch.device) -> None:
    """Raises EngineError if the device lacks memory for an engine that needs so many bytes."""
    if problem := shortage(needed_bytes, device):
        raise EngineError(f"the engine of this checkpoint does not fit: {problem}")


def _amount(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def free_bytes(root: Path = Path("/")) -> float:
    """Bytes that the machine, this process's control groups (version 2) and its RLIMIT_AS still allow; infinity if none can be read."""
    free = [float("inf")]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        free.append(limit - 1024 * _number(root / "proc/self/status", r"VmSize:\s+(\d+) kB") - RESERVED_BYTES)
    if available := _number(root / "proc/meminfo", r"MemAvailable:\s+(\d+) kB"):
        free.append(1024 * available)
    for group in _groups(root):
        if limit := _number(group / "memory.max", r"(\d+)"):
            cached = _number(group / "memory.stat", r"(?m)^inactive_file (\d+)")  # freed when memory is short
            free.append(limit - _number(group / "memory.current", r"(\d+)") + cached)
    return min(free)


def usable_threads(root: Path = Path("/")) -> int:
    """Torch's number of threads, but no more than the processors that this process's control groups (version 2) may keep busy."""
    cores = torch.get_num_threads()
    for group in _groups(root):
        with contextlib.suppress(OSError, ValueError):  # there is no such file, or it says "max"
            quota, period = (group / "cpu.max").read_text().split()
            cores = max(1, min(cores, int(quota) // int(period)))
    return cores


def _groups(root: Path) -> list[Path]:
    """This process's control group and those around it, as far as it sees them. A container sees one, a service of systemd all."""
    try:
        match = re.search(r"(?m)^0::/(.*)$", (root / "proc/self/cgroup").read_text())
    except OSError:
        match = None
    own = Path(match[1]) if match and ".." not in match[1] else Path()  # "..": seen from another namespace
    return [root / "sys/fs/cgroup" / group for group in (own, *own.parents)]


def _number(file: Path, pattern: str) -> int:
    """The number that `pattern` finds first in a file; 0 if it finds none or the file cannot be read."""
    try:
        match = re.search(pattern, file.read_text())
    except OSError:
        return 0
    return int(match[1]) if match else 0
