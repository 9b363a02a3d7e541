"""Tables are mapped by a load, and never held by an import: shown by the kernel's count of anonymous memory."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from weights.checkpoint import load_checkpoint
from weights.format.writer import write_checkpoint
from weights.published.importer import PublishedModel, labels_for
from weights.synthetic.published import write_published
from weights.synthetic.random_weights import mini_config

TABLE_MIB = 36  # above 32, so that the C library maps a copy anew instead of taking freed memory
ROWS = TABLE_MIB * 2**20 // (128 * 4)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("measure") / "ranker"
    write_published(path, mini_config(0, (ROWS, ROWS, ROWS)), 0)
    return path


def growth_mib(work: Callable[[], object]) -> float:
    """How much anonymous memory, which only swap could take back, `work` adds at its peak: looked at every 2 ms."""
    stop = threading.Event()
    peak = before = anonymous_mib()

    def sample() -> None:
        nonlocal peak
        while not stop.wait(0.002):
            peak = max(peak, anonymous_mib())

    sampler = threading.Thread(target=sample)
    sampler.start()
    kept = work()
    stop.set()
    sampler.join()
    peak = max(peak, anonymous_mib())
    del kept
    return peak - before


def anonymous_mib() -> float:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) / 1024


def test_import_never_holds_a_table_and_load_maps_all(published: Path) -> None:
    out = published.parent / "ours"
    with PublishedModel(published) as ranker:
        labels = labels_for(ranker.config, "x")
        assert growth_mib(lambda: write_checkpoint(out, ranker.config, ranker.chunks, labels)) < TABLE_MIB - 5
    assert growth_mib(lambda: load_checkpoint(out)) < 12  # the parameters are 3 MiB


def fresh_memory() -> mmap.mmap:
    """As much as the table takes, from the system: an allocator may have some left from other tests."""
    memory = mmap.mmap(-1, TABLE_MIB * 2**20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(0, len(memory), mmap.PAGESIZE):
        memory[page] = 1
    return memory


def test_a_copy_would_be_seen() -> None:
    """Negative control."""
    assert growth_mib(fresh_memory) > TABLE_MIB - 5
