"""The frame of the project: what lies at the top, what the lock promises, what make and the README say."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOP = {
    "app", "model", "weights", "docker", "tests", "loadtest", "docs", "pyproject.toml", "Dockerfile", "Makefile",
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", ".ci", ".pre-commit-config.yaml",
}  # fmt: skip
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("app", "weights", "model", "loadtest")
CLIENT = tomllib.loads((ROOT / "app/client/pyproject.toml").read_text())["project"]
LOCK = [line for line in (ROOT / "docker/requirements.lock").read_text().splitlines() if not line.startswith("#")]
LOCKED = dict(line.split("==") for line in LOCK)


ELSEWHERE = {
    f"{package}/{name}": shown
    for package, table in tomllib.loads((ROOT / "tests/elsewhere.toml").read_text()).items()
    for name, shown in table.items()
}


def normal(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def make(*arguments: str, directory: Path = ROOT) -> subprocess.CompletedProcess[str]:
    if shutil.which("make") is None:
        pytest.skip("make is not installed here")
    settable = re.findall(r"^(\w+) \?=", MAKEFILE, re.MULTILINE)  # `make test PYTHON=...` would hand them on here
    kept = {name: value for name, value in os.environ.items() if not name.startswith("M") and name not in settable}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=directory, env=kept, capture_output=True, text=True, timeout=60)


def test_the_top_level_is_what_a_newcomer_was_told() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("the list of files comes from git, and this is no checkout")
    top = {path.split("/")[0] for path in listed.stdout.splitlines()}
    assert {name for name in top - TOP if not name.startswith(".")} == set()
    assert top >= TOP


def untested(root: Path) -> set[str]:
    """Modules without a test module in the mirrored place: `tests/app/http/test_rank.py` is the one of `app/http/rank.py`."""
    modules = [path.relative_to(root) for package in PACKAGES for path in (root / package).rglob("[!_]*.py")]
    return {str(path) for path in modules if not (root / "tests" / path.parent / f"test_{path.name}").exists()}


def place(module: str) -> str | None:
    """The line of tests/elsewhere.toml for a module: its own, or that of the nearest folder."""
    lines = [line for line in ELSEWHERE if module == line or (line.endswith("/") and module.startswith(line))]
    return max(lines, key=len, default=None)


def test_every_module_has_tests_of_its_own_or_a_line_that_says_where() -> None:
    lines = {module: place(module) for module in untested(ROOT)}
    assert [module for module, line in lines.items() if line is None] == [], "add them to tests/elsewhere.toml"
    assert ELSEWHERE.keys() - lines.values() == set(), "drop them from tests/elsewhere.toml"


def test_every_such_line_names_a_test_or_says_why_there_is_none() -> None:
    named = {shown for shown in ELSEWHERE.values() if not re.match(r"none: \w", shown)}
    assert [path for path in named if not (ROOT / path).is_file() or not Path(path).name.startswith("test_")] == []


def test_a_module_without_tests_would_be_noticed(tmp_path: Path) -> None:
    for path in ("app/http/rank.py", "app/http/new.py", "app/__init__.py", "tests/app/http/test_rank.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert untested(tmp_path) == {"app/http/new.py"}
    assert place("app/http/new.py") is None


def test_every_requirement_is_locked() -> None:
    groups = [PROJECT["dependencies"], CLIENT["dependencies"], *PROJECT["optional-dependencies"].values()]
    wanted = {normal(re.split(r"[\[<>=;~! ]", line)[0]) for group in groups for line in group}
    assert wanted - {normal(name) for name in LOCKED} == set()


def test_the_lock_fits_cpu_and_cuda_builds_of_torch() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", LOCKED["torch"])  # no +cpu, no +cu130: the machine's index decides
    assert [name for name in LOCKED if name.startswith(("nvidia-", "cuda-"))] == []  # the CUDA build pins its own
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[^+@; ]+( ; .+)?", line) for line in LOCK)


def test_make_help_names_every_target() -> None:
    targets = set(re.findall(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE)[0].split())
    told = {line.split()[0] for line in make("help").stdout.splitlines()}
    assert targets <= told
    assert {"serve", "test", "check", "bench", "bench-gpu", "lock", "clean", "load", "peers", "install"} <= targets


def test_make_serve_hands_port_and_checkpoint_on() -> None:
    told = make("-n", "serve", "PORT=8100", "CHECKPOINT=some/where").stdout
    assert 'RANKER_PORT="8100"' in told
    assert 'RANKER_CHECKPOINT="some/where"' in told


def test_without_a_fitting_python_make_says_what_to_install(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "docker").mkdir()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "docker/requirements.lock").touch()
    told = make("serve", "PYTHON=", directory=tmp_path)
    assert told.returncode != 0
    assert "Python 3.11 or newer" in told.stderr
    assert "python3-venv" in told.stderr


def test_the_search_for_python_takes_what_runs_this_test() -> None:
    assert make("-n", "-B", "files").stdout.split()[0] in {"python3", "python3.11", "python3.12", "python3.13"}


def test_the_list_of_files_is_up_to_date() -> None:
    check = subprocess.run([sys.executable, ROOT / ".ci/list-files", "--check"], capture_output=True, text=True)
    assert check.returncode == 0, check.stderr


def test_the_readmes_first_request_is_one_that_can_be_sent() -> None:
    readme = (ROOT / "README.md").read_text()
    curl = shlex.split(next(line for line in readme.splitlines() if line.startswith("curl")))
    assert "http://127.0.0.1:8000/rank" in curl
    assert (ROOT / curl[curl.index("-d") + 1].removeprefix("@")).is_file()


@pytest.mark.parametrize("script", [*(ROOT / ".ci").iterdir()], ids=lambda path: path.name)
def test_a_ci_script_can_be_run(script: Path) -> None:
    assert os.access(script, os.X_OK)
    interpreter = script.read_text().splitlines()[0].removeprefix("#!/usr/bin/env ")
    check = {"bash": ["-n"], "python3": ["-c", "import ast, sys; ast.parse(open(sys.argv[1]).read())"]}[interpreter]
    assert subprocess.run([interpreter, *check, script]).returncode == 0
