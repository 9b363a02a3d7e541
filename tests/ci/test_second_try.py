"""`make test` tries a failure once more and .ci/run names what passed only then: run on tests that fail so many times."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAKY = """
import time
import pytest

TRIES = {}


@pytest.fixture(scope="module")
def server():
    TRIES["server"] = TRIES.get("server", 0) + 1
    yield
    assert TRIES["server"] == 1


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_that_fails(server, failures):
    TRIES[failures] = TRIES.get(failures, 0) + 1
    assert TRIES[failures] > failures, "a planted failure"


def test_that_hangs_when_tried_again():
    TRIES["hangs"] = TRIES.get("hangs", 0) + 1
    assert TRIES["hangs"] > 1
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """What pytest says with the options of `make test`, and the closing lines of CI."""
    project = tmp_path_factory.mktemp("project")
    (project / "tests").mkdir()
    shutil.copy(ROOT / "tests/conftest.py", project / "tests")
    (project / "tests/test_flaky.py").write_text(FLAKY)
    (project / "pytest.ini").write_text("[pytest]\naddopts = -q\ntimeout = 1\n")
    found = re.search(r"^PYTEST := .* -m pytest (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    command = [sys.executable, "-m", "pytest", *found[1].split(), "--numprocesses", "1", "--dist", "loadfile"]
    own = os.environ | {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "xdist.plugin,pytest_timeout,pytest_rerunfailures",
    }
    said = subprocess.run(command, cwd=project, env=own, capture_output=True, text=True, timeout=50)
    (project / "report").write_text(said.stdout)
    closing = subprocess.run([ROOT / ".ci/closing", project / "report"], capture_output=True, text=True, check=True)
    return said.stdout, closing.stdout.splitlines()


def test_what_passed_at_the_second_try_is_named_and_nothing_else(run: tuple[str, list[str]]) -> None:
    report, closing = run
    assert len(closing) == 2
    assert closing[0] == "Passed at the second try: tests/test_flaky.py::test_that_fails[1]: a fault to mend"
    assert closing[1].startswith("2 failed, 2 passed, 3 rerun in ")
    assert report.count("a planted failure") > 1, "the first failure keeps its traceback"


def test_what_a_module_shares_is_made_once(run: tuple[str, list[str]]) -> None:
    assert "1 error" not in run[0]


def test_a_second_try_has_a_deadline_too(run: tuple[str, list[str]]) -> None:
    assert "Failed: Timeout (>1.0s) from pytest-timeout." in run[0]


def test_a_report_without_an_end_is_told(tmp_path: Path) -> None:
    (tmp_path / "report").write_text("PASSED tests/test_a.py::test_of_a_list_of_passes\n")
    closing = subprocess.run([ROOT / ".ci/closing", tmp_path / "report"], capture_output=True, text=True, check=True)
    assert closing.stdout == "pytest gave no closing line\n"
