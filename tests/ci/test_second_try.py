"""`make test` tries what failed once more, alone, and .ci/run names what passed only then: run on tests that fail so many times."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAKY = """
import os
from pathlib import Path

import pytest


@pytest.mark.parametrize("failures", FAILURES)
def test_that_fails(failures):
    with Path(f"tries{failures}").open("a+") as tries:
        tries.write("x")
        assert tries.tell() > failures, "a planted failure"
    assert failures == 0 or "PYTEST_XDIST_WORKER" not in os.environ
"""


def closing_lines(project: Path, report: str) -> list[str]:
    (project / "report").write_text(report)
    said = subprocess.run([ROOT / ".ci/closing", project / "report"], capture_output=True, text=True, check=True)
    return said.stdout.splitlines()


def run(project: Path, *failures: int) -> tuple[int, str]:
    (project / "tests").mkdir()
    (project / "tests/test_flaky.py").write_text(FLAKY.replace("FAILURES", repr(failures)))
    (project / "pytest.ini").write_text("[pytest]\naddopts = -q\n")
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    own |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    command = [ROOT / ".ci/twice", sys.executable, "--numprocesses", "1"]
    said = subprocess.run(command, cwd=project, env=own, capture_output=True, text=True, timeout=100)
    return said.returncode, said.stdout


def test_what_passed_at_the_second_try_is_named_and_nothing_else(tmp_path: Path) -> None:
    status, report = run(tmp_path, 0, 1)
    assert status == 0
    named, first, second = closing_lines(tmp_path, report)
    assert named == "Passed at the second try: tests/test_flaky.py::test_that_fails[1]: a fault to mend"
    assert first.startswith("1 failed, 1 passed in ")
    assert second.startswith("1 passed")
    assert "a planted failure" in report, "the first failure keeps its traceback"


@pytest.mark.parametrize(("failures", "status"), [((0,), 0), ((0, 2), 1), ((1, 2), 1)])
def test_what_fails_twice_has_failed(tmp_path: Path, failures: tuple[int, ...], status: int) -> None:
    assert run(tmp_path, *failures)[0] == status


def test_a_report_without_an_end_is_told(tmp_path: Path) -> None:
    assert closing_lines(tmp_path, "PASSED tests/test_a.py::test_of_a_list_of_passes\n") == [
        "pytest gave no closing line"
    ]
