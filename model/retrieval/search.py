"""Exact search: what a score is, which rows are the best, and the plain definition of both. Faster paths are tested against it.

The bound that lets a fast path score few rows. A row x is kept as x' = s·q, q in 8 bits, a query u as u' = t·p, p in 16 bits.
`|u·x − u'·x'| ≤ ‖u‖·‖x − x'‖ + ‖u − u'‖·‖x'‖` (Cauchy–Schwarz), and a sum of D products in fp32, whose largest chain has
`D/16 + 4` additions, is within `(D/16 + 6)·2⁻²⁴·‖u‖·‖x‖` of the real one. With b the sum of these (and of a few roundings more),
`u'·x' − b` and `u'·x' + b` enclose the score. If k visible rows have lower bounds of T or more, a row whose upper bound lies below
T has k rows above it, and is not among the best k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from model.device import losses_of
from model.engine import EngineError

LANES = 16
WORD_ROWS = 64  # rows in one word of a mask
BLOCK_ROWS = 65536  # rows in one product with a batch of queries

Bits = NDArray[np.uint64]


@dataclass(slots=True, eq=False)
class Wish:
    """What to look for: the best `k` rows for `query` (float32 `[D]`) that are visible and score `least` or more.

    `visible`: one bit per row, row r in word `r // 64`, bit `r % 64`; None for every row. See `bits_of`.
    """

    query: NDArray[np.float32]
    k: int
    visible: Bits | None = None
    least: float = -np.inf

    def checked(self, rows: int, width: int) -> tuple[NDArray[np.float32], Bits | None]:
        """Query and mask for an index of `rows` rows of this width. Raises ValueError, as the next two do."""
        return self.checked_query(width), None if self.visible is None else self.checked_bits(rows)

    def checked_query(self, width: int) -> NDArray[np.float32]:
        """The query, C-ordered. Raises ValueError for another width, numbers that are not finite, a k below 1, or a `least` of NaN."""
        query = np.ascontiguousarray(self.query, np.float32)
        if query.shape != (width,) or not np.isfinite(query).all() or self.k < 1 or np.isnan(self.least):
            raise ValueError(f"a wish needs a finite query of width {width}, a k of 1 or more, and no NaN")
        return query

    def checked_bits(self, rows: int) -> Bits:
        """The mask. Raises ValueError if it does not have one bit per row."""
        if self.visible is None or self.visible.dtype != np.uint64 or self.visible.shape != (-(-rows // WORD_ROWS),):
            raise ValueError(f"visible must be uint64 with a bit for each of {rows} rows")
        return np.ascontiguousarray(self.visible)


@dataclass(slots=True, eq=False)
class Hits:
    """`rows`: int64, best first, equal scores by row. `scores`: float32. `visible`: how many rows could have been found.
    `scored`: how many of them were scored in fp32."""

    rows: NDArray[np.int64]
    scores: NDArray[np.float32]
    visible: int
    scored: int


class Index(Protocol):
    """Rows that can be searched."""

    def __len__(self) -> int: ...

    def search(self, wishes: Sequence[Wish]) -> list[Hits]:
        """The best rows for each wish, in the order of the wishes. Raises ValueError for one that does not fit the rows."""
        ...

    def close(self) -> None:
        """Free its memory."""
        ...


def bits_of(visible: NDArray[np.bool_]) -> Bits:
    """A mask `[n]` as the words that `Wish.visible` wants."""
    packed = np.packbits(visible, bitorder="little")
    return np.pad(packed, (0, -len(packed) % 8)).view("<u8").astype(np.uint64, copy=False)


def mask_of(bits: Bits, rows: int) -> NDArray[np.bool_]:
    """The inverse of `bits_of`."""
    return np.unpackbits(bits.astype("<u8").view(np.uint8), count=rows, bitorder="little").astype(np.bool_)


def score_rows(vectors: Tensor, query: Tensor) -> Tensor:
    """Scores fp32 `[n]` of rows `[n, D]`: the definition, in bits.

    Adds one product at a time to sixteen running sums, then folds the sums in halves: every device that adds and multiplies as
    in IEEE 754 gives the same bits, for any n. A score is never −0.
    """
    products = functional.pad(vectors * query, (0, -vectors.shape[1] % LANES)).unflatten(-1, (-1, LANES))
    sums = torch.zeros_like(products[:, 0])
    for step in range(products.shape[1]):
        sums = sums + products[:, step]
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def best(
    rows: NDArray[np.int64], scores: NDArray[np.float32], wish: Wish
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The scored rows that fit the wish: best first, equal scores by row."""
    order = np.lexsort((rows, -scores))
    order = order[scores[order] >= wish.least][: wish.k]
    return rows[order], scores[order]


class TorchIndex:
    """The search in torch alone, on any device: multiplies every row with the device's own routine, whose rounding is bounded,
    then runs `score_rows` on rows that can be among the best. With `exhaustive` it scores every row: the definition.
    """

    def __init__(
        self, vectors: NDArray[np.float32], device: torch.device | str = "cpu", *, exhaustive: bool = False
    ) -> None:
        """Raises EngineError if products on the device are not computed in fp32."""
        self._vectors = torch.from_numpy(vectors).to(device)
        if self._vectors.is_cuda and torch.get_float32_matmul_precision() != "highest":
            raise EngineError("the search on a card needs products in fp32, and this process has asked torch for less")
        self._exhaustive = exhaustive
        blocks = self._vectors.split(BLOCK_ROWS)  # the whole in float64 would take four times its memory
        self._longest = float(torch.stack([block.double().square().sum(1).max() for block in blocks]).max().sqrt())

    def __len__(self) -> int:
        return len(self._vectors)

    def search(self, wishes: Sequence[Wish]) -> list[Hits]:
        """The best rows of each wish, in order. The wishes share one product with each block of rows. Raises a sticky EngineError if the
        device is lost."""
        if not wishes:
            return []
        with losses_of(self._vectors.device):
            return self._search(wishes)

    def _search(self, wishes: Sequence[Wish]) -> list[Hits]:
        vectors = self._vectors
        stacked = np.stack([wish.checked_query(vectors.shape[1]) for wish in wishes])
        queries = torch.from_numpy(stacked).to(vectors.device)
        if self._exhaustive:
            return [self._one(wish, query, None) for wish, query in zip(wishes, queries, strict=True)]
        rough = torch.cat([queries @ block.T for block in vectors.split(BLOCK_ROWS)], 1)
        return [self._one(*one) for one in zip(wishes, queries, rough, strict=True)]

    def _one(self, wish: Wish, query: Tensor, rough: Tensor | None) -> Hits:
        """`rough`: the query's products with every row, as the device makes them; None to score all rows."""
        width, shown = self._vectors.shape[1], self._shown(wish)
        seen = int(shown.sum())
        if rough is not None and wish.k < seen:
            rough = rough.masked_fill(~shown, -torch.inf)
            # both the rough product and the score are sums of D products: each within D·2⁻²⁴ of the real one, and a little more
            bound = 4 * (width + 8) * 2.0**-24 * float(query.double().square().sum().sqrt()) * self._longest + 1e-30
            shown = rough >= rough.topk(wish.k).values[-1] - bound
        rows = shown.nonzero()[:, 0]
        scores = score_rows(self._vectors[rows], query)
        best_rows, values = best(rows.cpu().numpy(), scores.cpu().numpy(), wish)
        return Hits(best_rows, values, seen, len(rows))

    def _shown(self, wish: Wish) -> Tensor:
        """The mask of a wish, bool `[n]`; its bits are unpacked on the device."""
        count, device = len(self._vectors), self._vectors.device
        if wish.visible is None:
            return torch.ones(count, dtype=torch.bool, device=device)
        words = torch.from_numpy(wish.checked_bits(count).astype("<u8", copy=False).view(np.uint8)).to(device)
        return (words[:, None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1).view(-1)[:count].bool()

    def close(self) -> None:
        """Drop the vectors; those on the host belong to the caller."""
        self._vectors = self._vectors[:0].clone()
