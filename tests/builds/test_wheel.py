"""What `make wheel` makes: an sdist, and a wheel from it that serves from anywhere, without repository or compiler."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from loadtest.machine import ROOT
from loadtest.server import example, serving
from model.native.build import LEVELS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
DIST_INFO = re.compile(r"phoenix_ranking_server-[^/]+\.dist-info/")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both. Kernels are compiled without optimisation, in a third of the time."""
    pytest.importorskip("auditwheel")
    pytest.importorskip("build")
    scripts = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    if missing := [name for name in ("g++", "patchelf") if shutil.which(name, path=scripts) is None]:
        pytest.skip(f"needs {' and '.join(missing)}")
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run([sys.executable, ROOT / ".ci/wheel", out, "-O0"], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_the_wheel_and_the_sdist_hold_what_serves_and_no_tests(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert re.fullmatch(rf"phoenix_ranking_server-.*-py3-none-manylinux_2_\d+_{platform.machine()}\.whl", wheel.name)
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not DIST_INFO.match(name) and name[-1] != "/"}
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    kernels = {name for name in names if name.endswith(".so")}
    levels = [level for level in LEVELS if level.machine == platform.machine()]
    for kernel in ("kernel", "search"):
        wanted = {level.name for level in levels if kernel in level.sources}
        assert {Path(name).name.split("-")[1] for name in kernels if f"/{kernel}-" in name} == wanted
    assert {"app/explore/assets/explore.html", "model/native/kernel.cpp", "weights/demo/manifest.json"} <= names
    assert {name.partition("/")[0] for name in names} == {"app", "model", "weights"}
    assert names - kernels <= sources
    assert not any(name.startswith("loadtest/") or name.endswith(".so") for name in sources)


def test_the_wheel_serves_the_demo_without_home_or_compiler(built: Path, tmp_path: Path) -> None:
    environment, home, elsewhere = tmp_path / "environment", tmp_path / "home", tmp_path / "elsewhere"
    venv.create(environment, symlinks=True)
    (wheel,), python = built.glob("*.whl"), environment / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel]
    subprocess.run(pip, env=os.environ | {"PYTHONPATH": ""}, check=True, timeout=180)
    [site] = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    home.mkdir()
    elsewhere.mkdir()
    ours = {"HOME": str(home), "PATH": str(environment / "bin"), "PYTHONPATH": ""}
    command = [str(environment / "bin/phoenix-ranker"), "serve"]
    with serving(site / "weights/demo", command=command, env=ours, cwd=elsewhere, threads=1) as server:
        reply = server.post("/rank", example())
        pages = [server.get(path).status_code for path in ("/explore", "/assets/explore.js", "/docs")]
        info = server.get("/info").json()
        mapped = set(re.findall(r"/\S+\.so", Path(f"/proc/{server.process.pid}/maps").read_text()))
    assert reply.status_code == 200
    assert len(reply.json()["candidates"]) == len(example()["candidates"])
    assert pages == [200] * 3
    assert info["backend"] == "native"
    kernels = {path for path in mapped if Path(path).name.startswith("kernel-")}
    assert kernels
    assert all(path.startswith(str(site)) for path in kernels)
    assert list(home.rglob("*.so")) == [], "nothing was compiled"
    assert list(elsewhere.iterdir()) == []
