"""Requests as the model reads them: hashed ids, padding, ages, and the checks of columns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.batch import hash_rows
from model.config import HashSpec
from model.inputs import NO_CODES, Candidates, Context, age_bucket, codes_as_read, codes_fitting, created_within
from tests.model.builders import random_candidates, random_config, random_context

NOW = 1_780_000_000


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


@pytest.mark.parametrize(
    ("age", "bucket"),
    [(0, 1), (3599, 1), (3600, 2), (4800 * 60 - 1, 80), (4800 * 60, 81), (10**9, 81), (-1, 0), (-(10**9), 0)],
)  # fmt: skip
def test_a_posts_age_is_in_hours_and_unknown_from_the_future(age: int, bucket: int) -> None:
    config, created = random_config(), np.array([NOW - age], np.int64)
    assert age_bucket(NOW, created, config).tolist() == [bucket]
    assert age_bucket(np.array([NOW], np.int64), created, config).tolist() == [bucket]


def test_without_a_time_the_age_is_unknown() -> None:
    assert age_bucket(NOW, np.array([0, NOW], np.int64), random_config()).tolist() == [0, 1]
    assert age_bucket(0, np.array([0, 7], np.int64), random_config()).tolist() == [0, 0]


def test_an_age_limit_admits_five_minutes_of_the_future() -> None:
    assert created_within(NOW, 3600) == (NOW - 3600, NOW + 300)
    assert created_within(5, 3600) == (1, 305), "a time of 0 is unknown"


@pytest.mark.parametrize("short", ["author_ids", "surfaces", "age_buckets"])
def test_candidates_with_unequal_columns_reach_no_engine(short: str) -> None:
    """Joined with others as bytes, they would shift their neighbours' columns."""
    columns = {name: np.ones(3, np.int64) for name in ("post_ids", "author_ids", "surfaces", "age_buckets")}
    Candidates(**columns)  # type: ignore[arg-type]
    for wrong in (columns[short][:2], columns[short].astype(np.int32)):
        with pytest.raises(ValueError, match="equally long"):
            Candidates(**columns | {short: wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"surfaces": np.array([0, 1, 16])},
        {"surfaces": np.array([0, 1, -1])},
        {"author_ids": np.ones(2, np.uint64)},
        {"actions": np.ones((3, 6), np.float32)},
        {"user_id": 2**64},
        {"dropped": -1},
        {"codes": np.array([[0, 1, 12]] * 3)},
        {"codes": np.array([[0, 1, -1]] * 3)},
        {"codes": np.ones((3, 2), np.int64)},
        {"codes": np.ones((2, 3), np.int64)},
    ],
    ids=str,
)
def test_a_context_that_the_tables_do_not_have_is_refused(change: dict[str, Any]) -> None:
    config = random_config()
    context = random_context(config, 3)
    context.check(config)
    with pytest.raises(ValueError, match=r"a context|a user id|codes"):
        replace(context, **change).check(config)
    with pytest.raises(ValueError, match="beyond the model's history"):
        random_context(config, 38).check(config)


@pytest.mark.parametrize("count", [3, 100])
@pytest.mark.parametrize("column", ["surfaces", "age_buckets"])
def test_candidates_that_the_tables_do_not_have_are_refused(column: str, count: int) -> None:
    config = random_config()
    for wrong in (-1, 2**40):
        candidates = random_candidates(config, count)
        candidates.check(config)
        getattr(candidates, column)[-1] = wrong
        with pytest.raises(ValueError, match="beyond the model's surfaces or ages"):
            candidates.check(config)


def test_older_events_count_as_dropped() -> None:
    context = replace(random_context(random_config(), 9), dropped=4)
    for length, dropped in ((5, 8), (9, 4), (20, 4)):
        newest = context.last(length)
        assert (newest.user_id, newest.dropped) == (context.user_id, dropped)
        assert newest.post_ids.tolist() == context.post_ids[-length:].tolist()


def test_codes_of_other_origin_fit_or_are_none() -> None:
    """A post that lacks levels keeps the others; one with a code that the model does not know has none at all."""
    config = random_config(code_levels=3, code_values=11)
    codes = np.array([[1, 11, 2, 0], [1, 12, 2, 0], [1, 2, 3, 4], [0, 0, 0, 0]])
    assert codes_fitting(codes, 4, config).tolist() == [[1, 11, 2], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert codes_fitting(codes[:, :2], 4, config).tolist() == [[1, 11, 0], [0, 0, 0], [1, 2, 0], [0, 0, 0]]
    assert codes_fitting(NO_CODES, 4, config).tolist() == [[0, 0, 0]] * 4
    plain = random_config(code_levels=0, code_values=0)
    for width in (0, 4):
        assert codes_fitting(codes[:, :width], 4, plain).shape == (4, 0)
        assert codes_as_read(codes[:, :width], plain).shape == (4, 0)


def test_a_context_without_codes_is_the_one_with_zeros() -> None:
    config = random_config()
    context = random_context(config, 5)
    none = replace(context, codes=np.zeros((5, 0), np.int64))
    zeros = replace(context, codes=np.zeros((5, 3), np.int64))
    assert none.events(config) == zeros.events(config) != context.events(config)
    plain = replace(config, code_levels=0, code_values=0)
    assert context.events(plain) == none.events(plain)
    back = Context.of_events(context.user_id, context.events(config), config)
    assert back.codes.tolist() == context.codes.tolist()


@pytest.mark.parametrize("wrong", [np.ones((2, 3), np.int64), np.ones((3, 3), np.int32)])
def test_candidates_with_codes_of_another_length_reach_no_engine(wrong: Any) -> None:
    with pytest.raises(ValueError, match="equally long"):
        replace(random_candidates(random_config(), 3), codes=wrong)
