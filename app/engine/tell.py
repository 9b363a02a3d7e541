"""Tells a caller of its end, so that a fault of one never keeps the answers of its mates in a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import structlog

T = TypeVar("T")


def tell(done: Callable[[T], object], result: T) -> None:
    """Call `done`; what it raises is logged."""
    try:
        done(result)
    except Exception as error:
        structlog.get_logger("app").error("a caller could not be told", exc_info=error)
