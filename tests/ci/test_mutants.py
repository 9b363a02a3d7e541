"""The mutation tool: it finds decisions in both languages, kills what a test sees, and lists what none does."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci/mutants"
TOOL: dict[str, Any] = runpy.run_path(str(SCRIPT))

PYTHON = """
@dataclass(frozen=True)
class Limit:
    most: int = Field(default=7, ge=1)

def admit(é: int, limit: int = 3) -> Literal[1]:
    if not é or é <= limit and limit is not None:
        raise ValueError(f"{é + 1} is too small")
    return max(é % 2, limit) + len("a + b" / "c")
"""
CPP = """
#define NEVER(a) ((a) + 1)
template <int V, bool ADD> // 1 < 2
bool seen(Index j, const Tile& tile) {
    return j + 16 < tile.rows && std::min(j, Index(4)) >= 0;  // j > 5
}
"""


def changes(kind: str, source: str) -> list[str]:
    raw = source.encode()
    found = []
    for start, before, after in sorted(TOOL[kind](source)):
        assert raw[start : start + len(before.encode())].decode() == before
        found.append(f"{before.strip()} → {after}")
    return found


def test_decisions_of_python() -> None:
    assert changes("python_changes", PYTHON) == [
        "3 → (3 + 1)", "not → ", "or → and", "<= → <", "and → or", "is not → is",
        "max → min", "% → *", "2 → (2 + 1)", "+ → -",
    ]  # fmt: skip


def test_decisions_of_cpp() -> None:
    assert changes("cpp_changes", CPP) == [
        "+ → -",
        "16 → 17",
        "< → <=",
        "&& → ||",
        "min → max",
        "4 → 5",
        ">= → >",
        "0 → 1",
    ]


@pytest.fixture(scope="module")
def tests() -> Iterator[Any]:
    runner = TOOL["Tests"]()
    yield runner
    runner.close()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project of one module, one of whose decisions no test looks at."""
    for path, text in {
        "app/half.py": "def half(x: int) -> int:\n    if x < 0:\n        return 0\n    return x // 2\n",
        "tests/app/test_half.py": "from app.half import half\n\ndef test_it():\n    assert half(6) == 3\n    assert half(-5) == 0\n",
        "tests/elsewhere.toml": "[app]\n",
        "pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['.']\n",
        "tests/e2e/test_process.py": "",
        "tests/reliability/test_rows.py": "",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_what_no_test_sees_survives_and_the_rest_is_killed(tests: Any, tree: Path) -> None:
    found = TOOL["decisions"](tree, None)
    verdicts = {mutant.change: TOOL["verdict"](tests, tree, mutant, {}) for mutant in found}
    assert verdicts["< → <="] == "survived"  # half of 0 is 0 either way: such a one is judged equivalent
    assert verdicts["// → *"] == "killed"
    assert verdicts["2 → (2 + 1)"] == "killed"
    assert (tree / "app/half.py").read_text().count("x < 0") == 1  # the change is taken back


def test_tests_that_fail_anyway_kill_nothing(tests: Any, tree: Path) -> None:
    (tree / "tests/app/test_half.py").write_text("def test_it():\n    assert False\n")
    assert {TOOL["verdict"](tests, tree, mutant, {}) for mutant in TOOL["decisions"](tree, None)} == {"broken"}


def test_only_changed_lines_are_drawn_when_asked(tree: Path) -> None:
    assert {mutant.number for mutant in TOOL["decisions"](tree, {"app/half.py": {4}})} == {4}


def test_every_equivalent_names_a_line_that_is_there_and_a_reason() -> None:
    root = SCRIPT.parents[1]
    kept = TOOL["tomllib"].loads((root / "tests/equivalents.toml").read_text())["equivalent"]
    known = {(mutant.file, mutant.line, mutant.change) for mutant in TOOL["decisions"](root, None)}
    assert [entry for entry in kept if (entry["file"], entry["line"], entry["change"]) not in known] == []
    assert [entry for entry in kept if len(entry["reason"].split()) < 5] == []
