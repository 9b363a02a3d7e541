"""Products whose kernel goes on with the gate or RoPE that follows: how they are launched, which give equal bits, which are faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from model.config import ModelConfig
from model.split.kernels.contract import Kernels, Part, Step
from model.split.kernels.epilogues import multiply_gate_tiles, multiply_rotate_tiles
from model.split.kernels.products import (
    EXACT,
    FEW_ROWS,
    INTERPRETED,
    Launcher,
    ProductKind,
    ProductTile,
    cdiv,
    least_seconds,
    power_of_two,
)
from model.split.step import CANDIDATES, ROWS, host_arrays, step_arrays, step_bytes

SEPARATE: ProductKind = "separate"  # a product of the kind that was chosen, then the kernel for what follows
GATE = "gate_value"
ROTATED: Mapping[Part, tuple[bool, bool]] = {
    "qkv": (True, True),
    "query": (True, False),
    "key_value": (False, True),
}  # has queries, has keys and values

# Columns are counted in pairs: of gate and value, or of the two halves of a head.
FUSED_TILES: Mapping[ProductKind, ProductTile] = {
    "fused 64x32": ProductTile(64, 16, 128, num_warps=4, num_stages=4),
    "fused 64x64": ProductTile(64, 32, 64, num_warps=4, num_stages=4),
    "fused 128x128": ProductTile(128, 64, 64, num_warps=8, num_stages=4),
    "fused 128x256": ProductTile(128, 128, 64, num_warps=8, num_stages=3),
}
WIDEST: ProductKind = "fused 128x256"


def fits(kind: ProductKind, name: str, capability: int) -> bool:
    """Whether a tile stays within the registers, as compiling shows: the widest on Hopper and later, and where nothing is turned."""
    return kind != WIDEST or (name == GATE and capability >= 90)


def fused_kinds(name: str, rows: int, weight: Tensor) -> list[ProductKind]:
    """Kinds to try beside `SEPARATE` for a weight of this name: for bf16 alone, small tiles for few rows and large ones for many."""
    if weight.dtype != torch.bfloat16:
        return []
    major = torch.cuda.get_device_capability(weight.device)[0] if weight.is_cuda else 9
    small = [kind for kind, tile in FUSED_TILES.items() if tile.rows == 64 and rows <= FEW_ROWS]
    large = [kind for kind, tile in FUSED_TILES.items() if tile.rows > 64 and rows >= FEW_ROWS]
    return [kind for kind in small + large if fits(kind, name, 10 * major)]


class Fusion:
    """The fused products of an engine. `chosen` says, by the weight's name and the number of rows, which kind is used; what is not
    named runs as separate kernels."""

    def __init__(self, config: ModelConfig, rope: Tensor, launch: Launcher) -> None:
        self.chosen: dict[tuple[str, int], ProductKind] = {}
        self._config = config
        self._rope = rope
        self._launch = launch

    def gate(
        self, tile: ProductTile, counts: Tensor, row_count: int, x: Tensor, weight: Tensor, out: Tensor, rows: int
    ) -> None:
        """`out = activation(gate) ⊙ value` of `counts[row_count]` rows."""
        inner, columns = weight.shape
        self._launch(
            multiply_gate_tiles,
            (cdiv(columns // 2, tile.out), cdiv(rows, tile.rows)),
            (x, weight, out, counts, x.stride(0)),
            ROW_COUNT=row_count,
            IN=inner,
            OUT=columns // 2,
            ACTIVATION=self._config.activation,
            **_schedule(tile, columns // 2),
        )

    def rotate(
        self,
        tile: ProductTile,
        step: Step,
        row_count: int,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        part: Part,
        layer: int,
        rows: int,
    ) -> None:
        """`out = x @ weight` with queries and keys turned, keys and values of contexts also stored; `part` as in `ROTATED`."""
        inner, columns = weight.shape
        config, (has_query, has_key) = self._config, ROTATED[part]
        self._launch(
            multiply_rotate_tiles,
            (cdiv(columns // 2, tile.out), cdiv(rows, tile.rows)),
            (
                x, weight, out, step.anchor, self._rope, self._rope.shape[1], step.arrays.counts, layer, x.stride(0),
                out.stride(0),
            ),
            ROW_COUNT=row_count,
            IN=inner,
            OUT=columns,
            QUERY_HEADS=config.query_heads if has_query else 0,
            KV_HEADS=config.kv_heads if has_key else 0,
            HEAD_WIDTH=config.head_width,
            **_schedule(tile, columns // 2),
        )  # fmt: skip

    def choose(
        self, kernels: Kernels, weights: Mapping[str, Tensor], sizes: Sequence[int]
    ) -> dict[str, dict[str, ProductKind]]:
        """Of the kinds whose bits are those of separate kernels, which count themselves, the fastest here and now, by name and rows."""
        found: dict[str, dict[str, ProductKind]] = {}
        for name, weight in weights.items():
            for size in sizes:
                trial = Trial(self._config, kernels, name, weight, size)
                equal = [
                    SEPARATE,
                    *(kind for kind in fused_kinds(name, size, weight) if self.is_equal(trial, kind)),
                ]
                kind = min(equal, key=lambda kind: self.seconds(trial, kind)) if len(equal) > 1 else SEPARATE
                self.chosen[name, size] = kind
                found.setdefault(name, {})[str(size)] = kind
        return found

    def is_equal(self, trial: Trial, kind: ProductKind) -> bool:
        """Whether a kind gives, on several inputs, the bits of separate kernels, and leaves alone what they leave alone of states."""
        for seed in range(3):
            wanted, got = (self._as(trial, each, seed) for each in (SEPARATE, kind))
            pairs = zip(wanted, got, strict=True)
            if not all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs):
                return False
        return True

    def seconds(self, trial: Trial, kind: ProductKind) -> float:
        """See `least_seconds`."""
        self.chosen[trial.name, trial.rows] = kind
        return least_seconds(trial.run, trial.x.device)

    def _as(self, trial: Trial, kind: ProductKind, seed: int) -> list[Tensor]:
        self.chosen[trial.name, trial.rows] = kind
        return trial.outputs(seed)


class Trial:
    """A fused product on a made-up step: half of its rows, but for the last five, are candidates, the others belong to two contexts."""

    def __init__(self, config: ModelConfig, kernels: Kernels, name: str, weight: Tensor, rows: int) -> None:
        self.name, self.rows = name, rows
        self._kernels, self._weight = kernels, weight
        device, dtype = weight.device, weight.dtype
        generator = np.random.default_rng(rows)
        buffer = torch.zeros(step_bytes(config, rows), dtype=torch.uint8)
        host = host_arrays(buffer, config, rows)
        self.used = used = rows - 5
        candidates = rows // 2
        host.counts[[ROWS, CANDIDATES]] = used, candidates
        positions = config.candidate_position + config.candidate_length
        host.positions[:used] = generator.integers(0, positions, used)
        host.owners[:candidates] = generator.integers(0, 9, candidates)[:, None] * (1, 0) - (0, 1)
        places = np.arange(used - candidates)
        host.owners[candidates:used] = np.stack((places % 2, places // 2), 1)
        tokens = -(-rows // 64) * 32
        one = 2 * 2 * tokens * config.kv_heads * config.head_width
        self.states = torch.empty(2 * one, dtype=dtype, device=device)
        host.offsets[:2], host.states[:2] = (one, 0), (tokens, tokens)
        arrays = step_arrays(buffer.to(device), config, rows)
        self.step = Step(self.states, arrays, host, ())
        self.x = torch.randn(rows, weight.shape[0], device=device).to(dtype)
        self.between = torch.empty(rows, weight.shape[1], dtype=dtype, device=device)
        self.out = torch.empty(rows, weight.shape[1] // 2, dtype=dtype, device=device)

    def outputs(self, seed: int) -> list[Tensor]:
        """What the product leaves on random rows and a random weight, everything poisoned before: outputs, states of contexts."""
        generator = torch.Generator(self.x.device).manual_seed(seed)
        self.x.copy_(torch.randn(self.x.shape, generator=generator, device=self.x.device))
        for each in (self.between, self.out, self.states):
            each.fill_(torch.nan)
        self.run()
        return [each.clone() for each in self.written()]

    def written(self) -> list[Tensor]:
        """What separate kernels and a fused one both write."""
        return [self.out[: self.used]] if self.name == GATE else [self.between[: self.used], self.states]

    def run(self) -> None:
        """Compute it, as the trunk would."""
        if self.name == GATE:
            self._kernels.multiply_gate(self.step, self.x, self._weight, self.between, self.out, self.rows, tail=False)
        else:
            part = cast(Part, self.name)
            self._kernels.multiply_rotate(self.step, self.x, self._weight, self.between, part, 1, self.rows, tail=False)


def _schedule(tile: ProductTile, pairs: int) -> dict[str, int | str | bool]:
    return {
        "PRECISION": EXACT, "WIDEN": INTERPRETED, "TILE_ROWS": tile.rows, "TILE_OUT": min(tile.out, power_of_two(pairs)),
        "TILE_IN": tile.inner, "num_warps": tile.num_warps, "num_stages": tile.num_stages,
    }  # fmt: skip
