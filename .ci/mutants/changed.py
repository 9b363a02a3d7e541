"""Runs the tests that reach what has changed since a commit, by the records that `make mutants` keeps.

A file that no record knows has the tests that concern it, whole: its own, those of tests/elsewhere.toml, those that name it most.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from pathlib import Path

from decisions import ROOT, digest
from records import WORK, Record, concerns


def changed_files(root: Path, since: str) -> list[str]:
    """New, changed and deleted ones, beside what `since` and the present commit have in common."""
    known = ["git", "diff", "--name-only", "--merge-base", since], ["git", "ls-files", "-o", "--exclude-standard"]
    said = [subprocess.run(one, cwd=root, capture_output=True, text=True, check=True).stdout for one in known]
    return sorted(set("".join(said).splitlines()))


def differing(old: str, new: str) -> list[int]:
    """The old lines that are gone or changed, and those on both sides of new ones, but for blank lines and comments."""
    lines, numbers = old.splitlines(), set[int]()
    for what, first, last, *_ in difflib.SequenceMatcher(None, lines, new.splitlines(), autojunk=False).get_opcodes():
        if what != "equal":
            numbers |= set(range(first + 1, last + 1)) or {first, first + 1}
    return [number for number, line in enumerate(lines, 1) if number in numbers and line.split("#")[0].strip()]


def tests_of(root: Path, work: Path, file: str) -> set[str]:
    """Files of tests and single ones for a changed file."""
    path = Path(file)
    if path.parts[0] == "tests":
        return {file} if path.name.startswith("test_") and (root / file).exists() else set()
    if path.suffix not in (".py", ".h", ".cpp") or path.parts[0] not in ("app", "model", "weights", "loadtest"):
        mirror = Path("tests", path.parts[0].removeprefix("."), f"test_{path.stem.replace('-', '_')}.py")
        return {str(mirror)} if (root / mirror).exists() else set()
    old, known, found = work / "tree" / file, set[str](), set[str]()
    for home in (work / "records").glob("*/record"):
        record = Record(**json.loads(home.read_text()))
        if old.is_file() and record.seconds and record.digests.get(file) == digest(old):
            known.add(next(iter(record.seconds)).partition("::")[0])
            new = (root / file).read_text() if (root / file).exists() else ""
            found |= set(record.reaching(work / "tree", file, *differing(old.read_text(), new)))
    return found | set(concerns(root, file)) - known


def main(since: str) -> None:
    """Run them; `since` is a commit."""
    found = set().union(*(tests_of(ROOT, WORK, file) for file in changed_files(ROOT, since)))
    chosen = sorted(test for test in found if "::" not in test or test.partition("::")[0] not in found)
    print(f"{len(chosen)} tests and files of tests reach what has changed since {since}", flush=True)
    if chosen:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *chosen])  # noqa: S606


if __name__ == "__main__":
    main(*sys.argv[1:])
