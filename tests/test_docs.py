"""What the pages name exists: links and their anchors, paths, modules, commands, make targets, settings and metrics."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from app.environment import GONE, names
from app.errors import ServiceError
from loadtest.__main__ import cli
from weights.commands.checkpoints import app

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("[RCS]*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "app/client/README.md"]
PAGES.remove(ROOT / "CHANGELOG.md")  # it may name what is gone
MADE = re.compile(r"weights/(phoenix|mine|towers|sports)|loadtest/results/")  # by the commands of a page
TARGETS = set(" ".join(re.findall(r"^([a-z -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)).split())
COMMANDS = {"weights": typer.main.get_command(app).commands, "loadtest": typer.main.get_command(cli).commands}  # type: ignore[attr-defined]
TELEMETRY = "".join(path.read_text() for path in (ROOT / "app/telemetry").glob("*.py"))
METRICS = {name.removesuffix("_total") for name in re.findall(r'"(?:ranker_)?([a-z_]+)"', TELEMETRY)}


def code(text: str) -> str:
    """The fenced blocks and the code spans of a page, one a line."""
    return "\n".join(max(found) for found in re.findall(r"```[a-z]*\n(.*?)```|`([^`\n]+)`", text, re.DOTALL))


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may name."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def broken_links(text: str, page: Path) -> Iterator[str]:
    for place, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text):
        target = page.parent / place if place else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield f"{place}#{anchor}"


def missing_paths(text: str, page: Path) -> Iterator[str]:
    for path in re.findall(r"(?<![\w./~-])(?:app|model|weights|loadtest|tests|docs|docker|\.ci)/[\w./-]*", code(text)):
        if not any((ROOT / f"{path.rstrip('.')}{suffix}").exists() for suffix in ("", ".py")) and not MADE.match(path):
            yield path
    for name in re.findall(r"(?<![\w/])test_\w+\.py", code(text)):
        if not any((ROOT / "tests").rglob(name)):
            yield name


def missing_modules(text: str, page: Path) -> Iterator[str]:
    """`package.module.name`: a module of ours, and a name that stands in it."""
    for dotted in re.findall(r"(?<![\w./-])(?:app|model|weights|loadtest)(?!\.json)(?:\.[a-zA-Z_]\w*)+", code(text)):
        place, parts = ROOT, dotted.split(".")
        while parts and (place / parts[0]).is_dir():
            place /= parts.pop(0)
        module = place / f"{parts[0]}.py" if parts else place / "__init__.py"
        if not module.is_file() or (len(parts) > 1 and not re.search(rf"\b{parts[1]}\b", module.read_text())):
            yield dotted


def missing_commands(text: str, page: Path) -> Iterator[str]:
    for module, command in re.findall(r"python3? -m ([\w.]+)(?: ([a-z][\w-]*))?", code(text)):
        known = COMMANDS.get(module)
        if importlib.util.find_spec(module) is None or (known and command and command not in known):
            yield f"python -m {module} {command}"
    for target in re.findall(r"^make ([a-z-]+)", code(text), re.MULTILINE):
        if target not in TARGETS and target.partition("-")[2] not in COMMANDS["loadtest"]:  # bench-NAME, load-NAME
            yield f"make {target}"


def missing_settings(text: str, page: Path) -> Iterator[str]:
    """`RANKER_GROUP__NAME`, with or without the prefix; `GROUP__…` stands for a group. A decision may name a setting that is gone."""
    gone = [f"RANKER_{name}" for name in GONE] if page.parent.name == "decisions" else []
    for name in re.findall(r"\bRANKER_[A-Z0-9_]+|\b[A-Z]+__[A-Z0-9_]*", code(text)):
        if not any(known.startswith(f"RANKER_{name.removeprefix('RANKER_')}") for known in [*names(), *gone]):
            yield name


def missing_metrics(text: str, page: Path) -> Iterator[str]:
    for name in re.findall(r"\branker_([a-z_]+?)(?:_total|_bucket|_sum|_count)?\b(?![/.])", code(text)):
        if name not in METRICS:
            yield f"ranker_{name}"


CHECKS: dict[str, Callable[[str, Path], Iterator[str]]] = {
    "[gone](docs/gone.md)": broken_links,
    "[gone](docs/api.md#gone)": broken_links,
    "`app/http/gone.py`": missing_paths,
    "`test_gone.py`": missing_paths,
    "`weights.format.gone.read`": missing_modules,
    "`weights.format.reader.gone`": missing_modules,
    "`python -m weights gone`": missing_commands,
    "```\nmake gone\n```": missing_commands,
    "`QUEUE__GONE`": missing_settings,
    "`ranker_gone_total`": missing_metrics,
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    assert [name for check in dict.fromkeys(CHECKS.values()) for name in check(page.read_text(), page)] == []


@pytest.mark.parametrize(("planted", "check"), CHECKS.items())
def test_what_is_gone_is_found(planted: str, check: Callable[[str, Path], Iterator[str]]) -> None:
    assert len(list(check(f"Before it, {planted} and after.", ROOT / "README.md"))) == 1


def test_the_page_for_callers_names_every_code_of_an_error() -> None:
    page = (ROOT / "docs/api.md").read_text()
    table = page[page.index("| status | `code` |") :].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", table)) - {"code"}
    assert named == {kind.code for kind in every(ServiceError)}


def every(kind: type[ServiceError]) -> Iterator[type[ServiceError]]:
    for below in kind.__subclasses__():
        yield from (below, *every(below))
