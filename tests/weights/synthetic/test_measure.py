"""Tables are mapped by a load, and never held by an import: shown by the kernel's count of anonymous memory."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from weights.checkpoint import load_checkpoint
from weights.published.importer import PublishedModel, import_published, labels_for
from weights.synthetic.measure import _forget, footprint
from weights.synthetic.published import write_published
from weights.synthetic.random_weights import mini_config

TABLE_MIB = 36  # above 32, so that the C library maps a copy anew instead of taking freed memory
ROWS = TABLE_MIB * 2**20 // (128 * 4)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("measure") / "ranker"
    write_published(path, mini_config(0, (ROWS, ROWS, ROWS)), 0)
    return path


def growth_mib(figures: dict[str, float]) -> float:
    return figures["peak_anonymous_mib"] - figures["anonymous_before_mib"]


def test_import_never_holds_a_table_and_load_maps_all(published: Path) -> None:
    out = published.parent / "ours"
    with PublishedModel(published) as ranker:
        labels = labels_for(ranker.config, "x")
        imported = footprint(lambda: import_published(ranker, out, labels))
    assert growth_mib(imported) < TABLE_MIB - 5, imported
    loaded = footprint(lambda: load_checkpoint(out))
    assert growth_mib(loaded) < 12, loaded  # the parameters are 3 MiB


def fresh_memory() -> mmap.mmap:
    """As much as the table takes, from the system: an allocator may have some left from other tests."""
    memory = mmap.mmap(-1, TABLE_MIB * 2**20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(0, len(memory), mmap.PAGESIZE):
        memory[page] = 1
    return memory


def test_a_copy_would_be_seen() -> None:
    """Negative control."""
    assert growth_mib(footprint(fresh_memory)) > TABLE_MIB - 5


def cached_pages(path: Path) -> int:
    """Pages of a file that are in memory, by the kernel's count."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        seen = (ctypes.c_ubyte * (len(mapped) // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None).mincore(ctypes.byref(start), ctypes.c_size_t(len(mapped)), seen)
        del start
    assert not failed
    return sum(page & 1 for page in seen)


def test_a_load_from_disk_finds_no_page_in_memory(tmp_path: Path) -> None:
    files = [tmp_path / "known" / "0", *(tmp_path / "forgotten" / str(number) for number in range(3))]
    for path in files:
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            file.write(os.urandom(64 * mmap.PAGESIZE))
            os.fsync(file.fileno())
    with files[0].open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 64 * mmap.PAGESIZE, os.POSIX_FADV_DONTNEED)
    if cached_pages(files[0]):
        pytest.skip("this filesystem keeps its files in memory")
    assert all(cached_pages(path) for path in files[1:])
    _forget(tmp_path / "forgotten")
    assert [cached_pages(path) for path in files[1:]] == [0] * 3
