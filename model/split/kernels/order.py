"""Triton: orders kernels that start before the previous one has ended (programmatic dependent launch, Hopper and later)."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Waits until the previous kernel has ended, then lets the next one start, which waits here for this one. Every program must call
    it, even one without work. Before the call it may write nothing, and may read only what no kernel of a forward writes (counts,
    weights, tables)."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def fetch_ahead(weight, first, inner, columns, TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr, DEPENDENT: tl.constexpr):
    """Prefetches the first tile of a bf16 weight `[inner, columns]`, its columns from `first` on, into the L2 cache, before waiting."""
    if DEPENDENT:
        LINES: tl.constexpr = (TILE_OUT + 63) // 64  # of 128 bytes
        row = tl.minimum(tl.arange(0, TILE_IN), inner - 1).to(tl.int64)
        column = tl.minimum(first + 64 * tl.arange(0, LINES), columns - 1)
        address = (weight + row[:, None] * columns + column[None, :]).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], tl.int32, is_pure=False, pack=1
        )
