"""Errors: each code has the status that the operators' page says, and whoever may retry is told when."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import msgspec
import pytest

from app import errors
from app.errors import (
    Draining,
    EngineDown,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    NotReady,
    Overloaded,
    ServiceError,
    told,
)

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/operations.md").read_text()


def test_the_page_lists_every_code_with_its_status() -> None:
    rows = re.findall(r"^\| (\d{3}) (`[^|]*`) \|", PAGE, re.M)
    listed = {code: int(status) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ServiceError)}
    unlisted = {NotFound, MethodNotAllowed, errors.ModelNotFound}
    assert listed == {kind.code: kind.status for kind in kinds - unlisted}


def test_a_code_means_one_status_and_one_class() -> None:
    kinds = ServiceError.__subclasses__()
    assert len({kind.code for kind in kinds}) == len(kinds)
    for kind in kinds:
        assert errors.error_class(kind.code) is kind
    assert errors.error_class("unheard-of") is errors.InternalError


@pytest.mark.parametrize(
    ("field", "message", "sentence"),
    [("user_id", "is required", "user_id: is required"), ("", "names one action twice", "names one action twice")],
)
def test_a_refusal_names_its_field(field: str, message: str, sentence: str) -> None:
    problem = InvalidRequest(field, message).problem("r1")
    assert problem["detail"] == sentence
    assert problem["errors"] == [{"field": field, "message": message}]
    assert (problem["status"], problem["code"], problem["request_id"]) == (422, "invalid_request", "r1")


@pytest.mark.parametrize(
    ("seconds", "header"), [(None, None), (0.0, 1), (0.2, 1), (1.5, 2), (3600.0, 3600), (1e9, 3600)]
)
def test_a_retry_is_told_in_whole_seconds_that_are_not_absurd(seconds: float | None, header: int | None) -> None:
    assert Overloaded(retry_after_seconds=seconds).retry_after == header


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Draining(), "draining"),
        (MemoryError("secret"), "engine_down"),
        (KeyError("secret"), "internal"),
        (msgspec.DecodeError("secret"), "malformed_json"),
        (msgspec.ValidationError("secret"), "invalid_request"),
    ],
)
def test_whatever_is_raised_is_told_without_what_it_says(error: Exception, code: str) -> None:
    assert told(error).code == code
    assert "secret" not in str(told(error).problem())


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
    return sorted(node.lineno for node in (*made, *bare))


def test_every_refusal_says_when_to_come_back() -> None:
    files = [file for room in ("api", "corpus", "engine", "service") for file in (ROOT / "app" / room).rglob("*.py")]
    assert len(files) > 20
    found = {str(file): lines for file in files if (lines := silent(file.read_text()))}
    assert found == {}
    assert silent("raise NotReady(reason)\nraise NotReady(reason, retry_after_seconds=2.0)") == [1]
    assert silent("raise Draining\nisinstance(error, Draining)") == [1]
