"""The workflow that publishes, and its drill `.ci/release`: what it calls is there, and a tag that does not fit is refused."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
JOBS = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
PROGRAM = {"git", "pip"}


def test_every_step_calls_what_is_there() -> None:
    runs = [step["run"] for job in JOBS.values() for step in job["steps"] if "run" in step]
    assert len(runs) >= 4
    for words in map(str.split, runs):
        assert words[0] in PROGRAM or (ROOT / words[0]).is_file(), words


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
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version
    command = [str(tmp_path / ".ci/release"), tag.format(version[1])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert said.format(version[1]) in ended.stderr


def test_the_image_has_the_version_of_the_package() -> None:
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version
    assert f"ARG VERSION={version[1]}\n" in (ROOT / "Dockerfile").read_text()
