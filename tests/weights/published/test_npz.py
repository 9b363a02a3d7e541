"""Plain arrays are read as numpy reads them; every trick is refused before memory is spent on it."""

from __future__ import annotations

import os
import resource
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.weights import hostile
from weights.errors import CheckpointError
from weights.published import npz
from weights.published.npz import NpzFile


def everything(path: Path) -> dict[str, torch.Tensor]:
    with NpzFile(path) as archive:
        return {
            name: torch.cat(list(archive.read(name, archive.shape(name)))).view(archive.shape(name))
            for name in archive.names
        }


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_are_what_numpy_saved(tmp_path: Path, save: object) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in {"a/b/c": (3, 5), "one": (1, 64), "flat": (7,), "scalar": (), "big": (1500, 1501)}.items()
    }
    save(tmp_path / "x.npz", **arrays)  # type: ignore[operator]
    loaded = everything(tmp_path / "x.npz")
    assert list(loaded) == list(arrays)
    for name, array in arrays.items():
        assert np.array_equal(loaded[name].numpy(), array)


def test_an_archive_with_a_comment_is_read(tmp_path: Path) -> None:
    path = hostile.archive(tmp_path / "x.npz", [("a.npy", hostile.array_bytes(np.ones(3, np.float32)))])
    with zipfile.ZipFile(path, "a") as file:
        file.comment = b"made by hand"
    assert everything(path)["a"].tolist() == [1, 1, 1]


def test_a_64_bit_archive_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as file, file.open("a.npy", "w", force_zip64=True) as member:
        member.write(hostile.array_bytes(np.ones(3, np.float32)))
    assert everything(path)["a"].tolist() == [1, 1, 1]


TRICKS = (
    "bomb", "asks_4_tib", "asks_more_than_any_integer", "negative_length", "boolean_length", "objects", "object_header",
    "structured", "fortran", "big_endian", "double_precision", "text", "code_in_header", "deep_header", "long_header",
    "version_9", "no_npy", "empty_member", "short_data", "surplus_data", "double_name", "same_array_twice", "no_suffix",
    "bzip2", "wrong_crc", "truncated", "not_a_zip", "empty_file", "encrypted", "claims_64_gib", "huge_directory",
    "deflate_garbage",
)  # fmt: skip


@pytest.fixture(scope="module")
def tricks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return hostile.hostile(tmp_path_factory.mktemp("hostile"))


def test_the_table_is_complete(tricks: dict[str, Path]) -> None:
    assert set(TRICKS) == set(tricks)


@pytest.mark.parametrize("trick", TRICKS)
def test_a_hostile_archive_is_refused_before_memory_is_spent(trick: str, tricks: dict[str, Path]) -> None:
    tracemalloc.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with pytest.raises(CheckpointError) as refused:
            everything(tricks[trick])
        assert tracemalloc.get_traced_memory()[1] < 2 * 2**20
    finally:
        tracemalloc.stop()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 2**10  # KiB
    assert str(tricks[trick]) in str(refused.value)
    assert str(refused.value).endswith(".")
    assert "\n" not in str(refused.value)


def test_without_the_ratio_limit_the_bomb_goes_off(tricks: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: 64 MiB of zeros in 65 KB."""
    assert tricks["bomb"].stat().st_size < 70_000
    monkeypatch.setattr(npz, "_MAX_RATIO", 2000)
    with NpzFile(tricks["bomb"]) as archive:
        assert sum(part.numel() for part in archive.read("a", (2**24,))) == 2**24


def test_numpy_itself_would_have_obeyed(tricks: dict[str, Path]) -> None:
    """Negative control: the tricks do something to a trusting reader."""
    with np.load(tricks["objects"], allow_pickle=True) as arrays:
        assert arrays["a"][0] == {"a": 1}
    with np.load(tricks["asks_4_tib"], allow_pickle=False) as arrays, pytest.raises((MemoryError, ValueError)):
        arrays["a"]


def test_another_shape_than_asked_is_refused_before_reading(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.ones((3, 4), np.float32))
    with NpzFile(tmp_path / "x.npz") as archive, pytest.raises(CheckpointError, match=r"shape \[3, 4\].*asks \[4, 3\]"):
        next(archive.read("a", (4, 3)))


def test_a_pipe_or_directory_is_no_archive(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npz")
    (tmp_path / "directory.npz").mkdir()
    for path in (tmp_path / "pipe.npz", tmp_path / "directory.npz", tmp_path / "missing.npz"):
        with pytest.raises(CheckpointError, match=path.name):
            NpzFile(path)


def test_parts_are_small(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.ones((3_000_000,), np.float32))
    with NpzFile(tmp_path / "x.npz") as archive:
        parts = [part.numel() * 4 for part in archive.read("a", (3_000_000,))]
    assert max(parts) <= npz.CHUNK_BYTES
    assert sum(parts) == 12_000_000
