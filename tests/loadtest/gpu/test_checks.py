"""`make bench-gpu` with tiny shapes on a CPU: every part of the script runs, and its checks can fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loadtest.gpu import checks, phases
from loadtest.gpu.__main__ import RESERVED, Stop, arguments, leave, main, read, run_apart, summary, write
from loadtest.gpu.card import Card
from loadtest.gpu.checks import equal_bits, make_engine, parity, small_config
from loadtest.gpu.peers import PeerRanker, dense_eager
from loadtest.gpu.phases import all_phases
from loadtest.gpu.table import COUNTS, TARGETS_MS, Geometry
from loadtest.gpu.watch import HARDWARE, WatchedKernels, _first
from loadtest.gpu.work import forward_work
from model.engine import Item
from model.ranker import Ranker
from model.split.engine import SplitEngine
from model.split.kernels.portable import PortableKernels
from model.synthetic import random_ranker, random_request
from model.tolerances import PARITY
from tests.zygote import forked, zygote

ROOT = Path(__file__).resolve().parents[3]
TINY = Card(torch.device("cpu"), tiny=True)
BENCH = [sys.executable, "-c", "import runpy; runpy.run_module('loadtest.gpu', run_name='__main__', alter_sys=True)"]


def phase(name: str, directory: Path, fault: str = "") -> tuple[int, list[dict[str, Any]]]:
    """One phase as the bench runs it, but in this process: its exit code and records."""
    directory.mkdir(exist_ok=True)
    log = directory / "log.jsonl"
    planted = ["--fault", fault] if fault else []
    code = main(["--device", "cpu", "--tiny", "--run", name, "--log", str(log), *planted])
    return code, read(log)


def bench(directory: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The whole bench, or what the options leave of it."""
    command = [sys.executable, "-m", "loadtest.gpu", "--device", "cpu", "--tiny", "--out", str(directory), *options]
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # as a shell may still have it
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment)
    return finished.returncode, json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_whole_bench_runs_with_tiny_shapes(tmp_path: Path) -> None:
    code, report = bench(tmp_path, "--geometries", "mini")
    assert (code, report["ok"], report["measured_on"]) == (0, True, "cpu"), report
    assert set(report["phases"].values()) == {"ok"}
    records = read(Path(report["log"]))
    assert {record["phase"] for record in records} == set(all_phases(["mini"]))
    assert all(record["commit"] and record["torch"] == torch.__version__ for record in records)
    names = [record["name"] for record in records if "figure" in record]
    assert len(names) == len(set(names)), names
    assert {"mini C=26 cold", "mini C=40 cached", "mini C=26: dense definition, eager"} <= set(names)
    assert main(["compare", report["log"], report["log"]]) == 0


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("fault", "phases", "named"),
    [
        ("kernel", ["kernels"], "kernels: gate in layer 0 (body), tile 1, row 70 differs from its definition"),
        ("product", ["products"], "products: 64x96 of 64 rows as 64x64 gives other bits every time"),
        ("access", ["parity"], "bisect: RuntimeError: gate in layer 0: CUDA error: an illegal memory access"),
        ("hang", ["products", "kernel_times"], "products: hung: not done after 60 s"),
    ],
)
def test_the_bench_names_a_planted_fault_in_its_last_line(
    fault: str, phases: list[str], named: str, tmp_path: Path
) -> None:
    code, report = bench(tmp_path, "--fault", fault, "--phase-seconds", "60", "--phases", *phases)
    assert (code, report["ok"], report["fault"]) == (1, False, fault)
    assert any(problem.startswith(named) for problem in report["problems"]), report
    assert list(report["phases"]) == [*phases, "bisect"]
    assert fault != "hang" or report["phases"]["kernel_times"] == "ok", "others still run"


def test_a_bench_that_is_stopped_still_says_what_it_has(tmp_path: Path) -> None:
    command = [*BENCH, "--device", "cpu", "--tiny", "--out", str(tmp_path), "--fault", "hang", "--phases"]
    reading, writing = os.pipe()
    with open(writing, "w") as output:
        running = zygote.begin([*command, "environment", "products"], output)
    with open(reading) as told:
        assert told.readline().startswith("environment")  # the next phase hangs
        running.terminate()
        last = json.loads(told.read().splitlines()[-1])  # no phase lives on with its output
    assert (running.wait(60), last["ok"]) == (143, False)
    assert last["phases"] == {"environment": "ok", "products": "stopped"}


@pytest.mark.parametrize(
    ("fault", "name", "named"),
    [
        ("kernel", "kernels", "gate in layer 0 (body), tile 1, row 70 differs from its definition"),
        ("product", "products", "gives other bits every time"),
        ("product", "bisect", "multiply in layer 0 (body), tile 0, row 5 gives other bits every time"),
        ("kernel", "bits", "isolation is broken"),
    ],
)
def test_a_planted_fault_is_named(fault: str, name: str, named: str, tmp_path: Path) -> None:
    code, records = phase(name, tmp_path, fault)
    problems = [record["problem"] for record in records if "problem" in record]
    assert code == 1
    assert named in problems[0]
    assert all(record["phase"] == name for record in records)
    if name == "bits":
        assert [record["different"] for record in records if record.get("without")] == [0], "not of ours"


def test_an_illegal_access_is_named_by_where_it_happens_once_launches_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, records = phase("bisect", tmp_path / "a", "access")
    assert "multiply in layer" in records[-1]["problem"], "without blocking the next operation is blamed"
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    _, records = phase("bisect", tmp_path / "b", "access")
    assert "gate in layer 0" in records[-1]["problem"]
    assert "illegal memory access" in records[-1]["problem"]


def test_a_phase_that_hangs_or_dies_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The phases are short scripts here: what is tested is how the bench takes their ends."""
    ends = {"environment": "import os; os.kill(os.getpid(), 11)", "products": "import time; time.sleep(60)", "bisect": "",
            "bits": "print('\\nboom', file=__import__('sys').stderr); raise SystemExit(3)"}  # fmt: skip
    popen = subprocess.Popen

    def begin(command: list[str], **options: Any) -> Any:
        name = command[command.index("--run") + 1]
        assert bool(options["env"].get("CUDA_LAUNCH_BLOCKING")) == (name == "bisect")
        return popen([sys.executable, "-c", ends[name]], **options)

    monkeypatch.setattr("loadtest.gpu.__main__.subprocess.Popen", begin)
    options = arguments(["--device", "cpu", "--tiny"])
    options.log = tmp_path / "log.jsonl"
    found = {name: run_apart(options, name, 3) for name in ("environment", "products", "bits")}
    assert found == {
        "environment": "died by signal 11: no word",
        "products": "hung: not done after 3 s",
        "bits": "failed: boom",
    }
    assert run_apart(options, "bisect", 3, CUDA_LAUNCH_BLOCKING="1") == "ok"
    report = summary(options, found, 1.0)
    assert not report["ok"]
    assert len(report["problems"]) == 3


def test_the_first_figures_come_within_560_seconds_from_an_empty_cache() -> None:
    phases = all_phases(["mini", "seed", "flagship", "nano"])
    first = ["environment", "compile", "rows mini", "rows flagship"]
    assert list(phases)[:7] == [*first, "kernels", "parity", "products"]
    assert sum(phases[name].seconds for name in first) <= 560 - RESERVED
    assert list(phases)[-4:] == [f"peers {name}" for name in ("mini", "seed", "flagship", "nano")]


def test_no_phase_runs_beyond_the_time_that_is_left_and_each_leaves_a_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted time: the phases are scripts here, one of which sleeps, and begins a process that would go on."""
    popen, begun = subprocess.Popen, []
    seen: list[dict[str, str]] = []
    sleeps = (
        "import subprocess, sys, time; c = subprocess.Popen(['sleep', '60']); print(c.pid, flush=True); time.sleep(60)"
    )

    def begin(command: list[str], **options: Any) -> Any:
        name = command[command.index("--run") + 1]
        seen.extend(json.loads(each.read_text())["phases"] for each in tmp_path.glob("*.json"))
        hangs = name == "rows mini"
        child = popen([sys.executable, "-c", sleeps if hangs else ""], **options, stdout=subprocess.PIPE)
        begun.extend([int(child.stdout.readline())] if hangs else [])
        return child

    monkeypatch.setattr("loadtest.gpu.__main__.subprocess.Popen", begin)
    started = time.monotonic()
    given = ["--device", "cpu", "--tiny", "--out", str(tmp_path), "--seconds", str(RESERVED + 4)]
    assert main([*given, "--phases", "environment", "compile", "rows mini", "rows flagship", "kernels"]) == 1
    assert time.monotonic() - started < RESERVED + 4
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    ends = {name: end.split(":")[0] for name, end in report["phases"].items()}
    assert ends == {
        "environment": "ok", "compile": "ok", "rows mini": "hung", "rows flagship": "left out", "kernels": "left out",
        "bisect": "left out",
    }  # fmt: skip
    assert [each["environment"] for each in seen] == ["ok", "ok"], "a summary lies there before the next phase begins"
    left = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert left["phases"] == report["phases"]
    assert report["command"] is not None
    for _ in range(50):  # its parent is gone, and whoever adopts it may take a moment
        state = Path(f"/proc/{begun[0]}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("what a phase began lives on")


def test_the_compiled_kernels_are_packed_beside_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, out = tmp_path / "cache", tmp_path / "kept"
    (cache / "ABC").mkdir(parents=True)
    (cache / "ABC" / "kernel.cubin").write_bytes(b"code")
    out.mkdir()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setenv("OUT", str(out))
    options = arguments(["--device", "cuda"])
    assert options.out == out
    options.log = out / "gpu-1.jsonl"
    leave(options, {"ok": False})
    with tarfile.open(out / "triton-cache.tar.gz") as packed:
        assert "./ABC/kernel.cubin" in packed.getnames()
    written = (out / "triton-cache.tar.gz").stat().st_mtime_ns
    leave(options, {"ok": True})
    assert (out / "triton-cache.tar.gz").stat().st_mtime_ns == written, "nothing new"
    assert json.loads((out / "gpu-1.json").read_text()) == {"ok": True}


def test_a_warm_start_reads_what_a_cold_one_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    context = forked(phases.__name__, "model.split.kernels.build")  # two starts import what one does
    monkeypatch.setattr(phases, "get_context", lambda _: context)
    code, (cold, warm) = phase("starts", tmp_path)
    assert code == 0
    assert cold["binaries"] == warm["binaries"] > 0
    assert warm["processor_seconds"] < cold["processor_seconds"]
    assert (cold["start"], cold["readings"], cold["sizes"]) == ("cold", warm["readings"], warm["sizes"])


def test_a_floor_counts_all_bytes_of_a_weight_and_one_real_request(tmp_path: Path) -> None:
    code, records = phase("kernel_times", tmp_path)
    assert code == 0
    by_kind = {
        kind: {each["operation"]: each for each in records if each["kind"] == kind} for kind in ("cold", "cached")
    }
    assert {"embed", "attend", "norm", "gate_value", "qkv"} < set(by_kind["cold"])
    assert {each["rows"] for each in by_kind["cold"].values()} == {64}
    assert {each["rows"] for each in by_kind["cached"].values()} == {64}
    assert all(each["us"] > 0 and each["floor_us"] > 0 for each in records)


def test_fp32_attention_is_not_blamed_for_what_the_hardware_rounds() -> None:
    one, near = torch.ones(2, 4), torch.ones(2, 4)
    near[1, 1] += 1e-4
    asked: dict[str, Any] = {"dtypes": [torch.float32]}
    assert _first([near], [near], [one], **asked, least=HARDWARE) is None
    assert _first([near], [near], [one], **asked, least=0.0) is not None
    near[1, 1] += 1e-3
    assert _first([near], [near], [one], **asked, least=HARDWARE) is not None


def test_two_files_are_compared_and_a_new_problem_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before.jsonl", tmp_path / "after.jsonl"
    write(before, {"name": "mini C=64 cold", "figure": 0.2, "unit": "ms"})
    write(before, {"name": "gone", "figure": 1.0, "unit": "ms"})
    write(after, {"name": "mini C=64 cold", "figure": 0.1, "unit": "ms"})
    assert main(["compare", str(before), str(after)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report == {"ratios": {"mini C=64 cold": 0.5}, "missing": ["gone"], "new": [], "new_problems": []}
    write(after, {"phase": "kernels", "problem": "gate differs"})
    with after.open("a") as file:
        file.write('{"name": "cut of')  # a process that was killed
    assert main(["compare", str(before), str(after)]) == 1
    assert main(["compare", str(before)]) == 2


def test_without_a_card_nothing_is_claimed() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card here")
    finished = zygote.run(BENCH)
    assert finished.returncode == 2
    assert "nothing was measured" in finished.stderr
    report = json.loads(finished.stdout)
    assert (report["ok"], report["measured_on"], report["phases"]) == (False, None, {})


@pytest.mark.filterwarnings(
    "ignore:flex_attention called without:UserWarning"
)  # compiled on cards alone; here are its numbers
def test_the_peers_compute_what_the_engine_computes() -> None:
    ranker = random_ranker(small_config(width=64, layers=2, head_width=16))
    item = Item(*random_request(ranker.config, 30, 17))
    dense = dense_eager(ranker, item, TINY, torch.float32)()[0]
    flex = PeerRanker(ranker, item, TINY, torch.float32, "flex")
    torch.testing.assert_close(flex.forward(flex.mask())[0], dense, atol=2e-4, rtol=0)
    uncapped = Ranker(replace(ranker.config, attention_cap=None)).requires_grad_(False)
    uncapped.load_state_dict(ranker.state_dict())
    sdpa = PeerRanker(uncapped, item, TINY, torch.float32, "sdpa")
    without = dense_eager(uncapped, item, TINY, torch.float32)()[0]
    torch.testing.assert_close(sdpa.forward(sdpa.mask())[0], without, atol=2e-4, rtol=0)
    assert (without - dense).abs().max() > 5e-4, "the cap would be seen"
    ours = make_engine(ranker, TINY, torch.float32).forward([item])[0].scores.logits
    torch.testing.assert_close(torch.from_numpy(ours), dense, atol=2e-4, rtol=0)


def test_wrong_scores_fail_the_parity_check(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = make_engine

    def biased(ranker: Any, card: Card, dtype: torch.dtype, **options: Any) -> SplitEngine:
        engine = honest(ranker, card, dtype, **options)
        engine._trunk.weights.heads.mul_(1.2)
        return engine

    config = small_config(width=64, layers=1, head_width=16)
    assert parity(TINY, config, torch.float32) <= PARITY[torch.float32].logits
    monkeypatch.setattr(checks, "make_engine", biased)
    with pytest.raises(AssertionError, match="logits differ by"):
        parity(TINY, config, torch.float32)


class Rounded(PortableKernels):
    """Tokens as exact as bf16 products leave them."""

    def embed(self, step: Any, tables: Any, tokens: Any, residual: Any) -> None:
        super().embed(step, tables, tokens, residual)
        residual.copy_(residual.bfloat16())


def test_tokens_are_held_to_the_dtype_of_the_engine() -> None:
    config = small_config(width=64, layers=1, head_width=16)
    for dtype, found in ((torch.bfloat16, []), (torch.float32, ["embed"])):
        engine = make_engine(random_ranker(config), TINY, dtype, warm=False)
        plain = PortableKernels(config, engine._trunk.weights.rope)
        watched = WatchedKernels(Rounded(config, plain.rope), plain, config.layers)
        engine.run_through(watched, [Item(*random_request(config, 30, 17))])
        assert [each.operation for each in watched.found] == found


class Neighbourly(PortableKernels):
    """Every row takes a little of the one before it."""

    def multiply(self, step: Any, x: Any, weight: Any, out: Any) -> None:
        super().multiply(step, x, weight, out)
        out[1 : step.rows] += 1e-3 * out[: step.rows - 1]


def test_bits_that_depend_on_neighbours_are_found() -> None:
    engine = make_engine(random_ranker(small_config(width=64, layers=1, head_width=16)), TINY, cache_bytes=2**24)
    assert equal_bits(engine, 3)["different"] == 0
    engine._trunk.kernels = Neighbourly(engine.config, engine._trunk.weights.rope)
    engine._cache.clear()
    with pytest.raises(AssertionError, match="other bits than alone"):
        equal_bits(engine, 3)


@pytest.mark.parametrize("name", COUNTS)
def test_tiny_rows_have_names_of_their_own_and_no_targets(name: str) -> None:
    geometry = Geometry(name, TINY, TINY.ceilings())
    counts = [len(geometry.item(candidates).candidates) for candidates in COUNTS[name]]
    assert len(set(counts)) == len(counts)
    assert not any((name, count, kind) in TARGETS_MS for count in counts for kind in ("cold", "cached"))


def test_cached_work_is_the_candidates_alone() -> None:
    config = small_config()
    cold, cached = (forward_work(config, 97, 64, cached=cached) for cached in (False, True))
    assert forward_work(config, 97, 128, cached=True).flops == pytest.approx(2 * cached.flops)
    assert cold.flops > cached.flops
    assert forward_work(config, 0, 64, cached=False).flops == forward_work(config, 0, 64, cached=True).flops


def test_a_signal_while_a_phase_begins_ends_the_bench_and_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, begun = Stop(), []
    popen = subprocess.Popen

    def begin(*arguments: Any, **options: Any) -> Any:
        begun.append(popen([sys.executable, "-c", "import time; time.sleep(60)"], **options))
        stop(signal.SIGTERM, None)
        return begun[0]

    monkeypatch.setattr("loadtest.gpu.__main__.STOP", stop)
    monkeypatch.setattr("loadtest.gpu.__main__.subprocess.Popen", begin)
    options = arguments(["--device", "cpu", "--tiny"])
    options.log = Path(os.devnull)
    with pytest.raises(SystemExit) as ended:
        run_apart(options, "environment", 60)
    assert ended.value.code == 128 + signal.SIGTERM
    assert begun[0].returncode == -signal.SIGKILL
