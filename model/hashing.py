"""64-bit ids to embedding rows, as the published pipeline hashes them. Not for lookups in the tables."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from model.config import HashSpec


def hash_rows(ids: NDArray[np.uint64], spec: HashSpec) -> NDArray[np.int64]:
    """Rows of the entity's own table, `[..., count]`; 0 for id 0, which is padding.

    `raw = (id * scale + bias) mod modulus` with the multiply-add wrapping in two's-complement int64 and a non-negative
    modulo; `row = raw mod (vocab_size - 1) + 1`. Ids above 2^63 are reinterpreted as negative int64.
    """
    signed = np.ascontiguousarray(ids, dtype=np.uint64).view(np.int64)[..., None]
    scales, biases = hash_functions(spec)
    with np.errstate(over="ignore"):
        raw = np.mod(signed * scales + biases, np.int64(spec.modulus))
    rows: NDArray[np.int64] = np.mod(raw, np.int64(spec.vocab_size - 1)) + 1
    rows[np.broadcast_to(signed == 0, rows.shape)] = 0
    return rows


@functools.cache
def hash_functions(spec: HashSpec) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Scales and biases, `[count]` each: the int64 with the same low 64 bits."""
    scales, biases = (np.array([value % 2**64 for value in values], np.uint64) for values in (spec.scales, spec.biases))
    return scales.view(np.int64), biases.view(np.int64)
