"""The scripts of `.ci/` that are asked once in a while: the hook of a commit, the run without torch, the audit, the release."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CONFIG = ".pre-commit-config.yaml"
LIGHT = runpy.run_path(str(ROOT / ".ci/test-light"))
AUDIT = runpy.run_path(str(ROOT / ".ci/audit"))
JOBS = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def run(repository: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "MAKE", "MFLAGS"))}
    own |= {"PRE_COMMIT_HOME": str(repository / ".git/pre-commit"), "GIT_CONFIG_GLOBAL": os.devnull}
    return subprocess.run(command, cwd=repository, env=own, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("recipe", "committed"), [("echo once >>ran", True), ("echo once >>ran; false", False)])
def test_a_commit_runs_make_check_and_nothing_else(tmp_path: Path, recipe: str, committed: bool) -> None:
    if not (shutil.which("git") and shutil.which("make")):
        pytest.skip("git or make is not installed here")
    shutil.copy(ROOT / CONFIG, tmp_path)
    (tmp_path / "Makefile").write_text(f"check:\n\t{recipe}\n")
    run(tmp_path, "git", "init", "-q")
    installed = run(tmp_path, sys.executable, "-m", "pre_commit", "install")
    assert installed.returncode == 0, installed.stderr
    run(tmp_path, "git", "add", "Makefile", CONFIG)
    commit = run(tmp_path, "git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "first")
    assert (commit.returncode == 0) is committed, commit.stderr
    assert len((tmp_path / "ran").read_text().splitlines()) == 1


def test_the_seam_is_every_module_that_speaks_http() -> None:
    modules = set(LIGHT["seam"]())
    assert {"app.server.listener", "app.http.rank", "app.request.validate", "app.interface"} <= modules
    assert {"app.fronts.front", "app.fronts.supervisor"} <= modules
    assert not any(name.startswith(("app.engine", "app.service")) for name in modules)


def test_an_environment_with_torch_would_show_nothing() -> None:
    refused = subprocess.run(
        [sys.executable, ROOT / ".ci/test-light", "--inside"], capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 1
    assert "there is a torch in this environment" in refused.stderr


def test_torch_is_all_that_is_left_out() -> None:
    wanted = LIGHT["requirements"]()
    names = {line.split(">")[0] for line in wanted}
    assert names >= {"fastapi", "numpy", "uvicorn", "pytest", "hypothesis", "pytest-timeout"}
    assert not names & {"torch", "triton"}


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
    found, text = AUDIT["verdict"]({"dependencies": packages})
    assert found == code
    assert said in text


def test_pip_audit_reads_every_lock_that_is_audited() -> None:
    """Two locks with other hashes for one package, given together, were refused, and that was taken for a machine without the network."""
    assert {lock.name for lock in AUDIT["LOCKS"]} == {"development.lock", "requirements.lock", "torch-cuda.lock"}
    for lock in AUDIT["LOCKS"]:
        done = subprocess.run([*AUDIT["COMMAND"], str(lock), "--dry-run"], capture_output=True, text=True)
        assert "would have audited" in done.stdout + done.stderr, done.stderr


def test_every_step_calls_what_is_there() -> None:
    runs = [step["run"] for job in JOBS.values() for step in job["steps"] if "run" in step]
    assert len(runs) >= 4
    for words in map(str.split, runs):
        assert words[0] in {"git", "pip"} or (ROOT / words[0]).is_file(), words


def test_only_a_tag_publishes_and_no_token_is_kept() -> None:
    for name in ("publish", "image"):
        assert JOBS[name]["if"] == "startsWith(github.ref, 'refs/tags/v')"
        assert set(JOBS[name]["needs"]) == {"build", "try"}
        assert JOBS[name]["permissions"]["id-token"] == "write"
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()


@pytest.mark.parametrize(
    ("tag", "said"),
    [("v9.9.9", "The tag is v9.9.9, but pyproject.toml has version"), ("v{}", "CHANGELOG.md has no section [{}]")],
)
def test_a_tag_that_does_not_fit_is_refused(tmp_path: Path, tag: str, said: str) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/release", tmp_path / ".ci")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n")
    command = [str(tmp_path / ".ci/release"), tag.format(VERSION)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert said.format(VERSION) in ended.stderr
