"""Columns that grow piece by piece, in memory or in files that are mapped afterwards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

Columns = dict[str, NDArray[Any]]
SHAPES = "shapes.json"
"""The dtype and shape of each file, by its name without `.bin`."""


class Growing(Protocol):
    """Takes the next rows of some columns. All pieces of a column have one dtype and one size of the axes after the first."""

    def append(self, pieces: Mapping[str, NDArray[Any]]) -> None: ...


class InMemory:
    """Columns in memory."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[NDArray[Any]]] = {}

    def append(self, pieces: Mapping[str, NDArray[Any]]) -> None:
        """Add rows to each of these columns."""
        for name, piece in pieces.items():
            self._pieces.setdefault(name, []).append(piece)

    def columns(self) -> Columns:
        """Each column, whole."""
        return {name: np.concatenate(pieces) for name, pieces in self._pieces.items()}


class InFiles:
    """Columns in files of a directory, `NAME.bin`, and their dtypes and shapes in SHAPES. A context manager: its end closes the files."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._stack = directory, ExitStack()
        self._files: dict[str, BinaryIO] = {}
        self._shapes: dict[str, tuple[str, list[int]]] = {}

    def append(self, pieces: Mapping[str, NDArray[Any]]) -> None:
        """Add rows to each of these columns. Raises OSError."""
        for name, piece in pieces.items():
            if name not in self._files:
                self._files[name] = self._stack.enter_context((self._directory / f"{name}.bin").open("xb"))
                self._shapes[name] = piece.dtype.str, [0, *piece.shape[1:]]
            self._shapes[name][1][0] += len(piece)
            self._files[name].write(np.ascontiguousarray(piece).data)

    def __enter__(self) -> InFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if error is None:
            (self._directory / SHAPES).write_text(json.dumps(self._shapes))


def mapped_columns(directory: Path) -> Columns:
    """The columns that `InFiles` wrote to a directory, mapped for reading. Raises OSError, ValueError for a file that was cut."""
    columns: Columns = {}
    for name, (dtype, shape) in json.loads((directory / SHAPES).read_text()).items():
        if 0 in shape:  # an empty file cannot be mapped
            columns[name] = np.zeros(shape, dtype)
        else:
            columns[name] = np.asarray(np.memmap(directory / f"{name}.bin", dtype, "r", shape=tuple(shape)))
    return columns
