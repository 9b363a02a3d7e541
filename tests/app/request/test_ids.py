"""Ids: one at a time or many at once, they are judged alike."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.request.ids import are_ids, read_ids
from app.request.schema import RetrieveRequest
from loadtest.fuzz.bodies import ids, odd
from tests.app.published import keeps

GOOD = [0, "0", 7, "18446744073709551615", 2**64 - 1]


def are_published_ids(values: list[Any]) -> bool:
    """By the published schema."""
    return keeps(RetrieveRequest, {"user_id": 0, "exclude": values})


@given(st.lists(ids | odd, max_size=4))
def test_ids_are_what_the_schema_says(values: list[Any]) -> None:
    assert are_ids(values) == are_published_ids(values)


@given(st.lists(ids))
def test_ids_keep_their_value(values: list[int | str]) -> None:
    assert read_ids(values).tolist() == [int(value) for value in values]


@pytest.mark.parametrize(
    "value", [-1, 2**64, "18446744073709551616", "", "00", "1,2", "1\\", '"', "]", [1], [], None, True, 1.0, "1.0", "\u0661"]
)  # fmt: skip
def test_one_that_is_no_id_spoils_the_others(value: Any) -> None:
    assert are_ids(GOOD)
    assert not are_ids([*GOOD, value])
    assert not are_ids([value])
