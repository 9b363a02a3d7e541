"""Reads safetensors from an open file, checking them on the way, and writes them as a stream.

The library reads and checks headers. It checks no content and maps what it reads: here an open file is hashed, checked and then mapped,
and a file that shrinks meanwhile is an error instead of a fatal signal. The library's writer needs whole tensors. Layout: header length
(uint64, little-endian), JSON header, data.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weights.errors import CheckpointError
from weights.format.manifest import FileEntry

Buffer = Any  # a writable mmap or bytearray, as torch.frombuffer wants it; the stubs have no common name for both
Progress = Callable[[int, int], None]
"""Called with bytes done and total bytes, from several threads but never concurrently."""

PIECE_BYTES = 2**20  # small enough to be read, hashed and checked in the processor's cache
_ALIGNMENT_BYTES = 64  # data starts on a cache line, so table rows touch as few lines as possible
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


def stored_tensors(file: FileIO, file_bytes: int) -> dict[str, StoredTensor]:
    """The tensors of an open safetensors file, in order of their data, which ends with the file and has neither holes nor overlaps.

    Raises CheckpointError for a header that cannot be read or lies, and for a dtype that is not stored here.
    """
    try:
        with safe_open(f"/dev/fd/{file.fileno()}", "np") as opened:  # not by name: another file may have it by now
            slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
    except SafetensorError as error:
        raise CheckpointError(f"is not a readable safetensors file ({str(error)[:200]})") from error
    described = {}
    for name, slice_ in slices.items():
        if (stored := slice_.get_dtype()) not in _STORED:
            raise CheckpointError(f"holds tensor {name[:100]} as {stored}; only {', '.join(_STORED)} are read")
        described[name] = StoredTensor(_STORED[stored], tuple(slice_.get_shape()), 0)
    place = file_bytes - sum(tensor.bytes for tensor in described.values())
    tensors = {}
    for name, tensor in described.items():
        tensors[name] = replace(tensor, start=place)
        place += tensor.bytes
    return tensors


def scan(
    file: FileIO, tensors: Mapping[str, StoredTensor], keep: Buffer | None, advance: Callable[[int], None]
) -> tuple[str, str | None]:
    """Read a file from its start. Return its SHA-256 in hex and the first tensor with a NaN or infinity, or None.

    `tensors` are its `stored_tensors`. `keep`, a buffer as long as the file, receives the data at its offsets.
    `advance` is called with the bytes of each piece. Raises CheckpointError when the file ends early.
    """
    header = bytearray(min((tensor.start for tensor in tensors.values()), default=0))
    file.seek(0)
    _fill(file, header)
    digest = hashlib.sha256(header)
    scratch = memoryview(bytearray(0 if keep else PIECE_BYTES))
    corrupted = None
    for name, tensor in tensors.items():
        for place in range(0, tensor.bytes, PIECE_BYTES):
            count = min(PIECE_BYTES, tensor.bytes - place)
            start = tensor.start + place
            piece = memoryview(keep)[start : start + count] if keep else scratch[:count]
            _fill(file, piece)
            digest.update(piece)  # releases the interpreter lock, so files are hashed in parallel
            if corrupted is None and not is_finite(torch.frombuffer(piece, dtype=_TORCH[tensor.dtype])):
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
    pieces: Callable[[str], Iterable[Tensor]],
    advance: Callable[[int], None] = lambda count: None,
) -> FileEntry:
    """Write tensors, name → (dtype, shape), in this order to a new file; `pieces(name)` gives the elements in order.

    `advance` is called with the bytes of each piece. Pieces may have any size, shape, convertible dtype and device; each is
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
            for piece in pieces(name):
                values = piece.detach().to("cpu", _TORCH[dtype]).reshape(-1)
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
