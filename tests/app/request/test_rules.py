"""Errors: the first ten with their paths, no more work than that, and nothing of the input."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import InvalidRequest
from app.request.body import request_rule
from app.request.rules import array_of, check, rule
from app.request.schema import MAX_TIME, MAX_WEIGHT
from loadtest.fuzz import bodies
from tests.app.serving import VOCABULARY, checked, good

POST: dict[str, Any] = {"post_id": 1, "author_id": 1}


def errors(body: Any) -> list[tuple[str, str]]:
    with pytest.raises(InvalidRequest) as caught:
        checked(body)
    return [(problem.field, problem.message) for problem in caught.value.problems]


def test_unknown_names_are_hinted_not_shown() -> None:
    messages = [message for _, message in errors(good(canddates=1, **{"x" * 5000: 1}))]
    assert "has an unknown field; did you mean candidates?" in messages
    assert "xxx" not in str(messages)


def test_problems_of_all_parts_are_told_in_order() -> None:
    body = good(
        user_id=True, history=[POST | {"actions": ["?", "favorite", "3"]}], candidates=[POST, {"post_id": "01"}]
    )
    assert [field for field, _ in errors(body | {"top_k": 0})] == [
        "user_id", "history[0].actions[0]", "history[0].actions[2]", "candidates[1].post_id", "candidates[1].author_id", "top_k",
    ]  # fmt: skip


def test_the_least_and_the_most_that_are_legal_are_not_called_wrong() -> None:
    edges = POST | {"product_surface": 0, "dwell_time": 0, "actions": {"favorite": 0}}
    body = good(
        history=[edges, POST | {"product_surface": 15}],
        candidates=[POST | {"created_at": 0, "product_surface": 0}, POST | {"created_at": MAX_TIME}],
        impression_ts=0, weights={"favorite": -MAX_WEIGHT, "reply": MAX_WEIGHT}, top_k=1,
    )  # fmt: skip
    assert checked(body).history_length == 2
    assert [field for field, _ in errors(body | {"request_id": ""})] == ["request_id"]
    for field, wrong in (("impression_ts", -1), ("impression_ts", MAX_TIME + 1), ("top_k", 0)):
        assert [path for path, _ in errors(body | {field: wrong})] == [field]


def test_ten_problems_are_looked_for_and_no_more() -> None:
    looked_at: list[int] = []

    def fit(values: Sequence[Any]) -> bool:
        looked_at.append(len(values))
        return 2 not in values

    for values in ([2] * 100_000, ([1] * 99 + [2]) * 1000):
        with pytest.raises(InvalidRequest) as caught:
            check(values, array_of(rule((fit, ""))))
        assert len(caught.value.problems) == 10
        assert sum(looked_at) < 10_000


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3) | st.sampled_from(list(good())), inner),
    )
)
def test_any_json_is_refused_with_a_reason(value: Any) -> None:
    assert 0 < len(errors(value)) <= 10


@settings(max_examples=150, deadline=None)
@given(bodies.nearly_valid())
def test_many_values_are_judged_as_each_of_them_is(value: Any) -> None:
    wrong = request_rule(VOCABULARY).wrong
    alone = {problem[1:] for problem in wrong([value])}
    assert {problem[1:] for problem in wrong([good(), value])} == alone


EVENT = POST | {"product_surface": 1, "actions": ["favorite"], "dwell_time": 1.5}
EVERYTHING = {
    "user_id": 1, "history": [EVENT], "candidates": [POST | {"product_surface": 1, "created_at": 5}],
    "weights": {"favorite": 1.0}, "top_k": 1, "actions_wanted": ["favorite"], "impression_ts": 5, "request_id": "a", "reply": "objects",
}  # fmt: skip
ODD = [
    -1, -0.0, 1.0, 0.5, 1e300, 5e-324, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**20, 10**40, -(10**40),
    None, True, "", "1", "01", str(2**64), [], {}, [1], [None], [2**64], [-1], [1.5], {"favorite": 2**64}, {"0": 1, "favorite": 1},
]  # fmt: skip


def columns(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: [item[name] for item in items] for name in items[0]}


def changed(value: Any, odd: Any) -> Iterator[Any]:
    """The value, with each part of it in turn replaced."""
    yield odd
    for place in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        for other in changed(value[place], odd):
            copied = copy.copy(value)
            copied[place] = other
            yield copied


@pytest.mark.parametrize("form", [list, columns])
def test_each_field_with_each_odd_value_is_served_or_refused_with_a_reason(form: Callable[..., Any]) -> None:
    body = EVERYTHING | {name: form(EVERYTHING[name]) for name in ("history", "candidates")}
    for odd in ODD:
        for value in changed(body, odd):
            with suppress(InvalidRequest):  # which cannot be made without a reason
                checked(value)
