"""`make test` repeats what failed beside load, is red where it fails again, and tries rows of speeds alone a second time."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPEEDS = runpy.run_path(str(ROOT / ".ci/suite"), run_name="suite")["SPEEDS"]
FLAKY = """
import os
from pathlib import Path

import pytest


@pytest.mark.parametrize("fails", {fails})
def test_that_fails(fails):
    with Path("tries" + "".join(map(str, fails))).open("a+") as tries:
        tries.write("x")
        assert tries.tell() not in fails, "a planted failure"


def test_of_speed():
    assert "PYTEST_XDIST_WORKER" not in os.environ
    with Path("speeds").open("a+") as tries:
        tries.write("x")
        assert tries.tell() > {slow}, "a planted delay"
"""
NAME = "tests/test_flaky.py::test_that_fails[fails0]"
SPEED = "tests/test_flaky.py::test_of_speed"


def run(project: Path, *fails: tuple[int, ...], slow: int = 0, options: str = "-q") -> tuple[int, str, list[str]]:
    """The exit code, the report and its last lines."""
    (project / "tests").mkdir()
    (project / "tests/test_flaky.py").write_text(FLAKY.format(fails=fails, slow=slow))
    (project / "pytest.ini").write_text(f"[pytest]\naddopts = {options}\n")
    text = (ROOT / ".ci/suite").read_text().replace("suite(sys.argv[1])", f"suite(sys.argv[1], ({SPEED!r},))")
    text = text.replace("REPEATS, REPEATED, SECONDS = 20", "REPEATS, REPEATED, SECONDS = 2")
    (project / "suite").write_text(
        text.replace("== parent: pass", "== parent: time.sleep(0.1)")
    )  # no load on this machine
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    own |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    command = [sys.executable, "suite", "1"]
    said = subprocess.run(command, cwd=project, env=own, capture_output=True, text=True, timeout=100)
    return said.returncode, said.stdout, said.stdout.partition("In all:\n")[2].splitlines()


def test_all_passed(tmp_path: Path) -> None:
    status, _, [first, alone] = run(tmp_path, ())
    assert (status, first[:12], alone[:12]) == (0, *["1 passed in "] * 2), "on workers, and the row of speeds alone"


def test_what_fails_again_beside_load_is_red_and_told_with_how_often(tmp_path: Path) -> None:
    """Also a row of speeds that failed twice."""
    status, report, [*named, first, _, _] = run(tmp_path, (1, 3), (1, 2, 3), slow=10)
    times = {NAME: 1, NAME.replace("fails0", "fails1"): 2, SPEED: 2}
    told = [f"FAILED, and {times[name]} times of 2 more beside load: {name}" for name in sorted(times)]
    assert (status, named) == (1, told)
    assert first.startswith("2 failed in ")
    assert "a planted failure" in report, "the first failure keeps its traceback"


def test_a_race_and_a_row_of_speeds_that_passes_at_the_second_try_are_named_and_not_red(tmp_path: Path) -> None:
    status, _, [speeds, race, *_, second] = run(tmp_path, (1,), slow=1)
    assert (status, speeds) == (0, f"Passed at the second try, a row of speeds: {SPEED}")
    assert race == f"A race: failed once, and passed 2 times more beside load: {NAME}"
    assert second.startswith("1 passed")


def test_a_pytest_that_does_not_run_is_red(tmp_path: Path) -> None:
    status, _, lines = run(tmp_path, options="--no-such")
    assert (status, lines[0]) == (1, "FAILED: code 4")


def test_each_row_of_speeds_is_there() -> None:
    for name in SPEEDS:
        file, _, test = name.partition("::")
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE), name


def test_ci_ends_with_the_names_and_the_closing_lines(tmp_path: Path) -> None:
    [line] = re.findall(r"^closing=.*", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    told = "In all:\nFAILED: tests/a\n2 passed in 0.1s\n"
    for report, last in ((f"In all: no\n{told}", "FAILED: tests/a\n2 passed in 0.1s\n"), ("killed\n", "\n")):
        (tmp_path / "report").write_text(report)
        said = subprocess.run(
            ["bash", "-c", f'report=report; {line}\necho "$closing"'], cwd=tmp_path, capture_output=True
        )
        assert said.stdout.decode() == last
