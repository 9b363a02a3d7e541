"""Arrays are read as numpy saved them; what lies is refused, without unpickling and before memory is spent."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weights.errors import CheckpointError
from weights.published.npz import FLOAT32, NpzFile

SHAPE = (100, 4)
"""What the configuration asks of member `a` in the archives below."""


class Tripwire:
    """Says so when it is unpickled."""

    woken = False

    def __setstate__(self, _state: object) -> None:
        Tripwire.woken = True

    def __getstate__(self) -> dict[str, int]:
        return {"x": 1}


def saved(values: np.ndarray[Any, Any]) -> bytes:
    """A member as numpy writes it; objects are pickled."""
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=True)
    return buffer.getvalue()


def headed(text: str, data: bytes = bytes(1600)) -> bytes:
    """A member with any text for its header."""
    raw = text.encode() + b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(raw)) + raw + data


def shaped(shape: object, descr: str = "'<f4'") -> bytes:
    """A member whose header says that it has this shape."""
    return headed(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}")


def packed(*members: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """The members as an archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, raw in members:
            archive.writestr(name, raw)
    return buffer.getvalue()


def patched(archive: bytes, mark: bytes, offset: int, new: bytes) -> bytes:
    """An archive with bytes replaced, `offset` after the last `mark`."""
    start = archive.rindex(mark) + offset
    return archive[:start] + new + archive[start + len(new) :]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_are_what_numpy_saved(tmp_path: Path, save: Callable[..., None]) -> None:
    rng = np.random.default_rng(0)
    shapes = {"a/b/c": (3, 5), "one": (1, 64), "flat": (7,), "scalar": (), "big": (1500, 1501)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["fortran"] = np.asfortranarray(rng.standard_normal((4, 3)).astype(np.float32))
    save(tmp_path / "x.npz", **arrays)
    with NpzFile(tmp_path / "x.npz") as archive:
        assert list(archive.names) == list(arrays)
        for name, array in arrays.items():
            assert archive.header(name) == (array.shape, FLOAT32)
            read = archive.array(name, FLOAT32, array.shape)
            assert read.flags.c_contiguous
            assert np.array_equal(read, array)


GOOD = saved(np.ones(SHAPE, np.float32))
ARCHIVE = packed(("a.npy", GOOD))
ENTRY, END = b"PK\x01\x02", b"PK\x05\x06"  # of the archive's directory
OBJECTS = packed(("a.npy", saved(np.array([Tripwire()], dtype=object))))


@cache
def bomb() -> bytes:
    """64 MiB of zeros, packed in the test that wants them."""
    return packed(("a.npy", shaped((2**24,)) + bytes(2**26)), method=zipfile.ZIP_DEFLATED)


ARCHIVES = {
    "not a zip": b"\x80\x04\x95pickle",
    "truncated": ARCHIVE[:-30],
    "directory of 4 GiB": patched(ARCHIVE, END, 12, struct.pack("<I", 2**32 - 2)),
    "member of 4 GiB": patched(ARCHIVE, ENTRY, 20, struct.pack("<II", 2**32 - 2, 2**32 - 2)),
    "member beyond the end": patched(ARCHIVE, ENTRY, 42, struct.pack("<I", 1900)),
    "encrypted": patched(ARCHIVE, ENTRY, 8, b"\x01"),
    "wrong checksum": patched(ARCHIVE, ENTRY, -16, b"\x01" * 16),
    "noise": patched(packed(("a.npy", GOOD), method=zipfile.ZIP_DEFLATED), ENTRY, -60, b"\xff" * 60),
    "bzip2": packed(("a.npy", GOOD), method=zipfile.ZIP_BZIP2),
    "one name twice": packed(("a.npy", GOOD), ("a", GOOD)),
    "no suffix": packed(("a.pkl", GOOD)),
    "objects": OBJECTS,
    "a single array": GOOD,
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 1475837465\n",
}
MEMBERS = {
    "not an array": b"PK",
    "version 9": b"\x93NUMPY\x09\x00" + GOOD[8:],
    "short data": GOOD[:-5],
    "surplus data": GOOD + b"1234",
    "4 TiB": shaped((2**40,)),
    "negative length": shaped((-1, 4)),
    "pickle": shaped(SHAPE, "'|O'"),
    "fields": shaped(SHAPE, "[('x', '<f4')]"),
    "big endian": saved(np.ones(SHAPE, ">f4")),
    "double precision": saved(np.ones(SHAPE)),
    # what numpy's parser raises for these differs between versions of Python
    "code (ValueError)": shaped("__import__('os').getpid()"),
    "long header (ValueError)": shaped("(" + "1," * 20_000 + ")"),
    "unhashable (TypeError)": headed("{[]: 1}"),
    "unclosed (TokenError)": headed("{'shape': (1,"),
    "deep (TokenError on 3.12)": shaped("(" * 3000 + ")" * 3000),
    "null byte (TokenError on 3.12)": headed("{\0}"),
    "operators (RecursionError)": shaped("-" * 4000 + "1"),
}
HOSTILE = ARCHIVES | {name: packed(("a.npy", raw)) for name, raw in MEMBERS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*HOSTILE, "bomb"])
def test_a_hostile_archive_is_refused_before_memory_is_spent(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(bomb() if name == "bomb" else HOSTILE[name])
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as refused, NpzFile(path) as archive:
            archive.array("a", FLOAT32, SHAPE)
        assert "allow_pickle" not in str(refused.value)  # numpy's advice for what it does not know
        assert tracemalloc.get_traced_memory()[1] < 2**21
    finally:
        tracemalloc.stop()
    assert not Tripwire.woken
    assert str(path) in str(refused.value)
    assert str(refused.value).endswith(".")
    assert "\n" not in str(refused.value)


def test_the_bomb_is_one(tmp_path: Path) -> None:
    """Negative control: numpy alone unpacks 64 MiB of zeros from 65 KB."""
    assert len(bomb()) < 70_000
    with np.load(io.BytesIO(bomb())) as arrays:
        assert arrays["a"].nbytes == 2**26


def test_the_sentence_names_file_and_array_and_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, a=np.ones((3, 4), np.float32))
    with NpzFile(path) as archive:
        with pytest.raises(CheckpointError, match=r"x\.npz: array a has shape \[3, 4\], \[4, 3\] is expected"):
            archive.array("a", FLOAT32, (4, 3))
        with pytest.raises(CheckpointError, match=r"x\.npz lacks array b"):
            archive.array("b", FLOAT32, (4, 3))
    path.write_bytes(HOSTILE["a Git LFS pointer"])
    with pytest.raises(CheckpointError, match=r"x\.npz is a Git LFS pointer.*git lfs pull"):
        NpzFile(path)
