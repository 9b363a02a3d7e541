"""One safetensors file: values that are not finite, and what is written. Headers that lie are in `test_damaged_checkpoints.py`."""

from __future__ import annotations

from io import FileIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from weights.format.tensorfile import PIECE_BYTES, scan, stored_tensors, write_tensors


def scanned(path: Path, keep: bytearray | None = None) -> tuple[str, str | None]:
    with FileIO(path) as file:
        return scan(file, stored_tensors(file, path.stat().st_size), keep, lambda _: None)


@pytest.mark.parametrize(("dtype", "item_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_a_bad_number_in_any_piece_is_named(tmp_path: Path, dtype: str, item_bytes: int) -> None:
    count = 2 * PIECE_BYTES // item_bytes + 3
    path, sizes = tmp_path / "x.safetensors", {"a": 3, "b": count}
    shapes = {name: (dtype, (size,)) for name, size in sizes.items()}
    entry = write_tensors(path, shapes, lambda name: [torch.arange(sizes[name]) % 251])
    kept = bytearray(path.stat().st_size)
    assert scanned(path) == scanned(path, kept) == (entry.sha256, None)
    data = sum(sizes.values()) * item_bytes
    assert kept[-data:] == path.read_bytes()[-data:]
    infinity = torch.tensor([float("-inf")], dtype=getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()
    for element in (0, PIECE_BYTES // item_bytes, count - 1):
        for number in (b"\xff" * item_bytes, infinity):  # the first is a NaN
            raw = bytearray(path.read_bytes())
            start = len(raw) - (count - element) * item_bytes
            raw[start : start + item_bytes] = number
            (tmp_path / "bad").write_bytes(raw)
            assert scanned(tmp_path / "bad")[1] == "b"


def test_a_view_that_is_not_contiguous_is_written_in_its_order(tmp_path: Path) -> None:
    values = torch.arange(6.0).view(2, 3).T
    write_tensors(tmp_path / "x", {"a": ("float32", (3, 2))}, lambda _: [values])
    assert torch.equal(load_file(tmp_path / "x")["a"], values)
    assert (8 + int.from_bytes((tmp_path / "x").read_bytes()[:8], "little")) % 64 == 0, "data starts on a cache line"
