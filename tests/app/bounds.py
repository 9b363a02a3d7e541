"""Bounds of a test's own choice, which else are fixed or follow from settings."""

from __future__ import annotations

import sys
from functools import cached_property
from typing import Any, TypeVar

import pytest
from app.limits import Group
from app.loop_lag import LoopLag

Some = TypeVar("Some", bound=Group)


def bounded(settings: Some, **bounds: Any) -> Some:
    """The same settings with these bounds. Raises AttributeError for a bound that does not exist."""
    kind = type(settings)
    for name in bounds:
        assert isinstance(getattr(kind, name), property | cached_property), name
    chosen: dict[str, Any] = {name: property(lambda _, value=value: value) for name, value in bounds.items()}
    chosen["model_config"] = {"use_attribute_docstrings": False}  # they are read from its source, in 20 ms
    return type(kind.__name__, (kind,), chosen)(**{name: getattr(settings, name) for name in kind.model_fields})


def fix(patch: pytest.MonkeyPatch, **constants: Any) -> None:
    """Give constants of `app` these values, in every module that knows them."""
    for name, value in constants.items():
        knowing = [module for path, module in sys.modules.items() if path.startswith("app.") and hasattr(module, name)]
        assert knowing, name
        for module in knowing:
            patch.setattr(module, name, value)


def overrun(patch: pytest.MonkeyPatch, *, short_of_time: bool = False) -> None:
    """Every event loop refuses every request, as one that is overrun."""
    told = property(lambda _: True, lambda lag, value: vars(lag).update(overrun=value))
    patch.setattr(LoopLag, "refuses", lambda lag, unanswered: True)
    patch.setattr(LoopLag, "overrun", told, raising=False)
    if short_of_time:
        patch.setattr(LoopLag, "is_short_of_time", True)
