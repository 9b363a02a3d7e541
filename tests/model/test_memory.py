"""How much memory is free, as the machine and the control group say it, and what an engine takes."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from model.engine import Item
from model.memory import RESERVED_BYTES, engine_bytes, free_bytes, shortage, usable_threads
from model.native.engine import NativeEngine
from model.native.kernel import load_kernel
from model.native.packing import pack
from tests.model.builders import random_config, random_ranker, random_request

GIB = 2**30


def machine(root: Path, available: int, limit: str = "max", current: int = 0, cached: int = 0) -> Path:
    for path, text in {
        "proc/meminfo": f"MemTotal: 999999999 kB\nMemAvailable:   {available // 1024} kB\n",
        "sys/fs/cgroup/memory.max": f"{limit}\n",
        "sys/fs/cgroup/memory.current": f"{current}\n",
        "sys/fs/cgroup/memory.stat": f"anon 5\nactive_file 7\ninactive_file {cached}\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.mark.parametrize(
    ("given", "free"),
    [
        ((8 * GIB,), 8 * GIB),
        ((8 * GIB, str(4 * GIB), 3 * GIB), GIB),
        ((8 * GIB, str(4 * GIB), 3 * GIB, 2 * GIB), 3 * GIB),
        ((GIB, str(4 * GIB), 0), GIB),
    ],
)
def test_the_machine_or_its_control_group_whichever_gives_less(tmp_path: Path, given: tuple, free: int) -> None:
    assert free_bytes(machine(tmp_path, *given)) == free


def test_a_limit_of_addresses_counts_less_what_threads_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(tmp_path, 8 * GIB)
    (root / "proc/self").mkdir()
    (root / "proc/self/status").write_text(f"Name:\tpython\nVmPeak:\t 999 kB\nVmSize:\t {GIB // 1024} kB\n")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (3 * GIB, resource.RLIM_INFINITY))
    assert free_bytes(root) == 2 * GIB - RESERVED_BYTES


def test_where_nobody_says_there_is_no_bound(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) == float("inf")


@pytest.mark.parametrize(
    ("said", "threads"),
    [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8), ("", 8), (None, 8)],
)
def test_a_control_group_limits_the_threads(tmp_path: Path, said: str | None, threads: int) -> None:
    torch.set_num_threads(8)  # tests/conftest.py sets them back
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    if said is not None:
        (tmp_path / "sys/fs/cgroup/cpu.max").write_text(said + "\n")
    assert usable_threads(tmp_path) == threads


@pytest.mark.parametrize(
    ("group", "is_seen"), [("/system.slice/ranker.service", True), ("/", False), ("/../other", False)]
)
def test_a_service_obeys_the_limits_of_its_group_and_of_parents(tmp_path: Path, group: str, is_seen: bool) -> None:
    """As systemd sets them with `MemoryMax` and `CPUQuota`: the group of the whole machine has no limit."""
    torch.set_num_threads(8)
    root = machine(tmp_path, 8 * GIB)
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text(f"1:name=systemd:/elsewhere\n0::{group}\n")
    own = root / "sys/fs/cgroup/system.slice/ranker.service"
    own.mkdir(parents=True)
    (own / "memory.max").write_text(f"{2 * GIB}\n")
    (own / "memory.current").write_text(f"{GIB}\n")
    (own / "cpu.max").write_text("max 100000\n")
    (own.parent / "cpu.max").write_text("300000 100000\n")
    assert free_bytes(root) == (GIB if is_seen else 8 * GIB)
    assert usable_threads(root) == (3 if is_seen else 8)


def test_this_machine_says_something_sensible() -> None:
    assert GIB / 16 < free_bytes() < 2**50
    assert shortage(2**20) == ""
    assert shortage(2**60).startswith("1073741824.0 GiB of memory are needed, and ")


def test_what_an_engine_takes_is_what_is_counted() -> None:
    """The packed parameters of the native engine and the keys of a full context are both within what is asked for."""
    ranker = random_ranker(random_config(history_length=500))
    kernel = load_kernel()
    packed = sum(tensor.nbytes for tensor in pack(ranker, torch.float32, kernel.strip()).tensors)
    tables = sum(table.numel() * 4 for table in ranker.tables.parameters())
    engine = NativeEngine(ranker, torch.float32, threads=1, kernel=kernel)
    keys = engine.forward([Item(*random_request(ranker.config, 500, 1))])[0].state.buffer.nbytes
    assert packed - tables + keys < engine_bytes(ranker) < 3 * (packed - tables + 2 * keys)
    engine.close()
