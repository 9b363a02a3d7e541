"""`NativeTower`: computes user vectors with the kernel of the ranker's contexts, by averaging the trunk's outputs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from model.engine import EngineError
from model.inputs import Context
from model.layers import dtype_name
from model.memory import usable_threads
from model.native.build import KernelUnavailable, Vectors
from model.native.engine import ContextRows
from model.native.kernel import arguments_of, load_kernel
from model.native.packing import GRAIN, PANEL, pack, refusal, round_up
from model.retrieval.towers import SMALLEST_SQUARE, Towers


class NativeTower:
    """The user tower on a CPU. A user's bits depend on nothing but that user's own context.

    `threads` 0 takes `usable_threads`; `vectors`, `only_if_fast` and KernelUnavailable are as in `load_kernel`. Raises EngineError
    if memory runs out.
    """

    def __init__(
        self,
        towers: Towers,
        dtype: torch.dtype = torch.float32,
        *,
        threads: int = 0,
        kernel_directory: Path | None = None,
        only_if_fast: bool = False,
        vectors: Vectors = "auto",
    ) -> None:
        self._config = towers.config
        if reason := refusal(self._config):
            raise KernelUnavailable(reason)
        self._kernel = load_kernel(kernel_directory, vectors=vectors, only_if_fast=only_if_fast)
        self._kernel.enable_tiles()
        self._packed = pack(towers, dtype, self._kernel.strip())
        self._pointer: ctypes.c_void_p | None
        self._pointer, granted_threads = self._kernel.create(
            self._packed.model, threads or usable_threads(), bf16=dtype is torch.bfloat16
        )
        head, config = self._config.head_width, self._config
        self._block_bytes = PANEL * (head + round_up(head, GRAIN)) * config.layers * config.kv_heads * dtype.itemsize
        self.notes: dict[str, Any] = {
            "backend": "native", "dtype": dtype_name(dtype), "threads": granted_threads,
            "vectors": self._kernel.vectors(),
        }  # fmt: skip

    def encode(self, contexts: Sequence[Context]) -> NDArray[np.float32]:
        """Unit vectors `[B, D]`; zero for a context without any valid token."""
        if self._pointer is None:
            raise EngineError("the user tower is closed")
        rows = [ContextRows(context, self._config) for context in contexts]
        outputs = [np.empty((job.rows, self._config.width), np.float32) for job in rows]
        jobs, key_buffers = [], []
        for job, output in zip(rows, outputs, strict=True):
            if not job.is_empty:
                blocks = -(-job.rows // PANEL)
                keys = np.zeros(blocks * self._block_bytes, np.uint8)
                key_buffers.append(keys)
                jobs.append(job.packed(blocks, keys.ctypes.data, output.ctypes.data))
        if jobs:
            self._kernel.forward(self._pointer, arguments_of(jobs, [], [b""] * 5, [0] * 3))
        return np.stack([mean_direction(output) for output in outputs])

    def close(self) -> None:
        """Free the kernel's memory."""
        if self._pointer is not None:
            self._kernel.destroy(self._pointer)
            self._pointer = None


def mean_direction(outputs: NDArray[np.float32]) -> NDArray[np.float32]:
    """The mean of rows `[n, D]` at unit length, summed row by row in fp64; zero for no rows."""
    mean = outputs.sum(0, dtype=np.float64) / max(len(outputs), 1)
    direction: NDArray[np.float32] = (mean / np.sqrt(max(float(mean @ mean), SMALLEST_SQUARE))).astype(np.float32)
    return direction
