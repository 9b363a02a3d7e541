"""Matrix products of the split engine by kind: what may compute one, which kinds give equal bits, which of them is fastest here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from model.split.kernels.matmul import multiply_tiles
from model.split.row_check import rows_are_independent, shape_name
from model.split.step import ROWS

ProductKind = str  # `LIBRARY`, or one of PRODUCT_TILES: rows x columns of the tile
LIBRARY: ProductKind = "library"
REFERENCE: ProductKind = "64x64"
EXACT = "tf32x3"  # three products in TF32 are as exact as one in fp32, and leave the numbers in the matrix units
INTERPRETED = not isinstance(multiply_tiles, JITFunction)  # TRITON_INTERPRET=1 was set before the kernels were imported
FEW_ROWS = 256  # up to here small tiles fill more of the device, from here on large ones and the library


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Tile of a matrix product: rows, columns and inner step, and how Triton is to schedule it."""

    rows: int
    out: int
    inner: int
    num_warps: int
    num_stages: int


# Every kind adds along the inner axis from its first element on. All must equal the reference's bits to be used.
PRODUCT_TILES: Mapping[ProductKind, ProductTile] = {
    REFERENCE: ProductTile(64, 64, 64, num_warps=4, num_stages=4),
    "64x32": ProductTile(64, 32, 128, num_warps=4, num_stages=4),
    "64x16": ProductTile(64, 16, 128, num_warps=4, num_stages=4),
    "128x128": ProductTile(128, 128, 64, num_warps=8, num_stages=4),
    "128x256": ProductTile(128, 256, 64, num_warps=8, num_stages=3),
}


class Launcher(Protocol):
    """Starts a Triton kernel over a grid; the arguments are the kernel's, its constants by keyword."""

    def __call__(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], **constants: Any) -> None: ...


class Products:
    """Matrix products on flat rows. `chosen` says, by weight shape and row count, which kind is used; what is not named runs as
    the reference. Without `library` none of cuBLAS is."""

    def __init__(self, launcher: Launcher, *, library: bool) -> None:
        self.chosen: dict[tuple[tuple[int, ...], int], ProductKind] = {}
        self._launch = launcher
        self._library = library

    def multiply(self, counts: Tensor, row_count: int, x: Tensor, weight: Tensor, out: Tensor, rows: int) -> None:
        """`out = x @ weight` by the kind that was chosen, see `multiply_as`."""
        kind = self.chosen.get((tuple(weight.shape), rows), REFERENCE)
        self.multiply_as(kind, counts, row_count, x, weight, out, rows)

    def multiply_as(
        self, kind: ProductKind, counts: Tensor, row_count: int, x: Tensor, weight: Tensor, out: Tensor, rows: int
    ) -> None:
        """The product of a given kind; the library's takes all `rows`, the others `counts[row_count]` of them."""
        if kind == LIBRARY:
            torch.mm(x[:rows], weight, out=out[:rows])
            return
        tile = PRODUCT_TILES[kind]
        inner, columns = weight.shape
        self._launch(
            multiply_tiles,
            (cdiv(columns, tile.out), cdiv(rows, tile.rows)),
            (x, weight, out, counts, x.stride(0), out.stride(0)),
            ROW_COUNT=row_count,
            IN=inner,
            OUT=columns,
            PRECISION=EXACT,
            WIDEN=INTERPRETED,
            TILE_ROWS=tile.rows,
            TILE_OUT=min(tile.out, power_of_two(columns)),
            TILE_IN=tile.inner,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    def choose(self, weights: Sequence[Tensor], sizes: Sequence[int]) -> dict[str, Any]:
        """See `Kernels.choose_products`: of the kinds that equal the reference, itself included, the fastest here and now."""
        found: dict[str, dict[str, str]] = {}
        for weight in weights:
            for size in sizes:
                wanted = preferred(size, weight.dtype, library=self._library)
                equal = [REFERENCE, *(kind for kind in wanted if self.equals_reference(kind, weight, size))]
                kind = min(equal, key=lambda kind: self.seconds(kind, weight, size)) if len(equal) > 1 else REFERENCE
                self.chosen[tuple(weight.shape), size] = kind
                found.setdefault(shape_name(weight), {})[str(size)] = kind
        return found

    def seconds(self, kind: ProductKind, weight: Tensor, rows: int) -> float:
        """See `least_seconds`."""
        counts = torch.full((8,), rows, dtype=torch.int32, device=weight.device)
        x = torch.randn(rows, weight.shape[0], device=weight.device).to(weight.dtype)
        out = torch.empty(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
        return least_seconds(partial(self.multiply_as, kind, counts, ROWS, x, weight, out, rows), weight.device)

    def equals_reference(self, kind: ProductKind, weight: Tensor, rows: int) -> bool:
        """Whether so many rows times a weight of this shape have the reference's bits, see `rows_are_independent`."""
        counts = torch.full((8,), rows, dtype=torch.int32, device=weight.device)

        def product(kind: ProductKind) -> Callable[[Tensor], Tensor]:
            def run(x: Tensor) -> Tensor:
                out = torch.full((len(x), weight.shape[1]), torch.nan, dtype=weight.dtype, device=weight.device)
                self.multiply_as(kind, counts, ROWS, x, weight, out, len(x))
                return out

            return run

        return rows_are_independent(product(kind), product(REFERENCE), rows, weight.shape[0], weight)


def preferred(rows: int, dtype: torch.dtype, *, library: bool) -> tuple[ProductKind, ...]:
    """Kinds to try beside the reference: tiles of other sizes for bf16 alone, the library from where it fills the device."""
    small, large = (("64x32", "64x16"), ("128x128", "128x256")) if dtype == torch.bfloat16 else ((), ())
    return (*(small if rows <= FEW_ROWS else ()), *(((LIBRARY,) * library + large) if rows >= FEW_ROWS else ()))


def least_seconds(work: Callable[[], None], device: torch.device) -> float:
    """The least that one call takes in a queue of several, of a few readings."""
    on_card = device.type == "cuda"
    wait = torch.cuda.current_stream(device).synchronize if on_card else lambda: None
    queued, readings = (20, 5) if on_card else (1, 3)
    seen = []
    for _ in range(readings):
        wait()
        start = time.perf_counter()
        for _ in range(queued):
            work()
        wait()
        seen.append((time.perf_counter() - start) / queued)
    return min(seen)


def settle_library() -> None:
    """Have cuBLAS keep one order of additions where it can: no split of the inner axis, no reduction in bf16, one workspace.

    What is set already stays. Effective in a process that has multiplied nothing yet.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    if torch.backends.cuda.is_built():
        torch.backends.cuda.preferred_blas_library("cublaslt")


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest that is not below n."""
    return 1 << max(0, (n - 1).bit_length())
