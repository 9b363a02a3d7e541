"""Reads float32 arrays out of npz files as a stream: never unpickles, and never holds more than one chunk of an array."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from weights.errors import CheckpointError

CHUNK_BYTES = 2**20
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what numpy writes; zipfile unpacks the others without a bound


class NpzFile:
    """The arrays of an npz file by name. Use as a context manager.

    Raises CheckpointError, naming file and array, for anything but plain little-endian C-ordered float32 arrays.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._archive = zipfile.ZipFile(path)
        except Exception as error:  # a broken archive raises more than BadZipFile
            raise CheckpointError(f"{path} is no readable npz archive: {_reason(error)}.") from error
        self.names = tuple(name.removesuffix(".npy") for name in self._archive.namelist())
        """Array names in the order of the archive."""
        if len(set(self.names)) < len(self.names):
            self._archive.close()
            raise CheckpointError(f"{path} holds two arrays of one name.")

    def __enter__(self) -> NpzFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape in an array's header. Raises CheckpointError where it is absent, unreadable or not float32."""
        shape, stream = self._open(name)
        stream.close()
        return shape

    def read(self, name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
        """The elements of array `name` in C order, float32, flat, at most 1 MiB at a time.

        Raises CheckpointError before reading when the array is not of this shape, and for a short, long or corrupted one.
        """
        found, stream = self._open(name)
        with stream:
            if found != shape:
                raise self._error(name, f"has shape {list(found)}, the configuration asks {list(shape)}")
            left = math.prod(shape) * 4
            while left:
                wanted = min(left, CHUNK_BYTES)
                chunk = self._read(name, stream, wanted)
                if len(chunk) != wanted:
                    raise self._error(name, "ends before its data does")
                left -= wanted
                yield torch.frombuffer(bytearray(chunk), dtype=torch.float32)
            if self._read(name, stream, 1):
                raise self._error(name, "goes on after its data")

    def _open(self, name: str) -> tuple[tuple[int, ...], IO[bytes]]:
        """The shape of an array, and a stream positioned at its data."""
        try:
            info = self._archive.getinfo(f"{name}.npy")
        except KeyError as error:
            raise CheckpointError(f"{self.path} lacks array {name}.") from error
        if info.compress_type not in _METHODS:
            raise self._error(name, f"is packed by method {info.compress_type}; only stored and deflated are read")
        try:
            stream = self._archive.open(info)
            if npy.read_magic(stream) != (1, 0):  # the only one that numpy writes for a float32 array
                raise ValueError("its version is not 1.0")
            shape, fortran_order, dtype = npy.read_array_header_1_0(stream)
        except Exception as error:  # numpy parses with ast and tokenize, whose errors depend on the version of Python
            raise self._error(name, f"has no readable npy header: {_reason(error)}") from error
        if dtype != np.dtype("<f4") or fortran_order:
            order = ", in Fortran order" if fortran_order else ""
            raise self._error(
                name,
                f"holds {dtype.str}{order}; only C-ordered little-endian float32 is read, and Python objects are never unpickled",
            )
        return shape, stream

    def _read(self, name: str, stream: IO[bytes], count: int) -> bytes:
        try:
            return stream.read(count)
        except Exception as error:
            raise self._error(name, f"cannot be read: {_reason(error)}") from error

    def _error(self, name: str, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: array {name[:200]} {reason}.")


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
