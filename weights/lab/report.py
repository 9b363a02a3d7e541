"""Writes reports: a Markdown page from a Jinja template, and its figures as JSON beside it. Computes nothing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from weights.format.writer import write_all

MACROS = """
{%- macro table(head, rows) -%}
| {{ head | join(" | ") }} |
|---{{ "|--:" * (head | length - 1) }}|
{% for row in rows -%}
| {{ row | join(" | ") }} |
{% endfor %}
{%- endmacro -%}
"""
"""`table(head, rows)`: a Markdown table, numbers to the right."""

PAGES = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)  # noqa: S701
PAGES.filters["number"] = lambda value, digits=4: f"{value:.{digits}f}"
PAGES.filters["percent"] = lambda value, digits=1: f"{value:.{digits}%}"


def write_report(directory: Path, page: str, values: Mapping[str, Any]) -> None:
    """Write `report.md`, which is `page`, and `figures.json` into a directory, which may exist: both, or neither.

    Raises OSError, which names the file that could not be written.
    """
    figures = json.dumps(values, indent=1) + "\n"
    write_all(
        directory,
        {"figures.json": lambda new: new.write_text(figures), "report.md": lambda new: new.write_text(page)},
    )


def rendered(template: str, **values: Any) -> str:
    """A page from a template, which may use `table` and the filters `number` and `percent`. At most one empty line stands between two."""
    return re.sub(r"\n{3,}", "\n\n", PAGES.from_string(MACROS + template).render(values))


def plain(value: Any, digits: int | None = None) -> Any:
    """Convert a value for JSON: arrays become lists, and numbers that are not finite become null. `digits`: round to so many."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: plain(below, digits) for name, below in value.items()}
    if isinstance(value, list | tuple):
        return [plain(below, digits) for below in value]
    if not isinstance(value, float):
        return value
    return (value if digits is None else round(value, digits)) if math.isfinite(value) else None
