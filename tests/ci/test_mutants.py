"""The mutation tool: it finds decisions in both languages, kills what a test sees, and lists what none does."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci/mutants"
TOOL: dict[str, Any] = runpy.run_path(str(SCRIPT))
CHANGED: dict[str, Any] = runpy.run_path(str(SCRIPT / "changed.py"))
CHANGES: dict[str, Any] = TOOL["decisions"].__globals__["CHANGES"]
DROPS: Any = TOOL["decisions"].__globals__["python_drops"]
FILE = "tests/app/test_half.py"

PYTHON = """
@dataclass(frozen=True)
class Limit:
    most: int = Field(default=7, ge=1)

def admit(é: int, limit: int = 3) -> Literal[1]:
    if not é or é <= limit and limit is not None:
        raise ValueError(f"{é + 1} is too small")
    return max(é % 2, limit) + len("a + b" / "c")

Pair = TypeVar("Pair", int, str)
pairs = zip(one, two, strict=True)

class Limiting(Protocol):
    def admit(self, limit: int = 3) -> int: ...
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
    for start, before, after in sorted(CHANGES[kind](source)):
        assert raw[start : start + len(before.encode())].decode() == before
        found.append(f"{before.strip()} → {after}")
    return found


def test_decisions_of_python() -> None:
    assert changes(".py", PYTHON) == [
        "3 → (3 + 1)", "not → ", "or → and", "<= → <", "and → or", "is not → is",
        "max → min", "% → *", "2 → (2 + 1)", "+ → -",
    ]  # fmt: skip


WIRING = """
@cache
@property
def admit(self, é, lock):
    with self.lock, opened(é) as file:
        self.seen[é] = told(é, limit, to=file)
    if (found := é - 1) < limit or not found:
        raise ValueError(é)
    try:
        self.count += max(limit, é, default=0, )
    finally:
        self.close()
        log.info("é", **self.labels)
    partial(self.tell, (yield lock))
    for one in zip(self.seen, lock, strict=True):
        await self.tell(*one, later=True, at=1)
    return file
"""


def test_wiring_that_is_dropped() -> None:
    raw, lines, found = WIRING.encode(), WIRING.splitlines(), []
    for start, before, after, kind, number in sorted(DROPS(WIRING)):
        assert raw[start : start + len(before.encode())].decode() == before
        changed = raw[:start] + after.encode() + raw[start + len(before.encode()) :]
        compile(changed.replace(b"await ", b""), "changed", "exec")
        found.append((kind, " ".join(before.split()), after, lines[number - 1].strip()))
    guard = "(found := é - 1) < limit or not found"
    seen, ends, told = "self.seen[é] = told(é, limit, to=file)", 'log.info("é", **self.labels)', "await self.tell"
    assert found == [
        ("decorator", "@cache", "", "return file"),
        ("with", "self.lock", '__import__("contextlib").nullcontext()', "with self.lock, opened(é) as file:"),
        ("statement", seen, "pass", seen),
        ("swap", "é, limit", "limit, é", seen),
        ("keyword", "to=file", "", seen),
        ("guard", guard, f"({guard}) and False", "raise ValueError(é)"),
        ("statement", "self.count += max(limit, é, default=0, )", "pass", "self.count += max(limit, é, default=0, )"),
        ("keyword", "default=0,", "", "self.count += max(limit, é, default=0, )"),
        ("statement", "self.close()", "pass", "self.close()"),
        ("finally", f"self.close() {ends}", "pass", "self.close()"),
        ("statement", ends, "pass", ends),
        (
            "statement",
            passed := "partial(self.tell, (yield lock))",
            "pass",
            passed,
        ),  # swapped it would need its brackets
        ("swap", "self.seen, lock", "lock, self.seen", "for one in zip(self.seen, lock, strict=True):"),
        ("statement", f"{told}(*one, later=True, at=1)", "pass", f"{told}(*one, later=True, at=1)"),
        ("keyword", "later=True,", "", f"{told}(*one, later=True, at=1)"),
        ("keyword", "at=1", "", f"{told}(*one, later=True, at=1)"),
    ]
    assert {kind for kind, *_ in found} == set(TOOL["DROPS"])


def test_a_sample_stays_when_another_decision_goes() -> None:
    mutant = TOOL["Mutant"]
    every = [mutant("app/half.py", 10 * n, "1", "(1 + 1)", n, f"x = {n // 2}") for n in range(200)]  # two of each text
    drawn = TOOL["draw"](every, 20, 7)
    others = [decision for decision in every if decision != drawn[3]]
    assert [place for place in drawn if place in TOOL["draw"](others, 20, 7)] == [*drawn[:3], *drawn[4:]]
    assert len({decision.line for decision in drawn}) > 15  # two of one text are drawn apart
    assert TOOL["draw"](every, 20, 8) != drawn


def test_decisions_of_cpp() -> None:
    assert changes(".cpp", CPP) == ["+ → -", "16 → 17", "< → <=", "&& → ||", "min → max", "4 → 5", ">= → >", "0 → 1"]


@pytest.fixture(scope="module")
def tests() -> Iterator[Any]:
    runner = TOOL["Tests"]("coverage")
    yield runner
    runner.close()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project of one module."""
    for path, text in {
        "app/half.py": """LEAST = 0

def half(x: int) -> int:
    if x < LEAST:
        return 0
    while x % 2:
        x = x - 1
    return x // 2

def lost(x: int) -> int:
    return x + 1
""",
        FILE: """from app.half import half

def test_what_is_positive():
    assert half(5) == 2

def test_what_is_negative():
    assert half(-6) == 0
""",
        "tests/elsewhere.toml": "[app]\n",
        "pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['.']\n",
    }.items():
        (tmp_path / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / path).write_text(text)
    return tmp_path / "tree"


def mutant_of(tree: Path, change: str, line: str) -> Any:
    return next(mutant for mutant in TOOL["decisions"](tree, None) if (mutant.change, mutant.line) == (change, line))


def test_a_mutant_is_killed_by_the_tests_that_reach_it(tests: Any, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = mutant_of(tree, "- → +", "x = x - 1")
    assert TOOL["verdict"](tests, tree, mutant) == "killed"
    assert tests.record(tree, FILE, []).reaching(tree, mutant.file, mutant.number) == [f"{FILE}::test_what_is_positive"]
    assert "x = x - 1" in (tree / "app/half.py").read_text()  # the change is taken back
    hangs = mutant_of(tree, "1 → (1 + 1)", "x = x - 1")
    for limit in ("SLACK_SECONDS", "HANGS_AFTER"):
        monkeypatch.setitem(tests.first_failing.__func__.__globals__, limit, 1.0)
    assert TOOL["verdict"](tests, tree, hangs) == "killed"


def test_a_record_that_was_copied_from_another_tree_is_made_anew(tests: Any, tree: Path, tmp_path: Path) -> None:
    """It names the lines of files there."""
    tests.record(tree, FILE, [])
    copy = tmp_path / "copy"
    shutil.copytree(tree, copy / "tree")
    shutil.copytree(tmp_path / "records", copy / "records")
    assert tests.record(copy / "tree", FILE, []).reaching(copy / "tree", "app/half.py", 6)


def test_what_no_test_looks_at_survives(tests: Any, tree: Path) -> None:
    constant = mutant_of(tree, "0 → (0 + 1)", "LEAST = 0")  # half of 0 is 0 either way: such a one is judged equivalent
    assert TOOL["verdict"](tests, tree, constant) == "survived"
    assert len(tests.record(tree, FILE, []).reaching(tree, constant.file, constant.number)) == 2  # it is run at import
    assert TOOL["verdict"](tests, tree, mutant_of(tree, "+ → -", "return x + 1")) == "unreached"


WIRED = """import contextlib, functools, threading

LOCK, made = threading.Lock(), []

@functools.cache
def make(count, name="none"):
    made.append(count)
    if count < 0:
        raise ValueError(name)
    with LOCK:
        try:
            return count // 2, name, LOCK.locked()
        finally:
            made.append("end")

def ask():
    return make(7, 3, name="odd") if False else make(8, name="even")

def pair(left, right):
    return divmod(left, right)
"""
SEES = """import pytest
from app.half import ask, made, make, pair

def test_it():
    made.clear()
    assert (ask(), ask(), made) == ((4, "even", True), (4, "even", True), [8, "end"])
    with pytest.raises(ValueError):
        make(-1)
    assert pair(7, 2) == (3, 1)
"""
BLIND = """from app.half import ask, make, pair

def test_it():
    ask(), pair(7, 2)
    try:
        make(-1)
    except ValueError:
        pass
"""


@pytest.mark.parametrize(("test", "found"), [(SEES, "killed"), (BLIND, "survived")])
def test_of_each_kind_what_a_test_sees_is_killed_and_what_none_sees_survives(
    tests: Any, tree: Path, test: str, found: str
) -> None:
    (tree / "app/half.py").write_text(WIRED)
    (tree / FILE).write_text(test)
    tried = {mutant.kind: mutant for mutant in TOOL["decisions"](tree, None) if mutant.number > 4}
    assert tried.keys() - {"word"} == set(TOOL["DROPS"])
    assert {kind: TOOL["verdict"](tests, tree, tried[kind]) for kind in TOOL["DROPS"]} == dict.fromkeys(
        TOOL["DROPS"], found
    )


ELSEWHERE = """#if defined(__AVX512F__) && !defined(__AVX512F__)
int half(int x) { return x / 2; }
#else
int half(int x) { return x / 2 + 0; }
#endif
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_what_is_compiled_for_other_processors_alone_is_counted_apart(tests: Any, tree: Path) -> None:
    source = tree / "app/request/native/half.cpp"
    source.parent.mkdir(parents=True)
    source.write_text(ELSEWHERE)
    (tree / "app/request/codec.py").write_text("")
    verdicts = [TOOL["verdict"](tests, tree, mutant_of(tree, "2 → 3", line)) for line in ELSEWHERE.splitlines()[1:4:2]]
    assert verdicts == ["elsewhere", "unreached"]
    assert source.read_text() == ELSEWHERE


def test_a_test_that_fails_anyway_kills_nothing(tests: Any, tree: Path) -> None:
    (tree / FILE).write_text("from app.half import half\n\ndef test_it():\n    assert half(6) == 4\n")
    assert TOOL["verdict"](tests, tree, mutant_of(tree, "// → *", "return x // 2")) == "survived"
    assert tests.unsound == {f"{FILE}::test_it"}


def test_lines_that_another_process_runs_are_reached(tests: Any, tree: Path) -> None:
    command = "[sys.executable, '-c', 'import app.half; app.half.lost(1)']"
    (tree / FILE).write_text(
        f"import subprocess, sys\n\ndef test_it():\n    subprocess.run({command})\n\ndef test_other():\n    pass\n"
    )
    record = tests.record(tree, FILE, [])
    assert record.reaching(tree, "app/half.py", 11) == [f"{FILE}::test_it"]
    # A constant concerns every test of the file: who imports a module first says nothing.
    assert len(record.reaching(tree, "app/half.py", 1)) == 2


def test_only_changed_lines_are_drawn_when_asked(tree: Path) -> None:
    assert {mutant.number for mutant in TOOL["decisions"](tree, {"app/half.py": {4}})} == {4}


def test_every_equivalent_names_a_line_that_is_there_and_a_reason() -> None:
    root = SCRIPT.parents[1]
    kept = TOOL["tomllib"].loads((root / "tests/equivalents.toml").read_text())["equivalent"]
    lines = {entry["file"]: range(1, 10_000) for entry in kept}
    known = {(mutant.file, mutant.line, mutant.change) for mutant in TOOL["decisions"](root, lines)}
    assert [entry for entry in kept if (entry["file"], entry["line"], entry["change"]) not in known] == []
    assert [entry for entry in kept if len(entry["reason"].split()) < 5] == []


def test_a_change_is_tried_by_the_tests_that_reach_it(tests: Any, tree: Path, tmp_path: Path) -> None:
    module, text = "app/half.py", (tree / "app/half.py").read_text()
    positive, negative = f"{FILE}::test_what_is_positive", f"{FILE}::test_what_is_negative"
    here = tmp_path / "here"
    shutil.copytree(tree, here)

    def chosen(file: str = module) -> set[str]:
        found: set[str] = CHANGED["tests_of"](here, tmp_path, file)
        return found

    assert chosen() == {FILE}, "nothing is recorded"
    tests.record(tree, FILE, [module])
    for old, new, found in (
        ("        x = x - 1", "        x = x - 3", {positive}),
        ("        return 0\n", "        # zero\n        return 0\n", {positive, negative}),
        ("    while x", "    print(x)\n    while x", {positive, negative}),
        ("    return x + 1", "    return x + 2", set()),
        ("LEAST = 0", "LEAST = 1", {positive, negative}),
    ):
        (here / module).write_text(text.replace(old, new))
        assert chosen() == found, new
    (tree / module).write_text(text + "\n")
    assert chosen() == {FILE}, "what is recorded is another version"
    assert chosen(FILE) == {FILE}
    assert chosen("docs/half.md") == chosen("tests/elsewhere.toml") == set()


def test_what_has_changed_since_a_commit(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-b", "main")
    for step, name in enumerate(("same", "changed", "gone", "own", "new")):
        (tmp_path / name).write_text(name)
        git("add", ".") if step < 4 else None
        git("commit", "-m", "x") if step == 2 else None
        git("checkout", "-b", "branch") if step == 2 else None
        git("commit", "-m", "y") if step == 3 else None
    (tmp_path / "changed").write_text("anew")
    (tmp_path / "gone").unlink()
    assert CHANGED["changed_files"](tmp_path, "main") == ["changed", "gone", "new", "own"]
