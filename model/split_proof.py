"""Proofs, by running, that a matrix product gives a row the same bits wherever the row stands. Not a substitute for the
self-test, which runs whole forwards (`model.selftest`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from model.engine import EngineError
from model.kernels.portable import PortableKernels
from model.split_step import TILE_ROWS
from model.split_trunk import SplitTrunk

Product = Callable[[Tensor], Tensor]
WIDE_ROW_SIZES = (1024, 256)  # wanted beside TILE_ROWS, where they give the same bits


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bits; NaN never does."""
    return bool(torch.equal(one, other))


def rows_are_independent(product: Product, reference: Product, rows: int, width: int, like: Tensor) -> bool:
    """Whether `product`, on `rows` random rows at once, gives each the bits that `reference` gives it.

    `reference` takes any number of rows. Three compositions: the rows as they are, the rows in another order, and every
    other row replaced. `like` names device and dtype.
    """
    generator = torch.Generator().manual_seed(rows * 1_000_003 + width)
    x = torch.randn(rows, width, generator=generator).to(like)
    expected = reference(x)
    order = torch.randperm(rows, generator=generator).to(like.device)
    mates = x.clone()
    mates[1::2] = torch.randn(x[1::2].shape, generator=generator).to(like) * 3
    return (
        same_bits(product(x), expected)
        and same_bits(product(x[order]), expected[order])
        and same_bits(product(mates)[::2], expected[::2])
    )


def prove_portable_products(kernels: PortableKernels, trunk: SplitTrunk, notes: dict[str, Any]) -> None:
    """Keep, for each weight, the row counts that give the bits of TILE_ROWS rows a call. Raises EngineError when even those
    depend on a row's place.
    """
    proved: dict[str, list[int]] = {}
    for weight in trunk.linear_weights():

        def product(x: Tensor, weight: Tensor = weight) -> Tensor:
            return x @ weight

        def reference(x: Tensor, weight: Tensor = weight) -> Tensor:
            return torch.cat([tile @ weight for tile in x.split(TILE_ROWS)])

        width = weight.shape[0]
        if not rows_are_independent(reference, reference, 4 * TILE_ROWS, width, weight):
            raise EngineError(f"{TILE_ROWS} rows times {tuple(weight.shape)}: a row's bits depend on its place")
        sizes = [s for s in WIDE_ROW_SIZES if rows_are_independent(product, reference, s, width, weight)]
        kernels.row_sizes[tuple(weight.shape)] = (*sizes, TILE_ROWS)
        proved["x".join(map(str, weight.shape))] = [*sizes, TILE_ROWS]
    notes["row_counts_with_equal_bits"] = proved
