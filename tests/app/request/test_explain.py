"""Errors: the first ten with their paths, no more work than that, and nothing of the input."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import InvalidRequest
from app.request.explain import explain, request_rule
from app.request.vocabulary import Vocabulary
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


def test_ten_problems_are_looked_for_and_no_more() -> None:
    class Counting(dict[str, int]):
        looked_up = 0

        def __contains__(self, name: object) -> bool:
            self.looked_up += 1
            return super().__contains__(name)

    body = good(weights=..., actions_wanted=...)
    for count in (10, 10_000):
        index = Counting(VOCABULARY.index)
        vocabulary = Vocabulary(VOCABULARY.action_names, index, VOCABULARY.product_surfaces, VOCABULARY.weights)
        found = explain(body | {"history": [POST | {"actions": ["?"] * count}]}, request_rule(vocabulary))
        assert (len(found.problems), index.looked_up) == (10, 10)


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3) | st.sampled_from(list(good())), inner),
    )
)
def test_any_json_is_refused_with_a_reason(value: Any) -> None:
    assert 0 < len(errors(value)) <= 10


def test_a_refusal_without_a_reason_is_a_fault_of_ours() -> None:
    with pytest.raises(AssertionError):
        explain(good(), request_rule(VOCABULARY))
