"""The frame of the project: what lies at the top, what the lock promises, what make and the README say."""

from __future__ import annotations

import os
import re
import runpy
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
    "README.md", "CHANGELOG.md", "LICENSE", ".ci",
}  # fmt: skip
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CLIENT = tomllib.loads((ROOT / "app/client/pyproject.toml").read_text())["project"]
LOCK = [line for line in (ROOT / "docker/requirements.lock").read_text().splitlines() if not line.startswith("#")]
LOCKED = dict(line.split("==") for line in LOCK)


def normal(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def make(*arguments: str, directory: Path = ROOT) -> subprocess.CompletedProcess[str]:
    if shutil.which("make") is None:
        pytest.skip("make is not installed here")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=60)


def test_the_top_level_is_what_a_newcomer_was_told() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("the list of files comes from git, and this is no checkout")
    top = {path.split("/")[0] for path in listed.stdout.splitlines()}
    assert {name for name in top - TOP if not name.startswith(".")} == set()
    assert top >= TOP


def test_every_requirement_is_locked() -> None:
    groups = [PROJECT["dependencies"], CLIENT["dependencies"], *PROJECT["optional-dependencies"].values()]
    wanted = {normal(re.split(r"[\[<>=;~! ]", line)[0]) for group in groups for line in group}
    assert wanted - {normal(name) for name in LOCKED} == set()


def test_the_lock_fits_cpu_and_cuda_builds_of_torch() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", LOCKED["torch"])  # no +cpu, no +cu130: the machine's index decides
    assert [name for name in LOCKED if name.startswith(("nvidia-", "cuda-"))] == []  # the CUDA build pins its own
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[^+@; ]+( ; .+)?", line) for line in LOCK)


def test_make_help_names_every_target() -> None:
    targets = set(re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split())
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


def test_every_local_link_of_the_readme_leads_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_readmes_first_request_is_one_that_can_be_sent() -> None:
    readme = (ROOT / "README.md").read_text()
    curl = shlex.split(next(line for line in readme.splitlines() if line.startswith("curl")))
    assert curl[2] == "http://127.0.0.1:8000/rank"
    assert (ROOT / curl[curl.index("-d") + 1].removeprefix("@")).is_file()


def test_the_ci_script_is_sound_shell() -> None:
    for script in ("run", "lock", "fetch-prometheus"):
        path = ROOT / ".ci" / script
        assert os.access(path, os.X_OK)
        assert subprocess.run(["bash", "-n", path], check=False).returncode == 0


def _package(name: str, **more: object) -> dict[str, object]:
    return {"name": name, "version": "1.0", "vulns": [], **more}


FLAW = {"id": "PYSEC-1", "fix_versions": ["1.1"]}
SKIPPED = {"name": "odd", "skip_reason": "not found"}
AUDITS = {
    "clean": ([_package("a"), _package("b")], 0, "2 packages, no known vulnerability"),
    "a flaw": ([_package("a"), _package("b", vulns=[FLAW])], 1, "b 1.0: PYSEC-1, fixed in 1.1"),
    "one not looked up": ([_package("a"), SKIPPED], 1, "odd: not looked up"),
    "no network": ([SKIPPED, SKIPPED], 75, "no advisories can be had"),
}


@pytest.mark.parametrize(("packages", "code", "said"), AUDITS.values(), ids=AUDITS)
def test_the_audit_tells_no_flaw_from_no_knowledge(packages: list[object], code: int, said: str) -> None:
    path = ROOT / ".ci/audit"
    namespace = runpy.run_path(str(path))
    found, text = namespace["verdict"]({"dependencies": packages})
    assert found == code
    assert said in text
