"""docs/operations.md names every event of the log with its level and fields, as the code writes them: operators search for these."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
LEVELS = ("info", "warning", "error")
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| ([^|]*) \|", re.M)


def logged(source: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Event, level and fields of each call that logs; `…` for fields that are put together."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in LEVELS
            and node.args
        ):
            first = node.args[0]
            for name in (first.body, first.orelse) if isinstance(first, ast.IfExp) else (first,):
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    yield name.value, node.func.attr, tuple(sorted(each.arg or "…" for each in node.keywords))


def in_code() -> set[tuple[str, str, tuple[str, ...]]]:
    files = [file for file in (ROOT / "app").rglob("*.py") if "client" not in file.parts]
    return {found for file in files for found in logged(file.read_text())}


def test_the_page_names_what_is_logged_and_nothing_else() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    table = page[page.index("| event | level | fields |") :].partition("\n\n")[0]
    rows = ROW.findall(table)
    named = {(event, level, tuple(sorted(re.findall(r"[\w…]+", fields)))) for event, level, fields in rows}
    assert named == in_code()


def test_a_field_that_is_left_out_is_seen() -> None:
    assert set(logged('log.error("lost", reason=reason, **more)')) == {("lost", "error", ("reason", "…"))}
    assert set(logged('log.info("a" if changed else "b", x=1)')) == {("a", "info", ("x",)), ("b", "info", ("x",))}
