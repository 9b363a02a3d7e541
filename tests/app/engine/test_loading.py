"""What runs before a model serves: a load that was given up stops, and a want of memory is a sentence."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from app.engine import loading
from app.engine.loading import Steps, checkpoint_loader
from app.settings import Settings
from loadtest.fuzz.checkpoints import write_small
from loadtest.soak.fake_engine import FakeEngine
from model.engine import EngineError

CPU = Settings(device="cpu", threads=1)
DEMO = Path(__file__).parents[3] / "weights" / "demo"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    write_small(tmp_path / "small", 5)
    return tmp_path / "small"


def test_a_load_that_nobody_waits_for_stops_while_it_reads(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    steps = Steps(lambda: told.append("warming"))
    steps.stop()
    with pytest.raises(EngineError, match="the load was cancelled"):
        checkpoint_loader(small, CPU)(steps)
    monkeypatch.setattr(steps, "go_on", lambda *_: None)  # the control: without looking, it goes on to the end
    assert checkpoint_loader(small, CPU)(steps).served.manifest.name == "small"
    assert told == ["warming"]


def test_a_load_stops_between_making_the_engine_and_warming_it_up(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, made = Steps(lambda: None), []

    def make(*arguments: Any) -> Any:
        steps.stop()
        made.append(arguments)
        return object()  # which cannot be warmed up

    monkeypatch.setattr(loading, "create_engine", make)
    with pytest.raises(EngineError, match="the load was cancelled"):
        checkpoint_loader(small, CPU)(steps)
    assert len(made) == 1


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("[enforce fail] cannot allocate\nmore")],
)
@pytest.mark.parametrize("where", ["load_checkpoint", "create_engine"])
def test_a_want_of_memory_or_threads_is_told_in_a_sentence(
    small: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(loading, where, fail)
    with pytest.raises(EngineError, match=r"small cannot be loaded: (not enough memory|CUDA out|\[enforce.*allocate$)"):
        checkpoint_loader(small, CPU)(Steps(lambda: None))


def test_a_way_of_computing_that_failed_its_checks_is_told(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, step = FakeEngine(), {"rung": "recorded", "reason": "no compiler"}
    engine.info.notes["steps_down"] = [step]
    monkeypatch.setattr(loading, "create_engine", lambda *_: engine)
    with structlog.testing.capture_logs() as lines:
        assert checkpoint_loader(small, CPU)(Steps(lambda: None)).steps_down() == 1
    assert [line for line in lines if step.items() <= line.items() and line["log_level"] == "warning"]


@pytest.mark.parametrize("stands_back", [False, True])
def test_the_threads_of_a_shadow_stand_back_behind_all_others(small: Path, stands_back: bool) -> None:
    """Of the kernel's own threads, as the system has them; none of those that were there before."""
    pytest.importorskip("model.native.kernel")

    def nice() -> dict[str, int]:
        found = {}
        for task in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):  # another one that ends meanwhile
                found[task.name] = os.getpriority(os.PRIO_PROCESS, int(task.name))
        return found

    before = nice()
    settings = Settings(device="cpu", threads=3, backend="native")
    model = checkpoint_loader(small, settings, stands_back=stands_back)(Steps(lambda: None))
    new = {task: value for task, value in nice().items() if task not in before}
    assert len(new) >= 2
    assert (max(new.values()) == loading.NICE) == stands_back
    assert all(before[task] == value for task, value in nice().items() if task in before)
    model.engine.close()


@pytest.mark.parametrize("threads", [3, 5, 6])
def test_without_a_compiler_a_machine_of_any_number_of_cores_starts_in_fp32(threads: int) -> None:
    """The warm-up checks that no bit depends on the batch; numbers that do not divide the work evenly showed that some did."""
    settings = Settings(device="cpu", backend="torch", dtype="float32", threads=threads)
    checkpoint_loader(DEMO, settings)(Steps(lambda: None)).engine.close()
