"""Batches: ids to rows against Python's own integers, 64-bit wrap included, and how far requests are padded."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from model.batch import collate, hash_rows
from model.config import HashSpec
from tests.model.builders import random_config, random_request


def plain_row(identifier: int, scale: int, bias: int, spec: HashSpec) -> int:
    """The definition in exact integers."""
    if identifier == 0:
        return 0

    def wrap(x: int) -> int:
        return (x + 2**63) % 2**64 - 2**63

    return wrap(wrap(identifier) * scale + bias) % spec.modulus % (spec.vocab_size - 1) + 1


@given(
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20),
    st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1)), min_size=1, max_size=3),
    st.integers(1, 2**63 - 1),
    st.integers(2, 2**31 - 1),
)
def test_rows_are_those_of_exact_arithmetic(
    ids: list[int], functions: list[tuple[int, int]], modulus: int, vocab_size: int
) -> None:
    spec = HashSpec(tuple(s for s, _ in functions), tuple(b for _, b in functions), modulus, vocab_size)
    rows = hash_rows(np.array(ids, np.uint64), spec)
    assert rows.tolist() == [[plain_row(i, s, b, spec) for s, b in functions] for i in ids]


def test_zero_is_padding_and_nothing_else_is() -> None:
    spec = HashSpec((1,), (0,), 97, 2)
    assert hash_rows(np.array([0, 1, 97, 2**64 - 1], np.uint64), spec).tolist() == [[0], [1], [1], [1]]


def test_requests_are_padded_to_the_longest_and_no_further_unless_asked() -> None:
    config = random_config()
    short, long = random_request(config, 0, 2), random_request(config, 3, 5)
    for requests, slots, length in (([short], {}, 1 + 2), ([short, long], {}, 1 + 3 + 5),
                                    ([short], {"history_slots": 4, "candidate_slots": 7}, 1 + 4 + 7)):  # fmt: skip
        assert collate(requests, config, **slots).positions.shape == (len(requests), length)
