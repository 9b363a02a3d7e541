"""Streams plain arrays from npz files. Never unpickles and holds at most one chunk of an array."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from weights.errors import CheckpointError
from weights.format.tensorfile import CHUNK_BYTES

FLOAT32 = np.dtype("<f4")
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what numpy writes; zipfile unpacks others without limit


class NpzFile:
    """The arrays of an npz file by name. Use as a context manager.

    Raises CheckpointError, naming file and array, for anything but plain C-ordered arrays of the requested dtype.
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
        """The shape in an array's header. Raises CheckpointError if the array is absent, unreadable or not float32."""
        shape, dtype, stream = self._open(name)
        stream.close()
        self._check_dtype(name, dtype, FLOAT32)
        return shape

    def header(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and dtype of any array, including object arrays; nothing is unpickled."""
        shape, dtype, stream = self._open(name)
        stream.close()
        return shape, dtype

    def rows(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
        """The elements of array `name` in C order, flat, in chunks of at most 1 MiB; chunks hold whole rows if a row fits into 1 MiB.

        Raises CheckpointError before reading if shape or dtype differ, and later for a short, long or corrupted array.
        """
        found, stored, stream = self._open(name)
        with stream:
            self._check_dtype(name, stored, dtype)
            if found != shape:
                raise self._error(name, f"has shape {list(found)}, the configuration asks {list(shape)}")
            left, row = math.prod(shape) * dtype.itemsize, math.prod(shape[1:]) * dtype.itemsize
            most = CHUNK_BYTES // row * row if 0 < row <= CHUNK_BYTES else CHUNK_BYTES
            while left:
                wanted = min(left, most)
                chunk = self._read(name, stream, wanted)
                if len(chunk) != wanted:
                    raise self._error(name, "ends before its data does")
                left -= wanted
                yield np.frombuffer(bytearray(chunk), dtype)
            if self._read(name, stream, 1):
                raise self._error(name, "goes on after its data")

    def _open(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any], IO[bytes]]:
        """Shape and dtype of a C-ordered array, and a stream positioned at its data."""
        try:
            info = self._archive.getinfo(f"{name}.npy")
        except KeyError as error:
            raise CheckpointError(f"{self.path} lacks array {name}.") from error
        if info.compress_type not in _METHODS:
            raise self._error(name, f"is packed by method {info.compress_type}; only stored and deflated are read")
        with ExitStack() as unless_taken:
            try:
                stream = unless_taken.enter_context(self._archive.open(info))
                if npy.read_magic(stream) != (1, 0):  # the only version that numpy writes for a float32 array
                    raise ValueError("its version is not 1.0")
                shape, fortran_order, dtype = npy.read_array_header_1_0(stream)
            except Exception as error:  # numpy parses with ast and tokenize, whose errors depend on the Python version
                raise self._error(name, f"has no readable npy header: {_reason(error)}") from error
            if fortran_order:
                raise self._error(name, f"holds {dtype.str}, in Fortran order; only C-ordered arrays are read")
            unless_taken.pop_all()
        return shape, dtype, stream

    def _check_dtype(self, name: str, found: np.dtype[Any], wanted: np.dtype[Any]) -> None:
        if found != wanted:
            raise self._error(
                name,
                f"holds {found.str}; only little-endian {wanted.name} is read, and Python objects are never unpickled",
            )

    def _read(self, name: str, stream: IO[bytes], count: int) -> bytes:
        try:
            return stream.read(count)
        except Exception as error:
            raise self._error(name, f"cannot be read: {_reason(error)}") from error

    def _error(self, name: str, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: array {name[:200]} {reason}.")


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
