"""Reads arrays from npz files of strangers: nothing is unpickled, and no entry is read before its size is known to be right."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from weights.errors import CheckpointError, reason_of
from weights.git_lfs import HEAD_BYTES, pointer_problem

FLOAT32 = np.dtype("<f4")
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")  # how one begins, and an empty one
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what numpy writes; zipfile unpacks others without a limit
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


class NpzFile:
    """The arrays of an npz file by name. Use as a context manager. Raises CheckpointError, which names file and array."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                head = file.read(HEAD_BYTES)
            if problem := pointer_problem(head):
                raise CheckpointError(f"{path} {problem}.")
            if not head.startswith(_ZIP):  # numpy would take it for a pickle, and say how to load that
                raise CheckpointError(f"{path} is not an npz archive.")
            self._archive: Any = np.load(path, allow_pickle=False)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {reason_of(error)}.") from error
        except Exception as error:  # a broken archive raises more than BadZipFile
            raise CheckpointError(f"{path} is not a readable npz archive: {_reason(error)}.") from error
        self.names = tuple(self._archive.files)
        """Array names in the order of the archive."""
        if len(set(self.names)) < len(self.names):
            self._archive.close()
            raise CheckpointError(f"{path} holds two arrays with the same name.")

    def __enter__(self) -> NpzFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    def header(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and dtype of an array, without reading its data.

        Raises CheckpointError if the entry is absent or unreadable, or does not hold as many bytes as its header says.
        """
        try:
            entry = self._archive.zip.getinfo(f"{name}.npy")
        except KeyError as error:
            raise CheckpointError(f"{self.path} lacks array {name}.") from error
        if entry.compress_type not in _METHODS:
            raise self._error(name, f"is packed by method {entry.compress_type}; only stored and deflated are read")
        try:
            with self._archive.zip.open(entry) as stream:
                shape, _, dtype = _HEADERS[npy.read_magic(stream)](stream)
                length = stream.tell() + math.prod(shape) * dtype.itemsize
        except Exception as error:  # numpy parses with ast and tokenize, whose errors depend on the Python version
            raise self._error(name, f"has no readable npy header: {_reason(error)}") from error
        if not dtype.hasobject and length != entry.file_size:
            raise self._error(name, f"is {entry.file_size} bytes long, but its header says {length}")
        return shape, dtype

    def array(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """An array of this dtype and shape, in C order. Raises CheckpointError, before anything is read if it has another."""
        stored_shape, stored_dtype = self.header(name)
        if stored_dtype != dtype:
            raise self._error(
                name, f"holds {stored_dtype.str}; only {dtype.name} is read, and Python objects never are"
            )
        if stored_shape != shape:
            raise self._error(name, f"has shape {list(stored_shape)}, {list(shape)} is expected")
        try:
            return np.asarray(self._archive[name], order="C")
        except Exception as error:  # a wrong checksum, a stream that cannot be unpacked, memory
            raise self._error(name, f"cannot be read: {_reason(error)}") from error

    def _error(self, name: str, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: array {name[:200]} {reason}.")


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
