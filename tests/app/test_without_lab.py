"""The service runs without the lab: with none of the packages of the extra `train`, and with none of its modules imported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from loadtest.server import DEMO, POSTS, TOWERS

ROOT = Path(__file__).parents[2]
SERVICE = """
import json, shutil, sys
sys.modules |= dict.fromkeys({absent!r})  # an import of these raises ModuleNotFoundError
from starlette.testclient import TestClient
from app.main import create_app
from app.settings import Retrieval, Settings
from loadtest.server import example, wait_until
posts = shutil.copytree({posts!r}, "posts")
app = create_app(Settings(checkpoint={demo!r}, retrieval=Retrieval(checkpoint={towers!r}, corpus=posts), threads=1))
body = example()
with TestClient(app, base_url="http://127.0.0.1") as client:
    wait_until(lambda: client.get("/readyz").status_code == 200, 60)
    viewer = {{name: value for name, value in body.items() if name != "candidates"}}
    statuses = [client.post("/rank", json=body).status_code, client.post("/recommend", json=viewer).status_code]
    {plant}
print(json.dumps([statuses, sorted(name for name in sys.modules if name.startswith("weights.lab"))]))
"""


def train_packages() -> list[str]:
    """The names by which the packages of the extra `train` are imported, but for those that the service needs too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    imported = {"scikit-learn": "sklearn"}
    names = [re.split(r"[<>=\[ ;]", wanted)[0] for wanted in project["optional-dependencies"]["train"]]
    return [imported.get(name, name.replace("-", "_")) for name in names]


def run_service(directory: Path, plant: str = "") -> tuple[list[int], list[str]]:
    """The statuses of a ranking and a recommendation of a service in a process of its own, and the modules of the lab that it imported."""
    code = SERVICE.format(absent=train_packages(), posts=str(POSTS), demo=str(DEMO), towers=str(TOWERS), plant=plant)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT), "HOME": str(Path.home()), "PATH": "/usr/bin:/bin"},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    statuses, modules = json.loads(done.stdout.splitlines()[-1])
    return statuses, modules


@pytest.mark.slow
def test_a_running_service_imports_nothing_of_the_lab(tmp_path: Path) -> None:
    assert run_service(tmp_path) == ([200, 200], [])


@pytest.mark.slow
def test_an_import_of_the_lab_would_be_noticed(tmp_path: Path) -> None:
    _, modules = run_service(tmp_path, "import weights.lab.world.settings")
    assert "weights.lab.world.settings" in modules
