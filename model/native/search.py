"""`NativeIndex`: the exact search of search.cpp as Python calls it. Knows rows and bits, not posts."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model.engine import EngineError
from model.memory import usable_threads
from model.native.build import HERE, Vectors, build_kernel
from model.native.kernel import check_status, open_library
from model.native.packing import Float, Int64, Pointer, structure
from model.retrieval.search import Hits, Wish

CWish = structure(
    "Wish",
    (Pointer, "query visible"),
    (Int64, "k"),
    (Float, "least"),
    (Int64, "found seen scored"),
    (Pointer, "rows scores"),
)  # mirrored in search.cpp


class NativeIndex:
    """An index with an 8-bit copy of each fp32 row. The fp32 rows are read in place and must not change.

    Used by one thread at a time. Raises KernelUnavailable if the kernel cannot be built, EngineError if memory runs out.
    """

    def __init__(
        self,
        vectors: NDArray[np.float32],
        *,
        threads: int = 0,
        kernel_directory: Path | None = None,
        kind: Vectors = "auto",
        defines: Sequence[str] = (),
        library: ctypes.CDLL | None = None,
    ) -> None:
        """vectors: float32 `[n, D]`, C-ordered, finite. `threads` 0: `usable_threads`; `kind`: the vector instructions. `library`: that of
        another index, in place of building or finding one."""
        self._pointer: ctypes.c_void_p | None = None
        if vectors.dtype != np.float32 or not vectors.flags.c_contiguous or vectors.ndim != 2 or not len(vectors):
            raise ValueError("vectors must be C-ordered float32 [n, D], one row at least")
        self.note = ""
        if library is None:
            built = build_kernel(kernel_directory, *defines, source=HERE / "search.cpp", vectors=kind)
            self.note = built.note
            library = open_library(built.path, [CWish])
            library.search_run.argtypes = (Pointer, Pointer, Int64)
            library.search_destroy.argtypes = (Pointer,)
        self.library = library
        self._vectors = vectors
        self._pointer = ctypes.c_void_p()
        rows, width = (Int64(size) for size in vectors.shape)
        count = Int64(threads or usable_threads())
        status = self.library.search_create(
            Pointer(vectors.ctypes.data), rows, width, count, ctypes.byref(self._pointer)
        )
        check_status(status, "make an index")

    def __len__(self) -> int:
        return len(self._vectors)

    def search(self, wishes: Sequence[Wish]) -> list[Hits]:
        """The best rows for each wish. A row's score has the same bits whatever else is searched for, and wherever it stands."""
        if self._pointer is None:
            raise EngineError("the index is closed")
        arrays, results = [], []
        count, width = self._vectors.shape
        wish_structs = (CWish * len(wishes))()
        for place, wish in enumerate(wishes):
            query, visible = wish.checked(count, width)
            k = min(wish.k, count)
            rows, scores = np.empty(k, np.int64), np.empty(k, np.float32)
            arrays.append((query, visible))
            results.append((rows, scores))
            wish_structs[place] = CWish(
                query.ctypes.data, None if visible is None else visible.ctypes.data, k, wish.least, 0, 0, 0,
                rows.ctypes.data, scores.ctypes.data,
            )  # fmt: skip
        check_status(self.library.search_run(self._pointer, ctypes.addressof(wish_structs), len(wishes)), "search")
        return [
            Hits(rows[: wish_struct.found], scores[: wish_struct.found], wish_struct.seen, wish_struct.scored)
            for wish_struct, (rows, scores) in zip(wish_structs, results, strict=True)
        ]

    def close(self) -> None:
        """End its threads and free its rows."""
        if self._pointer is not None:
            self.library.search_destroy(self._pointer)
            self._pointer = None

    def __del__(self) -> None:
        self.close()
