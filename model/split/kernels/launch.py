"""How Triton kernels are started, compiled beforehand and counted: for `model.split.kernels.fused`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from triton.runtime._async_compile import AsyncCompileMode, FutureKernel
from triton.runtime.jit import JITFunction

from model.split.kernels.attention import add_chunks, attend_tiles
from model.split.kernels.contract import softmax_shift
from model.split.kernels.matmul import multiply_gate_tiles, multiply_rotate_tiles, multiply_tiles
from model.split.kernels.products import Tile, cdiv, power_of_two
from model.split.kernels.rows import gate_rows, norm_rows, rotate_rows
from model.split.kernels.tokens import gather_rows, project_tiles

KERNELS = (
    add_chunks,
    attend_tiles,
    gate_rows,
    gather_rows,
    multiply_gate_tiles,
    multiply_rotate_tiles,
    multiply_tiles,
    norm_rows,
    project_tiles,
    rotate_rows,
)
EXACT = "tf32x3"  # three products in TF32 are as exact as one in fp32, and leave the numbers in the matrix units
LOG2_E = math.log2(math.e)
INTERPRETED = not isinstance(multiply_tiles, JITFunction)  # TRITON_INTERPRET=1 was set before the kernels were imported


class Launcher(Protocol):
    """Starts a Triton kernel over a grid; the arguments are the kernel's, its constants by keyword."""

    def __call__(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], **constants: Any) -> None: ...


def launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], **constants: Any) -> None:
    """Start the kernel on the current stream."""
    kernel[grid](*arguments, **constants)


def warm_up(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], **constants: Any) -> None:
    """Compile the kernel, start nothing."""
    kernel.warmup(*arguments, grid=grid, **constants)


def paired(tile: Tile) -> Tile:
    """The same tile for a product whose columns go in pairs."""
    return replace(tile, out=tile.out // 2)


def source_key() -> str:
    """A key that changes with the source of any kernel."""
    return " ".join(str(getattr(kernel, "cache_key", "")) for kernel in KERNELS)


def compiled_variants() -> int:
    """How many variants of the kernels this process has compiled or loaded, on all devices."""
    return sum(map(len, _caches()))


def _caches() -> list[dict[Any, Any]]:
    """Triton's own caches of compiled kernels, by kernel and device."""
    return [cache[0] for kernel in KERNELS for cache in getattr(kernel, "device_caches", {}).values()]


def softmax_constants(multiplier: float, cap: float | None, dtype: torch.dtype) -> dict[str, Any]:
    """FORM, SCALE, RISE and FALL of `bounded_weight`; without a cap only SCALE matters."""
    shift = softmax_shift(cap)
    if cap is None:
        return {"FORM": "none", "SCALE": LOG2_E * multiplier, "RISE": 0.0, "FALL": 0.0}
    if dtype == torch.bfloat16:
        return {"FORM": "fast_tanh", "SCALE": multiplier / cap, "RISE": -shift * LOG2_E, "FALL": cap * LOG2_E}
    return {
        "FORM": "tanh",
        "SCALE": 2 * LOG2_E * multiplier / cap,
        "RISE": (cap - shift) * LOG2_E,
        "FALL": 2 * cap * LOG2_E,
    }


class Launching:
    """Launches kernels with `launcher` on a device with `shared_bytes` of shared memory per program; `dependent`: see `order`."""

    def __init__(self, launcher: Launcher, shared_bytes: int, *, dependent: bool) -> None:
        self._launcher, self._shared_bytes, self._dependent = launcher, shared_bytes, dependent

    def _launch(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], **constants: Any) -> None:
        scheduling = {"launch_pdl": True} if self._dependent else {}
        self._launcher(kernel, grid, arguments, DEPENDENT=self._dependent, **constants, **scheduling)

    def _launch_product(
        self,
        kernel: Any,
        tile: Tile,
        row_tiles: int,
        inner: Sequence[int],
        columns: int,
        x: Tensor,
        *given: Any,
        **named: Any,
    ) -> None:
        """Launch a kernel of products over `columns`, or pairs of columns, of every depth in `inner`."""
        out = min(tile.out, power_of_two(columns))
        self._launch(
            kernel,
            (cdiv(columns, out), row_tiles),
            (x, *given),
            WHOLE_IN=all(depth % tile.inner == 0 for depth in inner),
            WHOLE_OUT=columns % out == 0,
            PRECISION=EXACT,
            WIDEN=INTERPRETED,
            TILE_ROWS=tile.rows,
            TILE_OUT=out,
            TILE_IN=tile.inner,
            num_warps=tile.num_warps,
            num_stages=tile.stages(self._shared_bytes, x.element_size()),
            **named,
        )

    def compile_on_threads(self, work: Callable[[], object]) -> None:
        """Compile what `work` launches, start nothing. A kernel that does not compile raises only when it is tried."""
        if INTERPRETED:
            return
        launcher, self._launcher = self._launcher, warm_up

        def compile_all() -> None:
            with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
                work()

        try:
            copy_context().run(compile_all)  # otherwise the mode would outlive an error
        finally:
            self._launcher = launcher
            for cache in _caches():
                for key in [key for key, kernel in cache.items() if isinstance(kernel, FutureKernel)]:
                    del cache[key]  # failed: its next use raises the error
