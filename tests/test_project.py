"""The frame of the project: what lies at the top, what the lock promises, what make and the README say."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
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
LOCKS = {path.name: path.read_text() for path in (ROOT / "docker").glob("*.lock")}


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


def locked(text: str) -> dict[str, str]:
    """Package → version, of those that have a version and hashes alone; raises for a line of any other form."""
    entries = re.sub(r" \\\n +", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    form = r"([A-Za-z0-9_.-]+)==([^@; ]+)( ; [^\\]+?)?(?: --hash=sha256:[0-9a-f]{64})+"
    found = [re.fullmatch(form, entry) for entry in entries]
    if None in found:
        raise ValueError(f"not locked: {entries[found.index(None)]}")
    return {normal(match[1]): match[2] for match in found if match}


LOCKED = {name: locked(text) for name, text in LOCKS.items()}


def names_of(*groups: list[str]) -> set[str]:
    return {normal(re.split(r"[\[<>=;~! ]", line)[0]) for group in groups for line in group}


@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_every_requirement_is_locked(build: str) -> None:
    extras = PROJECT["optional-dependencies"]
    service = LOCKED["requirements.lock"].keys() | LOCKED[f"torch-{build}.lock"].keys()
    assert names_of(PROJECT["dependencies"], extras["tracing"], extras["grpc"]) - service == set()
    everything = service | LOCKED["development.lock"].keys()
    others = (lines for name, lines in extras.items() if name != "ray")  # make test-ray has an environment of its own
    assert names_of(CLIENT["dependencies"], *others) - everything == set()


def test_the_locks_share_no_package_and_both_builds_of_torch_have_one_number() -> None:
    assert set(LOCKED) == {"requirements.lock", "development.lock", "torch-cpu.lock", "torch-cuda.lock"}
    assert LOCKED["torch-cpu.lock"] == {"torch": LOCKED["torch-cuda.lock"]["torch"] + "+cpu"}
    assert [
        name for name in LOCKED["requirements.lock"] if name.startswith(("nvidia-", "cuda-", "torch", "triton"))
    ] == []
    counted = Counter(name for lock, packages in LOCKED.items() if lock != "torch-cpu.lock" for name in packages)
    twice = {name for name, times in counted.items() if times > 1}
    assert twice == {"colorama", "triton"}  # the tests need them beside a CPU build, and off Windows
    assert LOCKED["torch-cuda.lock"]["triton"] == LOCKED["development.lock"]["triton"]


@pytest.mark.parametrize(
    "line",
    [
        "numpy==2.4.6",
        f"numpy>=2 --hash=sha256:{'0' * 64}",
        f"numpy==2.4.6 --hash=md5:{'0' * 32}",
        "-e .",
        "x @ https://y/x.whl",
    ],
)
def test_a_line_without_a_version_or_a_hash_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="not locked"):
        locked(LOCKS["requirements.lock"] + line + "\n")


def test_the_wheels_of_this_machine_are_those_of_the_lock() -> None:
    """Where the CPU build lies in a folder, as on a machine without the network: the hash in the lock is that file's."""
    version = LOCKED["torch-cpu.lock"]["torch"]
    wheels = list(Path(os.environ.get("PIP_FIND_LINKS", "/nowhere")).glob(f"torch-{version}-cp311-*.whl"))
    if not wheels:
        pytest.skip("pip has no folder with torch's CPU build here")
    for wheel in wheels:
        with wheel.open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() in LOCKS["torch-cpu.lock"]


def test_pip_refuses_a_file_that_is_not_the_locked_one(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "odd-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("odd-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
        wheel.writestr("odd-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("odd-1.0.dist-info/RECORD", "")
    right = hashlib.sha256((tmp_path / "odd-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    pip = f"{sys.executable} -m pip install -q --no-index --find-links . --target to --no-deps --require-hashes -r lock"
    for digest, code in (("0" * 64, 1), (right, 0)):
        (tmp_path / "lock").write_text(f"odd==1.0 --hash=sha256:{digest}\n")
        done = subprocess.run(pip.split(), cwd=tmp_path, capture_output=True, timeout=60)
        assert done.returncode == code, done.stderr.decode()


def test_a_bill_of_materials_names_what_the_image_holds(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docker", tmp_path / "docker")
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "rfc3987_syntax.py").write_text("raise ImportError")  # as in tests/conftest.py
    command, environment = [tmp_path / ".ci/sbom", Path(sys.executable).parent], {**os.environ, "PYTHONPATH": tmp_path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    for build in ("cpu", "cuda"):
        found = json.loads((tmp_path / f"build/sbom-{build}.json").read_text())
        assert found["bomFormat"] == "CycloneDX"
        assert found["metadata"]["component"]["name"] == PROJECT["name"]
        listed = {normal(component["name"]): component["version"] for component in found["components"]}
        held = LOCKED["requirements.lock"] | LOCKED[f"torch-{build}.lock"]
        assert listed.items() == held.items() - {("colorama", held["colorama"])}  # which is for Windows
        hashes = [
            reference.get("hashes")
            for component in found["components"]
            for reference in component["externalReferences"]
        ]
        assert all(hashes)


def test_make_help_names_every_target() -> None:
    targets = set(re.findall(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE)[0].split())
    told = {name for line in make("help").stdout.splitlines() for name in line[2:40].split()}
    assert targets <= told
    assert "-m loadtest front --rounds 1" in make("-n", "bench-front", "ARGS=--rounds 1").stdout
    assert "-m loadtest open" in make("-n", "load-open").stdout
    assert {"serve", "test", "check", "bench", "bench-gpu", "lock", "clean", "load", "peers", "install"} <= targets


def test_make_serve_hands_port_and_checkpoint_on() -> None:
    told = make("-n", "serve", "PORT=8100", "CHECKPOINT=some/where").stdout
    assert 'RANKER_PORT="8100"' in told
    assert 'RANKER_CHECKPOINT="some/where"' in told


def test_make_serve_keeps_the_corpus_of_the_environment_and_the_demos_with_fronts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANKER_FRONTS", "2")
    assert 'RANKER_RETRIEVAL__CORPUS="weights/demo-posts"' in make("-n", "serve").stdout
    monkeypatch.setenv("RANKER_RETRIEVAL__CORPUS", "mine")
    assert 'RANKER_RETRIEVAL__CORPUS="mine"' in make("-n", "serve").stdout


def test_without_a_fitting_python_make_says_what_to_install(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "docker").mkdir()
    (tmp_path / "pyproject.toml").touch()
    for name in LOCKS:
        (tmp_path / "docker" / name).touch()
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


def debian(directory: Path, code: int, *packages: str) -> tuple[str, str]:
    """What `.ci/debian` asked of an apt-get that ends with this code, and what it said."""
    apt, asked = directory / "apt-get", directory / "asked"
    apt.write_text(f'#!/bin/sh\necho "$@" >>{asked}\nexit {code}\n')
    apt.chmod(0o755)
    asked.write_text("")
    path = f"{directory}:{os.environ['PATH']}"
    done = subprocess.run([ROOT / ".ci/debian", *packages], env={"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return asked.read_text(), done.stderr


def test_debian_packages_are_installed_once_and_what_cannot_be_is_told(tmp_path: Path) -> None:
    assert debian(tmp_path, 0, "bash", "git") == ("", "")
    asked, said = debian(tmp_path, 0, "bash", "no-such-package", "nor-this")
    assert asked.splitlines()[0] == "-qq update"
    assert asked.splitlines()[1].endswith("--no-install-recommends no-such-package nor-this")
    assert said == ""
    assert "could not be installed: no-such-package;" in debian(tmp_path, 100, "no-such-package")[1]


def test_the_makefile_is_short_enough_to_be_read() -> None:
    told = make("help").stdout
    assert next(line for line in told.splitlines() if line and not line.startswith(" ")) == "The service"
    targets = re.findall(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE)[0].split()
    assert len(targets) <= 30, "fold a measurement into `python -m loadtest`, an installer into .ci/debian"


@pytest.mark.parametrize(
    "script", [path for path in (ROOT / ".ci").iterdir() if path.is_file()], ids=lambda path: path.name
)
def test_a_ci_script_can_be_run(script: Path) -> None:
    assert os.access(script, os.X_OK)
    interpreter = script.read_text().splitlines()[0].removeprefix("#!/usr/bin/env ")
    check = {"bash": ["-n"], "python3": ["-c", "import ast, sys; ast.parse(open(sys.argv[1]).read())"]}[interpreter]
    assert subprocess.run([interpreter, *check, script]).returncode == 0


@pytest.mark.parametrize(
    ("planted", "rule"),
    [
        ("import subprocess\n\nsubprocess.run('ls', shell=True)\n", "S60"),
        ("import pickle\n\npickle.loads(b'')\n", "S301"),
        ("import random\n\nNONCE = random.random()\n", "S311"),
        ("import tarfile\n\ntarfile.open('x').extractall('y')\n", "S202"),
    ],
)
def test_make_check_finds_what_is_unsafe(planted: str, rule: str) -> None:
    command = f"{sys.executable} -m ruff check --output-format concise --stdin-filename app/planted.py -".split()
    checked = subprocess.run(command, cwd=ROOT, input=planted, capture_output=True, text=True)
    assert (checked.returncode, f": {rule}" in checked.stdout) == (1, True), checked.stdout
