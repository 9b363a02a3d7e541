"""The client as its users get it: built, installed into an environment of its own, and asked for a ranking there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import httpx
import pytest

from tests.e2e.process import DEMO, ROOT, serving

CLIENT = ROOT / "app" / "client"
EXAMPLE = re.findall(r"```python\n(.*?)```", (CLIENT / "README.md").read_text(), re.DOTALL)[0]
OTHERS = """
import importlib.util, json, sys
others = ("torch", "numpy", "fastapi", "starlette", "pydantic", "app", "model", "weights")
print(json.dumps([name for name in others if importlib.util.find_spec(name) or name in sys.modules]))
"""
ROWS = """
print(json.dumps([[row.post_id, row.score, row.rank, row.probabilities] for row in ranking.candidates]))
"""


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=110)


def oldest_python() -> str:
    """The oldest Python that the client promises to run on, where it is at hand; else this one."""
    wanted = "python" + tomllib.loads((CLIENT / "pyproject.toml").read_text())["project"]["requires-python"].strip(">=")
    try:
        return wanted if run(wanted, "-c", "import venv, ensurepip", cwd=ROOT).returncode == 0 else sys.executable
    except FileNotFoundError:
        return sys.executable


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the client's sdist and wheel."""
    place = tmp_path_factory.mktemp("client")
    if run(
        sys.executable, "-m", "pip", "download", "--no-deps", "--dest", place / "probe", "httpx", cwd=place
    ).returncode:
        pytest.skip("pip reaches no package index from here")
    done = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", place / "dist", CLIENT, cwd=place)
    assert done.returncode == 0, done.stdout + done.stderr
    return place / "dist"


def test_the_wheel_and_the_sdist_hold_the_client_and_nothing_else(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    modules = {f"phoenix_ranker_client/{path.name}" for path in (CLIENT / "phoenix_ranker_client").glob("*.py")}
    assert {name for name in names if ".dist-info/" not in name} == modules | {"phoenix_ranker_client/py.typed"}
    with tarfile.open(sdist) as archive:
        files = {member.name.partition("/")[2]: member.size for member in archive if member.isfile()}
    assert {"README.md", "LICENSE", "pyproject.toml"} <= files.keys()
    assert files["LICENSE"] == (ROOT / "LICENSE").stat().st_size
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_it_ranks_from_an_environment_without_the_server(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    python = tmp_path / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check")
    for command in (
        (oldest_python(), "-m", "venv", "--without-pip", tmp_path / "venv"),
        (*pip, "--ignore-installed", wheel),
    ):
        done = run(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    with serving(DEMO, threads=1) as server:
        example = EXAMPLE.replace("http://localhost:8000", server.url)
        assert server.url in example
        done = run(python, "-I", "-c", example + OTHERS + ROWS, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        best, others, rows = map(json.loads, done.stdout.splitlines())
        body = {
            "user_id": "1868434417286410240",
            "candidates": [{"post_id": 90, "author_id": 7}, {"post_id": 91, "author_id": 5}],
            "history": [{"post_id": 17, "author_id": 5, "actions": ["favorite", "dwell"], "dwell_time": 12.5}],
        }
        wanted = httpx.post(f"{server.url}/rank", json=body).json()["candidates"]
    assert others == []
    control = json.loads(run(sys.executable, "-c", OTHERS, cwd=ROOT).stdout)
    assert {"torch", "fastapi", "app"} <= set(control)
    assert rows == [[row["post_id"], row["score"], row["rank"], row["probabilities"]] for row in wanted]
    assert best == min(wanted, key=lambda row: row["rank"])["post_id"]
