"""One safetensors file: values that are not finite, headers that lie, and what is written."""

from __future__ import annotations

import json
import struct
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weights.errors import CheckpointError
from weights.format.tensorfile import CHUNK_BYTES, is_finite, read_header, scan, write_tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_one_bad_number_is_seen(dtype: torch.dtype, value: float) -> None:
    for place in (0, 1, 62, 99):
        values = torch.randn(100).to(dtype)
        values[:4] = torch.tensor([0.0, torch.finfo(dtype).max, torch.finfo(dtype).min, torch.finfo(dtype).tiny])
        assert is_finite(values)
        values[place] = value
        assert not is_finite(values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bad_number_in_any_chunk_is_named(tmp_path: Path, dtype: str) -> None:
    item_bytes = 4 if dtype == "float32" else 2
    count = 2 * CHUNK_BYTES // item_bytes + 3
    path = tmp_path / "x.safetensors"
    sizes = {"a": 3, "b": count}
    shapes = {name: (dtype, (size,)) for name, size in sizes.items()}
    entry = write_tensors(path, shapes, lambda name: [torch.arange(sizes[name]) % 251])
    kept = bytearray(path.stat().st_size)
    assert scanned(path) == scanned(path, kept) == (entry.sha256, None)
    assert len(kept) == entry.bytes
    data = sum(sizes.values()) * item_bytes
    assert kept[-data:] == path.read_bytes()[-data:]
    for element in (0, CHUNK_BYTES // item_bytes, count - 1):
        raw = bytearray(path.read_bytes())
        start = len(raw) - (count - element) * item_bytes
        raw[start : start + item_bytes] = b"\xff" * item_bytes
        (tmp_path / "bad").write_bytes(raw)
        assert scanned(tmp_path / "bad")[1] == "b"


def scanned(path: Path, keep: bytearray | None = None) -> tuple[str, str | None]:
    with FileIO(path) as file:
        return scan(file, *read_header(file, path.stat().st_size), keep, lambda _: None)


def header(entries: dict[str, Any] | str, data: int = 16) -> bytes:
    text = (entries if isinstance(entries, str) else json.dumps(entries)).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def entry(start: int, stop: int, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"1234567", "too short"),
        (struct.pack("<Q", 2**63), "header would be longer"),
        (struct.pack("<Q", 3) + b"{}", "header would be longer"),
        (header("[]", 0), "must hold a JSON object"),
        (header("{" * 5000, 0), "not valid JSON"),
        (header('{"a": {}, "a": {}}'), "same key twice"),
        (header({"a": entry(0, 8)}), "its tensors end at"),
        (header({"a": entry(0, 8), "b": entry(4, 12)}, 12), "hole or an overlap at tensor b"),
        (header({"a": entry(0, 8), "b": entry(12, 20)}, 20), "hole or an overlap at tensor b"),
        (header({"a": entry(0, 16)}), "hole or an overlap at tensor a"),
        (header({"a": entry(0, 16, [-4])}), "bad shape"),
        (header({"a": entry(0, 16, [True])}), "bad shape"),
        (header({"a": entry(0, 16, [2.0])}), "bad shape"),
        (header({"a": entry(0, 16, [2**60])}), "bad shape"),
        (header({"a": entry(0, 16, [2], "F64")}), "only F32, BF16, I32, I64, U8 are"),
        (header({"a": entry(0, 16, [2], None)}), "dtype must be a JSON string"),
        (header({"a": entry(0, 16) | {"more": 1}}), "unknown keys more"),
        (header({"a": {"dtype": "F32"}}), "no data_offsets, shape"),
        (header({"a": 1}), "no description"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, raw: bytes, sentence: str) -> None:
    (tmp_path / "x").write_bytes(raw)
    with pytest.raises(CheckpointError, match=sentence):
        scanned(tmp_path / "x")


@pytest.mark.parametrize("name", ["a", "ab", "abc" * 20])
def test_the_data_starts_on_a_cache_line(tmp_path: Path, name: str) -> None:
    write_tensors(tmp_path / "x", {name: ("float32", (3, 5))}, lambda _: [torch.ones(3, 5)])
    assert (8 + int.from_bytes((tmp_path / "x").read_bytes()[:8], "little")) % 64 == 0


def test_a_view_that_is_not_contiguous_is_written_in_its_order(tmp_path: Path) -> None:
    values = torch.arange(6.0).view(2, 3).T
    write_tensors(tmp_path / "x", {"a": ("float32", (3, 2))}, lambda _: [values])
    assert torch.equal(load_file(tmp_path / "x")["a"], values)
