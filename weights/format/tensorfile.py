"""Reads safetensors from an open file, checking them on the way, and writes them as a stream.

The library's reader opens a path itself and checks no content. Here an open file is hashed, checked and then mapped, and a file
that shrinks meanwhile is an error instead of a fatal signal. The library's writer needs whole tensors. Layout: header length
(uint64, little-endian), JSON header, data.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weights.errors import CheckpointError
from weights.format.manifest import FileEntry, check_keys, parse_json_object

Buffer = Any  # a writable mmap or bytearray, as torch.frombuffer wants it; the stubs have no common name for both
Progress = Callable[[int, int], None]
"""Called with bytes done and total bytes, from several threads but never concurrently."""

CHUNK_BYTES = 2**20  # small enough to be read, hashed and checked in the processor's cache
_ALIGNMENT_BYTES = 64  # data starts on a cache line, so table rows touch as few lines as possible
_MAX_HEADER_BYTES = 16 * 2**20
_STORED = {"F32": "float32", "BF16": "bfloat16", "I32": "int32", "I64": "int64", "U8": "uint8"}
_TORCH = {name: getattr(torch, name) for name in _STORED.values()}
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int32": 4, "int64": 8, "uint8": 1}
_BFLOAT16_EXPONENT = np.int16(0x7F80)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: `dtype` is `float32`, `bfloat16`, `int32`, `int64` or `uint8`; its data starts at byte `start` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Length of its data in bytes."""
        return self.count * _ITEM_BYTES[self.dtype]

    def view(self, buffer: Buffer) -> Tensor:
        """The tensor, sharing the buffer's memory."""
        flat = torch.frombuffer(buffer, dtype=_TORCH[self.dtype], count=self.count, offset=self.start)
        return flat.view(self.shape)


def read_header(file: FileIO, file_bytes: int) -> tuple[bytes, dict[str, StoredTensor]]:
    """The raw header and the tensors of a safetensors file, in order of their data. Leaves the file at the start of its data.

    Raises CheckpointError if the tensors do not fill the file's `file_bytes` without holes or overlaps.
    """
    if file_bytes < 8:
        raise CheckpointError(f"is {file_bytes} bytes long, too short for a safetensors file")
    prefix = bytearray(8)
    _fill(file, prefix)
    length = int.from_bytes(prefix, "little")
    if length > min(file_bytes - 8, _MAX_HEADER_BYTES):
        raise CheckpointError("is no safetensors file: its header would be longer than the file, or than 16 MiB")
    text = bytearray(length)
    _fill(file, text)
    entries = parse_json_object(bytes(text))
    entries.pop("__metadata__", None)
    tensors = [(name, *_entry(name, item)) for name, item in entries.items()]
    tensors.sort(key=lambda tensor: tensor[3])
    stored, place = {}, 0
    for name, dtype, shape, start, stop in tensors:
        stored[name] = StoredTensor(dtype, shape, 8 + length + start)
        if start != place or stop - start != stored[name].bytes:
            raise CheckpointError(f"has a hole or an overlap at tensor {name[:100]}")
        place = stop
    if 8 + length + place != file_bytes:
        raise CheckpointError(f"is {file_bytes} bytes long, but its tensors end at {8 + length + place}")
    return bytes(prefix + text), stored


def _entry(name: str, item: Any) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(item, dict):
        raise CheckpointError(f"has no description of tensor {name[:100]}")
    check_keys(item, {"dtype": str, "shape": list, "data_offsets": list}, f"tensor {name[:100]}")
    if item["dtype"] not in _STORED:
        raise CheckpointError(f"holds tensor {name[:100]} as {item['dtype'][:40]}; only {', '.join(_STORED)} are read")
    numbers = [*item["shape"], *item["data_offsets"]]
    if len(item["data_offsets"]) != 2 or any(type(number) is not int or not 0 <= number < 2**48 for number in numbers):
        raise CheckpointError(f"has a bad shape or bad offsets at tensor {name[:100]}")
    return _STORED[item["dtype"]], tuple(item["shape"]), item["data_offsets"][0], item["data_offsets"][1]


def scan(
    file: FileIO,
    header: bytes,
    tensors: Mapping[str, StoredTensor],
    keep: Buffer | None,
    advance: Callable[[int], None],
) -> tuple[str, str | None]:
    """Read the data of a file after `read_header`. Return its SHA-256 in hex and the first tensor with a NaN or infinity, or None.

    `header` and `tensors` are what `read_header` returned. `keep`, a buffer as long as the file, receives the data at its offsets.
    `advance` is called with the bytes of each chunk. Raises CheckpointError when the file ends early.
    """
    digest = hashlib.sha256(header)
    scratch = memoryview(bytearray(0 if keep else CHUNK_BYTES))
    corrupted = None
    for name, tensor in tensors.items():
        for place in range(0, tensor.bytes, CHUNK_BYTES):
            count = min(CHUNK_BYTES, tensor.bytes - place)
            start = tensor.start + place
            chunk = memoryview(keep)[start : start + count] if keep else scratch[:count]
            _fill(file, chunk)
            digest.update(chunk)  # releases the interpreter lock, so files are hashed in parallel
            if corrupted is None and not is_finite(torch.frombuffer(chunk, dtype=_TORCH[tensor.dtype])):
                corrupted = name
            advance(count)
    return digest.hexdigest(), corrupted


def _fill(file: FileIO, buffer: bytearray | memoryview) -> None:
    place, view = 0, memoryview(buffer)
    while place < len(view):
        count = file.readinto(view[place:])
        if not count:
            raise CheckpointError("became shorter while it was being read")
        place += count


def is_finite(values: Tensor) -> bool:
    """Whether a CPU tensor of a stored dtype has no NaN and no infinity.

    Uses numpy, because torch would start a pool of threads in every thread that reads a file.
    """
    if not values.dtype.is_floating_point:
        return True
    if values.dtype == torch.float32:
        return bool(np.isfinite(values.numpy()).all())
    # numpy has no bfloat16; an exponent of all ones is NaN or infinity
    exponents = values.view(torch.int16).numpy() & _BFLOAT16_EXPONENT
    return not bool((exponents == _BFLOAT16_EXPONENT).any())


def advancing(progress: Progress | None, total: int) -> Callable[[int], None]:
    """A function to call with each number of bytes that was read or written, by any thread; it tells `progress`."""
    done, lock = 0, threading.Lock()

    def advance(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            if progress:
                progress(done, total)

    return advance


def write_tensors(
    path: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    chunks: Callable[[str], Iterable[Tensor]],
    advance: Callable[[int], None] = lambda count: None,
) -> FileEntry:
    """Write tensors, name → (dtype, shape), in this order to a new file; `chunks(name)` gives the elements in order.

    `advance` is called with the bytes of each chunk. Chunks may have any size, shape, convertible dtype and device; each is
    converted, checked, hashed and written in turn. Raises CheckpointError for values that are not
    finite in the file's dtype, and for too many or too few values.
    """
    names = {dtype: stored for stored, dtype in _STORED.items()}
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + StoredTensor(dtype, shape, 0).bytes
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    prefix = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(prefix)
    with path.open("xb") as file:
        file.write(prefix)
        for name, (dtype, shape) in tensors.items():
            left = math.prod(shape)
            for chunk in chunks(name):
                values = chunk.detach().to("cpu", _TORCH[dtype]).reshape(-1)
                if not len(values):
                    continue  # its stride may be 0, and its bytes no view
                left -= len(values)
                if left < 0:
                    raise CheckpointError(f"tensor {name} has more values than its shape")
                if not is_finite(values):
                    raise CheckpointError(f"tensor {name} holds a NaN or an infinity")
                data = values.view(torch.uint8).numpy().data
                file.write(data)
                digest.update(data)
                advance(len(data))
            if left:
                raise CheckpointError(f"tensor {name} has fewer values than its shape")
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(digest.hexdigest(), len(prefix) + end)
