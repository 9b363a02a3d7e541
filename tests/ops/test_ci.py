"""What the script of continuous integration says at its end: who reads the last lines alone sees what failed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from loadtest.machine import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(shutil.which, ("make", "g++", "git"))), reason="it would install make, g++ and git"),
]
MAKEFILE = """
install:
check:
\t@seq 100; echo "error: a finding of $@ with $(ARGS)"; {check}
test:
\t@echo "FAILED tests/test_of_it.py::test_one - AssertionError"; seq 100; echo "3 passed in 1.00s"; {test}
"""


def run(folder: Path, check: str, test: str) -> tuple[int, list[str]]:
    """The exit code and the lines of the script in a project whose two targets end like this."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", folder / ".ci/run")
    (folder / "Makefile").write_text(MAKEFILE.format(check=check, test=test))
    done = subprocess.run(["bash", ".ci/run"], cwd=folder, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout.splitlines()


def test_it_ends_with_what_failed_in_the_checks(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "false", "true")
    assert code == 1
    start = lines.index("The end of make check:")
    assert "error: a finding of check with --reruns=1 -rR" in lines[start:]
    assert lines[-3:] == ["make check: FAILED", "make test: passed", "3 passed in 1.00s"]


def test_it_ends_with_the_tests_that_failed(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "true", "false")
    assert code == 1
    start = lines.index("What failed in make test:")
    assert lines[start + 1].startswith("FAILED tests/test_of_it.py")
    assert lines[-3:] == ["make check: passed", "make test: FAILED", "3 passed in 1.00s"]


def test_it_passes_where_both_pass(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "true", "true")
    assert code == 0
    assert lines[-3:] == ["make check: passed", "make test: passed", "3 passed in 1.00s"]
