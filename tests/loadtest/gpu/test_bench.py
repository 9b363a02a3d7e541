"""The bench of a card, tried on a CPU: it measures, each phase in a process of its own, and it names each fault that is planted."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.gpu.__main__ import main, read
from loadtest.gpu.work import forward_work
from tests.model.builders import random_config

ROOT = Path(__file__).resolve().parents[3]


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


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_phases_run_one_by_one_and_leave_figures_behind(bench: Bench) -> None:
    phases = ["environment", "kernels", "kernel_times", "peers mini"]
    code, report = bench("--geometries", "mini", "--phases", *phases)
    assert (code, report["problems"]) == (0, [])
    assert report["phases"] == dict.fromkeys(phases, "ok")
    assert any(name.endswith("dense definition, eager") for name in report["figures"])
    records = read(Path(report["log"]))
    assert next(record for record in records if "operations" in record)["different"] == 0
    assert any(record.get("us", 0) > 0 for record in records)
    assert json.loads(Path(report["log"]).with_suffix(".json").read_text())["phases"] == report["phases"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("fault", "phase", "said"),
    [
        ("kernel", "kernels", "gate in layer 0 (body), tile 1, row 70 differs from its definition, by 0.5"),
        ("product", "kernels", "gives other bits every time"),
        ("access", "kernels", "an illegal memory access was encountered (planted)"),
        ("hang", "bits", "hung: not done after"),
    ],
)
def test_a_planted_fault_is_named(bench: Bench, fault: str, phase: str, said: str) -> None:
    limit = ["--phase-seconds", "8"] if fault == "hang" else []
    code, report = bench("--fault", fault, "--phases", phase, *limit)
    assert code == 1
    assert any(said in problem for problem in report["problems"]), report["problems"]


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
