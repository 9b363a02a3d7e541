"""Checks, on random rows, that a matrix product gives a row the same bits at every place and for every number of rows.

Not a substitute for the self-test, which runs whole forwards (`model.selftest`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]


def rows_are_independent(product: Product, reference: Product, rows: int, width: int, like: Tensor) -> bool:
    """Whether `product`, on `rows` random rows at once, gives each the bits that `reference` gives it; NaN never passes.

    `reference` takes any number of rows. Three compositions: the rows as they are, the rows in another order, and every
    other row replaced. `like` names device and dtype.
    """
    generator = torch.Generator(like.device).manual_seed(rows * 1_000_003 + width)

    def random_rows(count: int) -> Tensor:
        return torch.randn(count, width, generator=generator, device=like.device).to(like.dtype)

    x = random_rows(rows)
    expected = reference(x)
    order = torch.randperm(rows, generator=generator, device=like.device)
    others = x.clone()
    others[1::2] = 3 * random_rows(rows // 2)
    return (
        torch.equal(product(x), expected)
        and torch.equal(product(x[order]), expected[order])
        and torch.equal(product(others)[::2], expected[::2])
    )


def shape_name(weight: Tensor) -> str:
    """`in x out`, for people."""
    return "x".join(map(str, weight.shape))
