"""Npz files that lie, for the reader and the importer. Not a test itself."""

from __future__ import annotations

import io
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np


def npy_header(shape: Any, descr: str = "'<f4'", fortran: bool = False, version: tuple[int, int] = (1, 0)) -> bytes:
    """The header of a npy member that says what it is told to say."""
    text = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H" if version == (1, 0) else "<I", len(text)) + text


def array_bytes(values: np.ndarray[Any, Any]) -> bytes:
    """A member as numpy writes it; objects are pickled."""
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=True)
    return buffer.getvalue()


def archive(path: Path, members: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> Path:
    """A zip of members, in order; names may be double."""
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", method) as file:
        warnings.simplefilter("ignore")  # zipfile warns of double names, which are wanted here
        for name, raw in members:
            file.writestr(name, raw)
    return path


def patched(path: Path, old: bytes, new: bytes) -> Path:
    """Replace bytes of the finished archive, behind the back of whoever wrote it."""
    raw = path.read_bytes()
    assert old in raw
    path.write_bytes(raw.replace(old, new))
    return path


def hostile(directory: Path) -> dict[str, Path]:
    """Name of the trick → an archive whose member `a` (shape `[100, 4]` where it can have one) uses it."""
    good = array_bytes(np.ones((100, 4), np.float32))
    bomb = npy_header((2**24,)) + bytes(2**26)

    def make(name: str, raw: bytes, **options: Any) -> Path:
        return archive(directory / f"{name}.npz", [("a.npy", raw)], **options)

    files = {
        "bomb": make("bomb", bomb, method=zipfile.ZIP_DEFLATED),
        "asks_4_tib": make("asks_4_tib", npy_header((2**40,))),
        "asks_more_than_any_integer": make("asks_more", npy_header((2**70, 2**70))),
        "negative_length": make("negative", npy_header((-1, 4)) + bytes(16)),
        "boolean_length": make("boolean", npy_header("(True, 4)") + bytes(16)),
        "objects": make("objects", array_bytes(np.array([{"a": 1}], dtype=object))),
        "object_header": make("object_header", npy_header((1,), "'|O'") + b"cos\nsystem\n(S'true'\ntR."),
        "structured": make("structured", npy_header((1,), "[('x', '<f4')]") + bytes(4)),
        "fortran": make("fortran", array_bytes(np.asfortranarray(np.ones((100, 4), np.float32)))),
        "big_endian": make("big_endian", array_bytes(np.ones((100, 4), ">f4"))),
        "double_precision": make("double", array_bytes(np.ones((100, 4)))),
        "text": make("text", array_bytes(np.array(["x"]))),
        "code_in_header": make("code", npy_header("__import__('os').getpid()")),
        "deep_header": make("deep", npy_header("(" * 3000 + ")" * 3000)),
        "long_header": make("long", npy_header("(" + "1," * 20_000 + ")")),
        "version_9": make("version", b"\x93NUMPY\x09\x00" + good[8:]),
        "no_npy": make("no_npy", b"PK not an array"),
        "empty_member": make("empty_member", b""),
        "short_data": make("short", good[:-5]),
        "surplus_data": make("surplus", good + b"1234"),
        "double_name": archive(directory / "double_name.npz", [("a.npy", good), ("a.npy", good)]),
        "same_array_twice": archive(directory / "twice.npz", [("a.npy", good), ("a", good)]),
        "no_suffix": archive(directory / "suffix.npz", [("a.pkl", good)]),
        "bzip2": make("bzip2", good, method=zipfile.ZIP_BZIP2),
        "wrong_crc": patched(make("crc", good), good[-16:], b"\x01" * 16),
        "truncated": make("truncated", good),
        "not_a_zip": directory / "not_a_zip.npz",
        "empty_file": directory / "empty_file.npz",
    }
    files["truncated"].write_bytes(files["truncated"].read_bytes()[:-30])
    files["not_a_zip"].write_bytes(b"\x80\x04\x95pickle")
    files["empty_file"].write_bytes(b"")
    files["encrypted"] = patched(
        make("encrypted", good), b"PK\x01\x02\x14\x03\x14\x00\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01\x00"
    )
    files["claims_64_gib"] = _claim(make("claims", good), 2**32 - 2)
    files["huge_directory"] = _huge_directory(make("huge_directory", good))
    files["deflate_garbage"] = _garbage(
        make("garbage", np.random.default_rng(0).bytes(5000), method=zipfile.ZIP_DEFLATED)
    )
    return files


def _claim(path: Path, size: int) -> Path:
    """Both lengths in the directory say `size`."""
    raw = bytearray(path.read_bytes())
    entry = raw.rindex(b"PK\x01\x02")
    raw[entry + 20 : entry + 28] = struct.pack("<II", size, size)
    path.write_bytes(raw)
    return path


def _huge_directory(path: Path) -> Path:
    """The end record claims a directory of nearly 4 GiB."""
    raw = bytearray(path.read_bytes())
    end = raw.rindex(b"PK\x05\x06")
    raw[end + 12 : end + 16] = struct.pack("<I", 2**32 - 2)
    path.write_bytes(raw)
    return path


def _garbage(path: Path) -> Path:
    """The compressed stream is noise."""
    raw = bytearray(path.read_bytes())
    raw[60:120] = b"\xff" * 60
    path.write_bytes(raw)
    return path
