"""The bench of a card, tried on a CPU: it measures, each phase in a process of its own, and it names each fault that is planted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest

from loadtest.gpu.__main__ import arguments, main, read, run_apart
from loadtest.gpu.work import forward_work
from tests.model.builders import random_config

ROOT = Path(__file__).resolve().parents[3]


NEEDED = ("torch", "numpy", "safetensors", "triton")
IMPORTS = """
import pkgutil, sys
sys.modules |= dict.fromkeys({absent!r})  # an import of these raises ModuleNotFoundError
import loadtest.gpu
for module in pkgutil.iter_modules(loadtest.gpu.__path__, "loadtest.gpu."):
    __import__(module.name)
"""
Bench = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Runs it on the CPU at toy size; gives the exit code and the last line."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(ROOT)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = main(["--device", "cpu", "--tiny", "--out", str(tmp_path), *arguments])
        return code, json.loads(capsys.readouterr().out.splitlines()[-1])

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def with_what_they_need(names: tuple[str, ...]) -> set[str]:
    """These distributions and those that they require, without extras."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name not in found:
            found.add(name)
            with suppress(PackageNotFoundError):
                wanted = [one for one in requires(name) or () if "extra ==" not in one]
                waiting += [re.split(r"[^\w.-]", one)[0] for one in wanted]
    return found


def test_it_needs_torch_numpy_safetensors_and_triton_alone() -> None:
    present = with_what_they_need(NEEDED)
    absent = [
        name
        for name, owners in packages_distributions().items()
        if not present & {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners}
        and name not in ("app", "model", "weights", "loadtest")
    ]
    assert {"typer", "pydantic", "orjson"} <= set(absent)
    code = IMPORTS.format(absent=absent)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_phase_runs_in_its_own_process_and_leaves_figures(bench: Bench) -> None:
    code, report = bench("--geometries", "seed", "--phases", "peers")
    assert (code, report["problems"]) == (0, [])
    assert report["phases"] == {"peers seed": "ok"}
    assert any(name.endswith("dense definition, eager") for name in report["figures"])
    assert json.loads(Path(report["log"]).with_suffix(".json").read_text())["phases"] == report["phases"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_hanging_phase_is_ended_and_late_ones_are_left_out(bench: Bench) -> None:
    """After a problem a search for it follows; 20 of the seconds are kept for the results."""
    code, report = bench("--fault", "hang", "--phases", "bits", "--seconds", "28", "--phase-seconds", "7.5")
    assert code == 1
    (problem,) = report["problems"]
    assert problem.startswith("bits: hung: not done after 7.")
    assert report["phases"] == {"bits": problem.removeprefix("bits: "), "bisect": "left out"}


def test_a_phase_that_no_kill_ends_keeps_no_other_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that hangs in a driver. This one would end by itself after some seconds."""
    left: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: left.append(group))
    monkeypatch.setattr("loadtest.gpu.__main__.EXIT_SECONDS", 0.2)
    monkeypatch.chdir(ROOT)
    options = arguments(["--device", "cpu", "--tiny", "--log", str(tmp_path / "log.jsonl")])
    started = time.monotonic()
    try:
        assert run_apart(options, "environment", 0.5) == "hung: not done after 0.5 s"
        assert time.monotonic() - started < 3
        assert read(options.log) == [{"phase": "environment", "problem": "hung: not done after 0.5 s"}]
    finally:
        monkeypatch.undo()
        with suppress(ProcessLookupError):
            os.killpg(left[0], signal.SIGKILL)


def phase(name: str, log: Path, fault: str = "") -> tuple[int, list[dict[str, Any]]]:
    """Runs one, as the bench does in a process of its own; gives the exit code and what it wrote."""
    planted = ["--fault", fault] if fault else []
    return main(["--device", "cpu", "--tiny", "--run", name, "--log", str(log), *planted]), read(log)


@pytest.mark.slow
def test_a_sound_engine_differs_nowhere_and_is_timed(tmp_path: Path) -> None:
    code, (record,) = phase("environment", tmp_path / "environment.jsonl")
    assert code == 0
    assert record["bf16_tflops"] > 0 < record["copy_gb_per_s"]
    code, records = phase("kernels", tmp_path / "kernels.jsonl")
    assert (code, {record["different"] for record in records}) == (0, {0})
    code, records = phase("kernel_times", tmp_path / "times.jsonl")
    assert code == 0
    assert any(record["us"] > 0 for record in records)


@pytest.mark.parametrize(
    ("fault", "name", "said"),
    [
        ("kernel", "kernels", "gate in layer 0 (body), tile 1, row 70 differs from its definition, by 0.5"),
        ("product", "kernels", "gives other bits every time"),
        ("access", "kernels", "an illegal memory access was encountered (planted)"),
        ("access", "bisect", "an illegal memory access was encountered (planted)"),
    ],
)
def test_a_planted_fault_is_named(fault: str, name: str, said: str, tmp_path: Path) -> None:
    code, records = phase(name, tmp_path / "log.jsonl", fault)
    assert code == 1
    problems = [record["problem"] for record in records if "problem" in record]
    assert any(said in problem for problem in problems), problems


def test_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"phase": "bits"}\n{"phase": "par')
    assert read(log) == [{"phase": "bits"}]
    assert read(tmp_path / "none") == []


def test_a_cached_request_is_less_work_by_its_context() -> None:
    config = random_config()
    cold, cached = (forward_work(config, 38, 10, cached=cached) for cached in (False, True))
    assert 0 < cached.flops < cold.flops / 2
    assert cached.nbytes == cold.nbytes, "weights, and the keys and values that candidates read"
