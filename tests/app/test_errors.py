"""Errors: each code has the status that the operators' page says, and a refusal of fields says what is wrong in one sentence."""

from __future__ import annotations

import ast
import re

import pytest

from app import errors
from app.errors import (
    MAX_PROBLEMS,
    Draining,
    EngineDown,
    InvalidRequest,
    NotFound,
    NotReady,
    Overloaded,
    RequestMethod,
    ServiceError,
)
from loadtest.machine import ROOT

PAGE = (ROOT / "docs/operations.md").read_text()


def test_the_page_lists_every_code_with_its_status() -> None:
    rows = re.findall(r"^\| (\d{3}) (`[^|]*`) \|", PAGE, re.M)
    listed = {code: int(status) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    assert listed.pop("headers_too_large") == 431  # of the protocol: app/server/reader.py
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


RETRIED = {kind.__name__ for kind in (Overloaded, NotReady, Draining, EngineDown)}


def silent(source: str) -> list[int]:
    """Lines that make an error which a caller may retry, or pass on its class to be made, and do not say when."""

    def is_one(node: ast.AST | None) -> bool:
        return isinstance(node, ast.Name) and node.id in RETRIED

    nodes = list(ast.walk(ast.parse(source)))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    made = [
        call
        for call in calls
        if is_one(call.func) and "retry_after_seconds" not in {each.arg for each in call.keywords}
    ]
    bare = [node for node in nodes if isinstance(node, ast.Raise) and is_one(node.exc)]
    passed = [call for call in calls if any(map(is_one, call.args)) and getattr(call.func, "id", "") != "isinstance"]
    return sorted(node.lineno for node in (*made, *bare, *passed))


def test_every_refusal_says_when_to_come_back() -> None:
    files = [file for room in ("engine", "fronts", "http", "service") for file in (ROOT / "app" / room).rglob("*.py")]
    assert len(files) > 40
    found = {str(file): lines for file in files if (lines := silent(file.read_text()))}
    assert found == {}
    assert silent("raise NotReady(reason)\nraise NotReady(reason, retry_after_seconds=2.0)") == [1]
    assert silent("raise Draining\nfail(Draining)\nisinstance(error, Draining)") == [1, 2]
