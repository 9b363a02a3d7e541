"""What the script of continuous integration says at its end: who reads the last lines alone sees what failed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from loadtest.machine import ROOT

pytestmark = [
    pytest.mark.skipif(not all(map(shutil.which, ("make", "g++", "git"))), reason="it would install make, g++ and git"),
]
MAKEFILE = """
install:
check:
\t@seq 100; echo "error: a finding of $@ with $(ARGS)"; {check}
test test-slow:
\t@echo "FAILED tests/test_of_it.py::$@ - AssertionError"; seq 100; echo "3 passed in 1.00s"; [ $@ != {failing} ]
"""


def run(folder: Path, failing: str) -> tuple[int, list[str]]:
    """The exit code and the lines of the script in a project in which one target fails."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", folder / ".ci/run")
    (folder / "Makefile").write_text(MAKEFILE.format(check="false" if failing == "check" else "true", failing=failing))
    done = subprocess.run(["bash", ".ci/run"], cwd=folder, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout.splitlines()


def closing(**failed: str) -> list[str]:
    """The last lines. `failed`: which target did not pass."""
    of = {target: failed.get(target.replace("-", "_"), "passed") for target in ("check", "test-slow", "test")}
    return [
        f"make check: {of['check']}", f"make test-slow: {of['test-slow']}", "3 passed in 1.00s", f"make test: {of['test']}",
        "3 passed in 1.00s",
    ]  # fmt: skip


def test_it_ends_with_what_failed_in_the_checks(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "check")
    assert code == 1
    start = lines.index("The end of make check:")
    assert "error: a finding of check with --reruns=1 -rR" in lines[start:]
    assert lines[-5:] == closing(check="FAILED")


@pytest.mark.parametrize("target", ["test", "test-slow"])
def test_it_ends_with_the_tests_that_failed(target: str, tmp_path: Path) -> None:
    code, lines = run(tmp_path, target)
    assert code == 1
    start = lines.index(f"What failed in make {target}:")
    assert lines[start + 1].startswith(f"FAILED tests/test_of_it.py::{target} ")
    assert lines[-5:] == closing(**{target.replace("-", "_"): "FAILED"})


def test_it_passes_where_all_pass(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "none")
    assert code == 0
    assert lines[-5:] == closing()
