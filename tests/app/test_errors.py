"""Errors: each code has the status that the operators' page says, and a refusal of fields says what is wrong in one sentence."""

from __future__ import annotations

import re

import pytest

from app import errors
from app.errors import MAX_PROBLEMS, InvalidRequest, NotFound, RequestMethod, ServiceError
from loadtest.machine import ROOT

PAGE = (ROOT / "docs/operations.md").read_text()


def test_the_page_lists_every_code_with_its_status() -> None:
    rows = re.findall(r"^\| (\d{3}) (`[^|]*`) \|", PAGE, re.M)
    listed = {code: int(status) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    assert listed.pop("headers_too_large") == 431  # of the protocol: app/server/refusals.py
    assert listed.pop("misdirected") == 421
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ServiceError)}
    assert listed == {kind.code: kind.status for kind in kinds - {NotFound, RequestMethod}}


@pytest.mark.parametrize(
    ("problems", "sentence"),
    [
        ([], "The request is not valid."),
        ([("user_id", "is required")], "user_id: is required"),
        ([("", "names one action twice")], "names one action twice"),
        ([("user_id", "is required"), ("top_k", "must be 1 or more")], "user_id: is required (and 1 more)"),
        ([("a", "is required")] * (MAX_PROBLEMS + 5), f"a: is required (and {MAX_PROBLEMS + 4} more)"),
    ],
    ids=len,
)
def test_a_refusal_says_its_first_problem_and_how_many_more(problems: list[tuple[str, str]], sentence: str) -> None:
    error = InvalidRequest(problems)
    assert error.detail == sentence
    assert len(error.problems) == min(len(problems), MAX_PROBLEMS)
