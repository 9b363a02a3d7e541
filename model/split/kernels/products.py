"""Finds which ways of computing a matrix product or attention, called kinds, give equal bits, and which of them is fastest here."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from model.split.graphs import device_seconds
from model.split.kernels.contract import FUSABLE, Part

Kind = str  # one of PRODUCT_TILES, `LIBRARY`, `SPREAD`, or `FUSED` and one of PRODUCT_TILES
LIBRARY, SPREAD, FUSED = "library", "spread", "fused "
REFERENCE: Kind = "64x64"  # where none is chosen: this tile, separate kernels, one program for all chunks of keys
PROOFS = 3  # random inputs on which bits are compared
FEW_ROWS = 256  # up to here small tiles fill more of the device, from here on large ones and the library


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile of a matrix product: rows, columns and inner step, and how Triton is to schedule it. Where columns go in pairs
    (gate and value, or the two halves of a head), it has half as many pairs."""

    rows: int
    out: int
    inner: int
    num_warps: int
    num_stages: int

    def stages(self, shared_bytes: int, size: int = 2) -> int:
        """As many of `num_stages` as fit into shared memory, for numbers of `size` bytes, with 4 KiB left for other uses."""
        return min(self.num_stages, (shared_bytes - 4096) // (self.inner * (self.rows + self.out) * size))


# Every kind adds along the inner axis from its first element on. All must give the reference's bits to be used.
PRODUCT_TILES: Mapping[Kind, Tile] = {
    REFERENCE: Tile(64, 64, 64, num_warps=4, num_stages=4),
    "64x32": Tile(64, 32, 128, num_warps=4, num_stages=8),
    "128x128": Tile(128, 128, 64, num_warps=8, num_stages=4),
    "128x256": Tile(128, 256, 64, num_warps=8, num_stages=3),
}
WIDEST: Kind = "128x256"
COMPILED: tuple[Kind, ...] = (
    *PRODUCT_TILES,
    *(FUSED + kind for kind in PRODUCT_TILES),
    SPREAD,
)  # each is a way to run a whole forward


def fits(kind: Kind, name: str, capability: int) -> bool:
    """Whether a tile fits into the registers, as compiling has shown: the widest does not for `embed`, and with pairs only for the gate
    on Hopper and later."""
    if kind == FUSED + WIDEST:
        return name == "gate_value" and capability >= 90
    return (kind, name) != (WIDEST, "embed")


class Choices:
    """Which kind computes each operation. `chosen` maps an operation's name and number of rows to a kind; all else runs as the
    reference. `forced` overrides all choices, for operations that have that kind."""

    def __init__(self, capability: int, *, narrow: bool, spread: bool) -> None:
        """narrow: bf16, else there is nothing to choose; spread: contexts may have more than one chunk."""
        self.chosen: dict[tuple[str, int], Kind] = {}
        self.forced: Kind | None = None
        self._capability, self._narrow, self._spread = capability, narrow, spread
        self._file: Path | None = None

    def kind(self, name: str, rows: int) -> Kind:
        """The kind that computes `name` with `rows` rows."""
        forced = self.forced if self._narrow else None
        return forced or self.chosen.get((name, rows), REFERENCE)

    def tile(self, name: str, rows: int, columns: int) -> Tile:
        """The tile of a separate product, no wider than its columns fill."""
        kind = self.kind(name, rows)
        tile = PRODUCT_TILES.get(kind if fits(kind, name, self._capability) else REFERENCE)
        return tile if tile and tile.out <= power_of_two(columns) else PRODUCT_TILES[REFERENCE]

    def fused(self, name: str, rows: int) -> Tile | None:
        """The tile of a product fused with what follows it; None for separate kernels."""
        kind = self.kind(name, rows)
        is_fused = kind.startswith(FUSED) and fits(kind, name, self._capability)
        return PRODUCT_TILES[kind.removeprefix(FUSED)] if is_fused else None

    def kinds(self, part: Part) -> list[Kind]:
        """Kinds to try besides the reference, for bf16 only: small tiles for few rows, large ones and the library for many."""
        few, many = part.rows <= FEW_ROWS, part.rows >= FEW_ROWS
        tiles = [kind for kind, tile in PRODUCT_TILES.items() if (few if tile.rows == 64 else many)]
        if not self._narrow:
            return []
        if part.name == "attend":
            return [SPREAD] * (few and self._spread)
        if part.name in FUSABLE:
            return [FUSED + kind for kind in tiles if fits(FUSED + kind, part.name, self._capability)]
        if part.weights:
            others = [kind for kind in tiles if kind != REFERENCE and fits(kind, part.name, self._capability)]
            others = [kind for kind in others if PRODUCT_TILES[kind].out <= power_of_two(part.weights[0].shape[1])]
            return others + [LIBRARY] * (many and part.name != "embed")
        return []

    def choose(self, parts: Callable[[int], Sequence[Part]], sizes: Sequence[int], build: str) -> dict[str, Any]:
        """Choose, by name and size, the fastest kind that gives the reference's bits (the reference included). Times `timed_sizes`;
        other sizes follow the nearest of them. Or takes what was kept for the same `build`, which the caller must check."""
        described = f"{build} {sorted(sizes)} {PRODUCT_TILES} {triton.__version__}"
        self._file = (
            Path(triton.knobs.cache.dir) / f"choices-{hashlib.sha256(described.encode()).hexdigest()[:24]}.json"
        )
        with suppress(OSError, ValueError, TypeError):
            kept = {(str(name), int(size)): str(kind) for name, size, kind in json.loads(self._file.read_text())}
            self._file.unlink()  # until they have been checked again
            self.chosen = kept
            return self._found("kept")
        ranked: dict[tuple[str, int], list[Kind]] = {}
        timed = timed_sizes(sizes)
        for size in timed:
            for part in parts(size):
                equal = [REFERENCE, *(kind for kind in self.kinds(part) if self.is_equal(part, kind))]
                ranked[part.name, size] = (
                    sorted(equal, key=lambda kind: self.seconds(part, kind)) if equal[1:] else equal
                )
                self.chosen[part.name, size] = ranked[part.name, size][0]
        for size in set(sizes) - set(timed):
            nearest = min(timed, key=lambda other: abs(other - size))
            for part in parts(size):
                passes = (
                    kind for kind in ranked[part.name, nearest] if kind != LIBRARY or self.is_equal(part, kind)
                )  # the library may take another kernel for any size
                self.chosen[part.name, size] = next(passes)
        return self._found("timed")

    def _found(self, how: str) -> dict[str, Any]:
        found: dict[str, dict[str, Kind]] = {}
        for (name, size), kind in sorted(self.chosen.items()):
            found.setdefault(name, {})[str(size)] = kind
        return {"how": how, **found}

    def keep(self) -> None:
        """Save the choices for the next start, beside Triton's compiled kernels; does nothing if that cannot be written."""
        with suppress(OSError):
            if self._file:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.write_text(json.dumps([(*key, kind) for key, kind in self.chosen.items()]))

    def seconds(self, part: Part, kind: Kind) -> float:
        """Device time of one call, over the weights of several layers, which do not fit into the cache together."""
        self.chosen[part.name, part.rows] = kind
        return device_seconds(part.run, part.layers, part.outputs[0].device)

    def is_equal(self, part: Part, kind: Kind) -> bool:
        """Whether a kind gives the reference's bits on several inputs, and leaves alone what the reference leaves alone. False if it
        does not compile or run. Raises AcceleratorError if it loses the device."""
        for seed in range(PROOFS):
            wanted = self._outputs(part, REFERENCE, seed)
            try:
                got = self._outputs(part, kind, seed)
            except torch.AcceleratorError:
                raise
            except (RuntimeError, TritonError):
                return False
            pairs = zip(wanted, got, strict=True)
            if not all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs):
                return False
        return True

    @staticmethod
    def _fill(x: Tensor, generator: torch.Generator) -> None:
        x.normal_(generator=generator)

    def _outputs(self, part: Part, kind: Kind, seed: int) -> list[Tensor]:
        """The operation's outputs on random inputs; they are filled with NaN before."""
        self.chosen[part.name, part.rows] = kind
        generator = torch.Generator(part.outputs[0].device).manual_seed(seed)
        for each in part.inputs:
            self._fill(each, generator)
        for each in part.outputs:
            each.fill_(torch.nan)
        part.run(0)
        return [each.clone() for each in part.outputs]


def timed_sizes(sizes: Sequence[int]) -> list[int]:
    """Sizes at which kinds are timed: 64, 128, 256, from there to 2048 every 512, then powers of two, and the largest."""
    wanted = {64, 128, 256, 512, 1024, 1536, 2048, 4096, 8192, max(sizes)}
    return sorted(wanted & set(sizes))


def settle_library() -> None:
    """Have cuBLAS keep one order of additions where it can: no split of the inner axis, no reduction in bf16, one workspace.

    What is set already stays. Effective only in a process that has multiplied nothing yet.
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
    """The smallest power of two that is not below n."""
    return 1 << max(0, (n - 1).bit_length())
