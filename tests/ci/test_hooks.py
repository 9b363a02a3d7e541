"""A commit is held to `make check` by the real pre-commit, in a repository of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = ".pre-commit-config.yaml"


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
