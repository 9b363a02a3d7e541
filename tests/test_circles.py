"""No circle of imports, wherever in a file the imports stand: at the top, behind `TYPE_CHECKING` or within a function."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("app", "model", "weights", "loadtest")
CLIENT = "app/client/"  # a distribution of its own: the packages below it have no such prefix


def modules(root: Path) -> dict[str, Path]:
    """Dotted name → file."""
    found = {}
    for path in (path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        parts = path.relative_to(root).as_posix().removeprefix(CLIENT).removesuffix(".py").split("/")
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(tree: ast.Module, name: str, *, is_package: bool) -> Iterator[tuple[str, str]]:
    """Each import of a module as (what it comes from, the name that is taken): the second is empty for `import x`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parents = name.split(".")
                kept = parents[: len(parents) - node.level + is_package]
                source = ".".join([*kept, *([source] if source else [])])
            yield from ((source, alias.name) for alias in node.names)


def graph(root: Path) -> dict[str, set[str]]:
    """Module → those that it imports, of the four packages."""
    known = modules(root)
    edges: dict[str, set[str]] = {}
    for name, path in known.items():
        found = imported(ast.parse(path.read_text()), name, is_package=path.name == "__init__.py")
        named = (f"{source}.{taken}" if f"{source}.{taken}" in known else source for source, taken in found)
        edges[name] = {other for other in named if other in known and other != name}
    return edges


def circle(edges: Mapping[str, set[str]]) -> list[str]:
    """The modules of one circle in the order in which they import each other, or none."""
    done: set[str] = set()

    def walk(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name not in done:
            for other in sorted(edges[name]):
                if found := walk(other, [*way, name]):
                    return found
            done.add(name)
        return []

    return next(filter(None, (walk(name, []) for name in sorted(edges))), [])


def test_no_module_imports_one_that_imports_it() -> None:
    assert " → ".join(circle(graph(ROOT))) == ""


@pytest.mark.parametrize(
    "planted",
    [
        "import model.b",
        "from model import b",
        "from . import b",
        "from .b import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from model.b import x",
        "def f():\n    from model.b import x",
        "class A:\n    def f(self):\n        import model.b",
    ],
)
@pytest.mark.parametrize("between", [(), ("c", "d")], ids=["two", "four"])
def test_a_planted_circle_is_found(tmp_path: Path, planted: str, between: tuple[str, ...]) -> None:
    names = ["b", *between, "a"]
    texts = dict(zip(names, [f"import model.{name}\n" for name in names[1:]], strict=False))
    (tmp_path / "model").mkdir()
    for name, text in {"__init__": "", **texts, "a": "x = 1\n"}.items():
        (tmp_path / f"model/{name}.py").write_text(text)
    assert circle(graph(tmp_path)) == []
    (tmp_path / "model/a.py").write_text(planted)
    assert len(circle(graph(tmp_path))) == len(names) + 1
