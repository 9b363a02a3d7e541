"""What `python -m build` makes: an sdist from which a wheel is built, and a wheel that serves from anywhere without the repository."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.process import DEMO, ROOT, serving

PACKAGES = ("app", "loadtest", "model", "weights")
DATA = {
    ".cpp",
    ".h",
    ".j2",
    ".html",
    ".css",
    ".js",
    ".svg",
}  # what the packages read beside their modules: kernel, report, pages


def tracked() -> list[str]:
    """Every file of the project, also one that is not yet committed."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("the list of files comes from git, and this is no checkout")
    return [path for path in listed.stdout.splitlines() if (ROOT / path).is_file()]


def belongs(path: str) -> bool:
    """Whether the wheel needs a file: modules and their data, no checkpoints or results; the client has a wheel of its own."""
    return (
        not path.startswith("app/client/")
        and "/results/" not in path
        and path.split("/")[0] in PACKAGES
        and Path(path).suffix in {".py"} | DATA
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist, and the wheel that was built from it."""
    sources, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("dist")
    for path in tracked():
        if not path.startswith(("tests/", "docs/")):
            (sources / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, sources / path)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out)]  # this environment's build tools
    done = subprocess.run(command, cwd=sources, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment with the wheel, and with this environment's packages behind it."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, symlinks=True)
    python = home / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel]
    subprocess.run(pip, check=True, timeout=60)
    site = next(home.glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory that has nothing to do with the repository, as the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


def test_the_wheel_holds_the_packages_with_their_data_and_nothing_else(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = set(filter(belongs, tracked()))
    assert {"model/native/kernel.cpp", "model/native/vector.h", "loadtest/report/templates/report.html.j2"} <= wanted
    assert held == wanted


def test_the_sdist_holds_what_the_wheel_is_built_from(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert held >= {"pyproject.toml", "README.md", "LICENSE", *filter(belongs, tracked())}
    assert not any(name.startswith(("weights/demo", "loadtest/results", "docker")) for name in held)


@pytest.mark.parametrize("package", ["app", "weights", "loadtest"])
def test_each_command_says_what_it_does(installed: Path, elsewhere: Path, package: str) -> None:
    told = subprocess.run([installed, "-m", package, "--help"], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    assert "usage" in told.stdout.lower()


def test_the_installed_wheel_is_what_runs_and_ranks(installed: Path, elsewhere: Path) -> None:
    where = subprocess.run([installed, "-c", "import app; print(app.__file__)"], capture_output=True, text=True)
    assert where.stdout.startswith(str(installed.parents[1]))
    body = json.loads((DEMO / "example.json").read_text())
    with serving(DEMO, str(installed), "-m", "app", root=elsewhere) as server:
        reply = httpx.post(f"{server.url}/rank", json=body, timeout=30)
        info = httpx.get(f"{server.url}/info").json()
        pages = [
            httpx.get(f"{server.url}/{path}").status_code
            for path in ("explore", "assets/explore.js", "docs", "assets/docs.js")
        ]
    assert reply.status_code == 200
    assert sorted(each["rank"] for each in reply.json()["candidates"]) == list(range(1, len(body["candidates"]) + 1))
    assert pages == [200] * 4
    assert info["backend"] == "native"  # the kernel's sources came along
