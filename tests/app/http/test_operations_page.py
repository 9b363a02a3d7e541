"""The operator's page lists every setting with the default that is in force."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel

from app.settings import Group, Settings

PAGE = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()


def defaults(model: type[BaseModel], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Group):
            found |= defaults(field.annotation, f"{prefix}{name.upper()}__")
        else:
            found[prefix + name.upper()] = field.default
    return found


def test_every_setting_is_listed_with_its_default() -> None:
    listed = dict(re.findall(r"^\| `([A-Z0-9_]+)` \| `?([^|`]*?)`? \|", PAGE, re.M))
    shown = {name: "none" if value in (None, {}, "") else str(value) for name, value in defaults(Settings).items()}
    shown = {name: value.lower() if value in ("True", "False") else value for name, value in shown.items()}
    assert listed == shown
