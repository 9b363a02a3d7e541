"""Triton: the order of kernels that are started before the one before them has ended (programmatic dependent launch, Hopper and later)."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Comes first in every kernel, in programs without work too: nothing is read or written before the kernel before this one
    has ended and its writes are seen. Then the next kernel may be started, which will wait here for this one."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
