"""What `make wheel` makes: an sdist from which a wheel is built, and a wheel that serves from anywhere without repository or compiler."""

from __future__ import annotations

import email
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from loadtest.servers.launch import ranking_server
from model.native.build import LEVELS, PREBUILT, source_digest
from tests.e2e.process import DEMO, ROOT
from tests.zygote import zygote

PACKAGES = ("app", "model", "weights")
TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
# What the packages read beside their modules: kernels' sources, pages; and the demo.
DATA = {".cpp", ".h", ".html", ".css", ".js", ".svg", ".typed"}
DEMO_DATA = re.compile(r"weights/(demo/[^/]+\.(json|safetensors)|demo-(posts|towers)/[^/]+)")
BUILDER = runpy.run_path(str(ROOT / ".ci/wheel"))
DIST_INFO = "phoenix_ranking_server-0.1.0.dist-info"
QUICKLY = (  # kernels are compiled in half of the time; `make wheel` tests what is released
    "import runpy, sys, model.native.build as build; build.FLAGS += ('-O0',); del sys.argv[0]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
MOST_BYTES = 11_000_000
SLOW_START_SECONDS = 15.0  # 1.7 s on an idle machine; compiling the kernels would take longer where there is a compiler
REPOSITORY = os.environ.get("REPOSITORY", "https://git.example/feed/ranker").rstrip("/")

pytestmark = pytest.mark.timeout(400)  # the first test waits for the build, over 110 s beside three other suites


def tracked() -> list[str]:
    """Every file of the project, also one that is not yet committed."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("the list of files comes from git, and this is no checkout")
    return [path for path in listed.stdout.splitlines() if (ROOT / path).is_file()]


def belongs(path: str) -> bool:
    """Whether the wheel needs a file: modules with their data, the demo, what `bench` runs; the client has a wheel of its own."""
    if path.startswith("loadtest/"):
        module = path.removesuffix(".py").replace("/", ".")
        package = module.removesuffix("__init__")
        return module in TOOLS["py-modules"] or (
            module != package and any(name.startswith(package) for name in TOOLS["py-modules"])
        )
    is_data = Path(path).suffix in {".py"} | DATA and not path.startswith("app/client/")
    return path.split("/")[0] in PACKAGES and (is_data or DEMO_DATA.fullmatch(path) is not None)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist, the wheel for any machine, and the one with kernels for this one: DIST, or built anew."""
    if given := os.environ.get("DIST"):
        return Path(given).resolve()
    if shutil.which(f"{platform.machine()}-linux-gnu-g++") is None:
        pytest.skip("the kernels are compiled with Debian's g++")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-c", QUICKLY, str(ROOT / ".ci/wheel"), str(out), platform.machine()]
    done = zygote.run(command, timeout=400, REPOSITORY=REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob(f"*manylinux*{platform.machine()}.whl"))


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


def without_path() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def held(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_the_packages_with_their_data_and_nothing_else(built: Path) -> None:
    wanted = set(filter(belongs, tracked()))
    assert {"model/native/kernel.cpp", "weights/demo/manifest.json", "app/py.typed"} <= wanted
    assert {path for path in wanted if path.startswith("loadtest/")} >= {"loadtest/__init__.py", "loadtest/machine.py"}
    assert held(next(built.glob("*-any.whl"))) == wanted


def test_the_wheel_of_a_machine_holds_a_kernel_for_every_width_of_vectors(
    built: Path, wheel: Path, tmp_path: Path
) -> None:
    kernels = held(wheel) - held(next(built.glob("*-any.whl")))
    wanted = {
        f"{Path(source).parent}/{PREBUILT}/{Path(source).stem}-{level.name}-{source_digest(ROOT / source)}.so"
        for source in BUILDER["SOURCES"]
        for level in LEVELS
        if level.machine == platform.machine() and Path(source).stem in level.sources
    }
    assert kernels == wanted
    assert wheel.stat().st_size < MOST_BYTES
    with zipfile.ZipFile(wheel) as archive:
        assert sum(entry.file_size for entry in archive.infolist()) < 2 * MOST_BYTES
        assert b"Root-Is-Purelib: false" in archive.read(f"{DIST_INFO}/WHEEL")
        archive.extractall(tmp_path, kernels)  # noqa: S202
    for name in kernels:
        needs = BUILDER["Elf"](tmp_path / name).needs()
        loader = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}[platform.machine()]
        assert {file for file, _, _ in needs} <= {"libc.so.6", "libm.so.6", "libgcc_s.so.1", loader}
        assert max(BUILDER["numbers"](version) for _, version, _ in needs if "GLIBC" in version) <= (2, 28)


def test_a_kernel_that_needs_a_newer_system_is_refused(tmp_path: Path) -> None:
    source, library = tmp_path / "new.cpp", tmp_path / "new.so"
    source.write_text('extern "C" unsigned arc4random(); extern "C" void free(void*);\n'
                      'extern "C" unsigned draw() { free(0); return arc4random(); }\n')  # fmt: skip
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library], check=True)
    if all(BUILDER["numbers"](version) <= (2, 28) for _, version, _ in BUILDER["Elf"](library).needs()):
        pytest.skip("this system has no newer glibc")
    with pytest.raises(SystemExit, match=r"new\.so needs GLIBC_2\.36 of libc\.so\.6: arc4random"):
        BUILDER["Elf"](library).ask_less()


@pytest.mark.skipif("DIST" in os.environ and "REPOSITORY" not in os.environ, reason="built without an address")
def test_the_metadata_lead_to_the_repository(wheel: Path) -> None:
    text = zipfile.ZipFile(wheel).read(f"{DIST_INFO}/METADATA").decode()
    told = email.message_from_string(text)
    assert f"Source, {REPOSITORY}" in told.get_all("Project-URL", [])
    assert told["Keywords"]
    assert told["Author"]
    links = re.findall(r"\]\(([^)]*)\)", str(told.get_payload()))
    assert len(links) > 20
    assert [link for link in links if not link.startswith(("https://", "http://", "#"))] == []


def test_the_sdist_holds_what_the_wheel_is_built_from(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {"pyproject.toml", "README.md", "LICENSE", *filter(belongs, tracked())}
    assert not any(name.startswith(("loadtest/results", "docker", "tests")) or name.endswith(".so") for name in names)


@pytest.mark.parametrize("words", ["phoenix-ranker", "phoenix-ranking-server", "python -m app", "python -m weights"])
def test_each_command_says_what_it_does(installed: Path, elsewhere: Path, words: str) -> None:
    command = [*f"{installed.parent}/{words}".split(), "--help"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    assert "usage" in told.stdout.lower()


def test_the_demo_is_served_from_an_empty_home_without_a_compiler(
    installed: Path, elsewhere: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home, body = tmp_path_factory.mktemp("home"), json.loads((DEMO / "example.json").read_text())
    ours = {"HOME": str(home), "PATH": str(installed.parent), "OMP_NUM_THREADS": "1"}
    command = str(installed.parent / "phoenix-ranker")
    began = time.monotonic()
    with ranking_server(command, "serve", root=elsewhere, environment=ours, logs__format="json") as server:
        seconds = time.monotonic() - began
        reply = httpx.post(f"{server.url}/rank", json=body, timeout=30)
        found = httpx.post(f"{server.url}/retrieve", json={"user_id": body["user_id"], "history": body["history"]})
        pages = [
            httpx.get(f"{server.url}/{path}").status_code
            for path in ("explore", "assets/explore.js", "docs", "assets/docs.js")
        ]
        info = httpx.get(f"{server.url}/info").json()
        mapped = set(re.findall(r"\S+\.so", Path(f"/proc/{server.process.pid}/maps").read_text()))
        [page] = [line for line in server.lines if line["event"] == "page"]
        curl = subprocess.run(shlex.split(page["try"]), capture_output=True, timeout=30)
        loaded = subprocess.run(
            [command, "bench", server.url, "--rate", "20", "--seconds", "1", "--warmup", "0"],
            env=ours, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert server.stop() == 0
    assert reply.status_code == found.status_code == 200
    assert sorted(each["rank"] for each in reply.json()["candidates"]) == list(range(1, len(body["candidates"]) + 1))
    assert pages == [200] * 4
    assert info["backend"] == "native"
    kernels = {Path(path).name.split("-")[0] for path in mapped if path.startswith(str(installed.parents[1]))}
    assert kernels == {"kernel", "search", "codec"}
    assert json.loads(curl.stdout)["candidates"] == reply.json()["candidates"]
    assert json.loads(loaded.stdout)["summary"]["statuses"] == {"200": json.loads(loaded.stdout)["summary"]["requests"]}
    assert list(home.rglob("*.so")) == []
    assert seconds < SLOW_START_SECONDS


@pytest.mark.timeout(600)
@pytest.mark.skipif("DIST" not in os.environ, reason="minutes: `make wheel` runs it")
def test_the_http_part_of_the_suite_passes_on_the_wheel(installed: Path, tmp_path: Path) -> None:
    """The tests and what they read lie in a folder without `app` and `model`, so these can only be the wheel's."""
    for name in ("tests", "docs", "docker", "pyproject.toml", "Dockerfile", "README.md", "loadtest"):
        (tmp_path / name).symlink_to(ROOT / name) if name != "tests" else shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "weights").mkdir()  # without modules, so that it hides nothing
    for name in ("demo", "demo-posts", "demo-towers"):
        (tmp_path / "weights" / name).symlink_to(ROOT / "weights" / name)
    (tmp_path / "conftest.py").write_text(
        "import pathlib, app, model, weights\n"
        "pathlib.Path('sources').write_text('\\n'.join(each.__file__ for each in (app, model, weights)))\n"
    )
    command = [
        *f"{installed} -m pytest -p no:cacheprovider -p no:xdist tests/app/http tests/app/request".split(),
        # One takes the kernels' sources away where the wheel has compiled ones; one reads the repository's sources.
        "--deselect=tests/app/request/test_codec.py::test_without_a_compiler_everything_goes_the_plain_way",
        "--deselect=tests/app/request/test_schema.py::test_a_field_of_candidates_is_declared_once",
    ]
    ran = subprocess.run(command, cwd=tmp_path, env=without_path(), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:]
    sources = (tmp_path / "sources").read_text().split()
    assert len(sources) == 3
    assert all(str(installed.parents[1]) in each for each in sources), sources


@pytest.mark.parametrize(("package", "names"), [("app", ("weights", "model")), ("weights", ("model",))])
def test_somebody_elses_module_of_the_same_name_is_not_run(
    installed: Path, tmp_path: Path, package: str, names: tuple[str, ...]
) -> None:
    options = {"cwd": tmp_path, "env": without_path(), "capture_output": True, "text": True, "timeout": 60}
    for name in names:  # the last one is named first where there are several
        (tmp_path / f"{name}.py").write_text("print('it ran')\n")
        ended = subprocess.run([installed, "-m", package], **options)
        assert ended.returncode != 0
        assert f"the package {name} is not ours but {tmp_path}/{name}.py" in ended.stderr
        assert ended.stdout == ""
        assert ended.stderr.count("\n") == 1
    told = subprocess.run([installed, "-P", "-m", package, "--help"], **options)
    assert (told.returncode, "it ran" in told.stdout) == (0, False)
