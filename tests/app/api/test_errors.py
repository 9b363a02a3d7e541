"""Errors: each code has the status that the operators' page says, and whoever may retry is told when."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from app import errors
from app.errors import Draining, Overloaded, ServiceError, service_error_of

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/operations.md").read_text()


def test_the_page_lists_every_code_with_its_status() -> None:
    rows = re.findall(r"^\| (\d{3}) (`[^|]*`) \|", PAGE, re.M)
    listed = {code: int(status) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ServiceError)}
    assert listed == {kind.code: kind.status for kind in kinds}


def test_a_code_means_one_status_and_one_class() -> None:
    kinds = ServiceError.__subclasses__()
    assert len({kind.code for kind in kinds}) == len(kinds)
    for kind in kinds:
        assert errors.error_class(kind.code) is kind
    assert errors.error_class("unheard-of") is errors.InternalError


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
    assert service_error_of(error).code == code
    assert "secret" not in str(service_error_of(error).problem())
