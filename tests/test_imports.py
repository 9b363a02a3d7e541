"""Every import contract of pyproject.toml holds, and breaks where an import that it forbids is planted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINTER = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]

FOLDERS = ("app", "weights", "model", "loadtest")  # with the client below app
PLANTS = {  # contract → file, an import that the contract forbids there
    "floors: loadtest → app → weights → model": ("weights/checkpoint.py", "import app.errors"),
    "model can be carried to a bare machine": ("model/engine.py", "import pydantic"),
    "rooms of app, one way": ("app/telemetry/metrics.py", "import app.http.problems"),
    "the seam: what speaks HTTP needs no torch": ("app/http/problems.py", "import torch"),
    "the seam: what ranks needs no HTTP": ("app/service/service.py", "import fastapi"),
    "fronts need no torch": ("app/fronts/remote.py", "import torch"),
    "the supervisor needs neither torch nor HTTP": ("app/fronts/supervisor.py", "import fastapi"),
    "the engine process speaks no HTTP": ("app/fronts/host.py", "import app.request.reply"),
    "scheduling is pure policy": ("app/engine/forecast.py", "import numpy"),
    "gRPC is an extra": ("app/http/rank.py", "import grpc"),
    "the libraries of feeds are extras": ("app/service/feed.py", "import redis"),
    "Ray is an extra": ("app/ray/replica.py", "import ray"),
    "the client stands alone": ("app/client/phoenix_ranker_client/messages.py", "import app.errors"),
    "the server does not need its client": ("app/http/rank.py", "import phoenix_ranker_client"),
    "rooms of weights, one way": ("weights/format/manifest.py", "import weights.checkpoint"),
    "rooms of loadtest, one way": ("loadtest/generate/wrk.py", "import loadtest.measure.figures"),
    "what measures an engine needs the model alone": ("loadtest/gpu/card.py", "import rich"),
    "what loads a server speaks HTTP, and knows it by nothing else": (
        "loadtest/measure/runs.py",
        "import model.engine",
    ),
    "of loadtest, only the fuzzer, the faulty server and the bench of the reader know app": (
        "loadtest/peers/common.py",
        "import app.errors",
    ),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python files of the linted packages, and the contracts."""
    copied = tmp_path_factory.mktemp("tree")
    for package in FOLDERS:
        for source in (ROOT / package).rglob("*.py"):
            target = copied / source.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    shutil.copy(ROOT / "pyproject.toml", copied)
    return copied


def judged(tree: Path) -> str:
    """What the linter says of the tree."""
    linter = Path(sys.executable).with_name("lint-imports")
    environment = {**os.environ, "PYTHONPATH": f"{tree}:{tree / 'app/client'}", "COLUMNS": "200"}
    ended = subprocess.run([linter], cwd=tree, env=environment, capture_output=True, text=True, timeout=60)
    assert ("BROKEN" in ended.stdout) == bool(ended.returncode), ended.stdout + ended.stderr
    return ended.stdout


def test_every_contract_has_its_plant() -> None:
    assert set(PLANTS) == {contract["name"] for contract in LINTER["contracts"]}


def test_the_tree_keeps_every_contract_and_each_planted_import_breaks_its_own(tree: Path) -> None:
    assert f"Contracts: {len(PLANTS)} kept, 0 broken." in judged(tree)
    for file, planted in PLANTS.values():
        (tree / file).write_text(f"{(tree / file).read_text()}\n{planted}\n")
    told = judged(tree)
    for contract, (file, planted) in PLANTS.items():
        _, _, section = told.partition(f"\n{contract}\n--")
        module = file.removeprefix("app/client/").removesuffix(".py").replace("/", ".")
        direct = rf"- +{re.escape(module)} -> {re.escape(planted.split()[1])} \(l"
        assert re.search(direct, section.partition("\n---")[0]), contract


def test_the_product_does_not_lean_on_its_tests() -> None:
    """Neither by an import nor by starting one of their modules as a process."""
    files = [file for package in FOLDERS for file in (ROOT / package).rglob("*.py")]
    leaning = re.compile(r"^\s*(from|import) tests\b|[\"\s]tests\.\w+\.\w+", re.MULTILINE)
    assert [str(file) for file in [*files, ROOT / "Makefile"] if leaning.search(file.read_text())] == []
