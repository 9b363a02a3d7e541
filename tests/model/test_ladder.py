"""Each rung is reached by breaking the one above it, and no number that failed a check is served. Torch's kernels stand in for Triton's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.create import EngineOptions, create_engine
from model.dense import DenseEngine
from model.engine import EngineError, EngineInfo, Item
from model.split import engine as split_engine
from model.split.graphs import PlainRecorder
from model.split.kernels.contract import Step
from model.split.kernels.portable import PortableKernels
from model.split.ladder import TRIES, LadderEngine, Rung, Tried, cuda_rungs
from model.tolerances import PARITY
from tests.model.builders import random_config, random_ranker, random_request

CONFIG = random_config(layers=1, history_length=9)
NAMES = ["recorded", "plain", "dense"]


class Triton(PortableKernels):
    """Torch's kernels under Triton's name, with a planted fault."""

    def __init__(self, fault: str, plain: bool, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.fault, self.plain = fault, plain

    def choose(self, *arguments: Any) -> Any:
        if self.fault == "choice" and not self.plain:
            raise RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED")
        return super().choose(*arguments)

    def embed(self, *arguments: Any) -> None:
        if self.fault == "compilation":
            raise NameError("softmix is not defined")
        super().embed(*arguments)

    def gate(self, *arguments: Any, **options: Any) -> None:
        if self.fault == "dependent" and not self.plain:
            raise RuntimeError("programmatic dependent launch is not supported")
        if self.fault == "launch":
            raise RuntimeError("out of resource: shared memory")
        super().gate(*arguments, **options)

    def multiply(self, step: Step, x: Any, weight: Any, out: Any) -> None:
        super().multiply(step, x, weight, out)
        rows = step.rows
        if self.fault == "proof":
            out[1:rows] += 1e-3 * out[: rows - 1]
        if self.fault == "numbers" and weight.shape[1] == 32:  # the heads: the same wrong numbers whatever the batch
            out[:rows] += 0.01
        if self.fault == "not a number":
            out[:rows] *= torch.nan
        if self.fault == "device":
            raise EngineError("an illegal memory access was encountered", sticky=True)


class Recorder(PlainRecorder):
    """Records nothing well."""

    fault = ""

    def record(self, work: Any, step: Step) -> Any:
        if self.fault == "capture":
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.fault == "memory":
            raise torch.OutOfMemoryError("planted")
        replay = super().record(work, step)

        def disturbed(step: Step) -> None:
            replay(step)
            work.__self__.logits += 1e-6

        return disturbed if self.fault == "replay" else replay


@pytest.fixture
def climb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], LadderEngine]:
    """A ladder with a fault, on the CPU."""

    def make(fault: str) -> LadderEngine:
        def kernels(config: Any, weights: Any, dtype: Any, *, plain: bool) -> Triton:
            return Triton(fault, plain, config, weights.rope)

        monkeypatch.setattr(split_engine, "_fused_kernels", kernels)
        monkeypatch.setattr(Recorder, "fault", fault)
        ranker = random_ranker(CONFIG)
        rungs = cuda_rungs(ranker, torch.device("cpu"), torch.float32, "shared", 2**20, recorder=Recorder, capacity=64)
        info = EngineInfo("cpu", "float32", "torch", "shared", {})
        return LadderEngine(ranker, rungs, info, Tried(tmp_path / "kept", "this build"))

    return make


@pytest.mark.parametrize(
    ("fault", "steps", "reason"),
    [
        ("", 0, ""),
        ("choice", 1, "CUBLAS_STATUS"),
        ("dependent", 1, "dependent launch"),
        ("capture", 1, "capturing"),
        ("replay", 1, "when it is replayed"),
        ("memory", 1, "planted"),
        ("compilation", 2, "softmix"),
        ("launch", 2, "shared memory"),
        ("proof", 2, "isolation is broken"),
        ("numbers", 2, "differ from the definition"),
        ("not a number", 2, "not finite"),
    ],
)
def test_a_rung_is_reached_by_breaking_the_one_above(climb: Any, fault: str, steps: int, reason: str) -> None:
    engine = climb(fault)
    engine.warm_up()
    notes = engine.info.notes
    assert notes["rung"] == NAMES[steps]
    assert [step["rung"] for step in notes["steps_down"]] == NAMES[:steps]
    assert all(reason in step["reason"] for step in notes["steps_down"][-1:])
    item = Item(*random_request(CONFIG, 9, 70, seed=3))
    expected = DenseEngine(random_ranker(CONFIG), torch.float32).forward([item])[0].scores.logits
    found = engine.forward([item])[0].scores.logits
    assert np.abs(found - expected).max() <= PARITY[torch.float32].logits
    assert notes["difference_from_definition"] <= PARITY[torch.float32].logits
    served = engine._engine
    assert (served.cache_stats().entries > 0) == (steps < 2), "the definition keeps none"
    engine.close()
    assert not served.cache_stats().entries


def test_on_a_card_a_ladder_is_what_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card, asked = torch.device("cuda", 1), list[Any]()
    monkeypatch.setattr("model.create.find_device", lambda wanted: card)
    monkeypatch.setattr("model.create.shortage", lambda needed, device: "")
    monkeypatch.setattr("model.create.cache_budget", lambda wanted, device: (wanted, device))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr("model.split.ladder.cuda_rungs", lambda *given: asked.append(given) or [])
    ranker = random_ranker(CONFIG)
    engine: Any = create_engine(ranker, EngineOptions(dtype="float32", kernel_directory=tmp_path))
    assert (engine.info.device, engine.info.dtype, engine.info.backend) == ("cuda:1", "float32", "torch")
    assert asked == [(ranker, card, torch.float32, "shared", (EngineOptions().cache_bytes, card))]
    assert engine._tried._file == tmp_path / "rungs.json"


def test_the_definition_itself_is_the_last_rung_and_is_checked_too(climb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, *arguments: Any, **options: Any) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(PortableKernels, "norm", broken)
    engine = climb("")
    engine.warm_up()
    assert engine.info.notes["rung"] == "dense"
    assert engine.info.backend == "dense"
    assert len(engine.info.notes["steps_down"]) == 2
    engine = climb("")
    forward = DenseEngine.forward
    asked = []

    def wrong(self: Any, items: Any) -> Any:
        outcomes = forward(self, items)
        asked.append(self)
        for outcome in outcomes if len(asked) > 1 else []:
            outcome.scores.logits[0] += 1
        return outcomes

    monkeypatch.setattr(DenseEngine, "forward", wrong)
    with pytest.raises(EngineError, match="dense: EngineError: logits differ"):
        engine.warm_up()


def test_a_rung_in_which_the_device_was_lost_is_left_out_by_the_next_start(climb: Any) -> None:
    for rung in NAMES[:2]:
        with pytest.raises(EngineError, match=f"^{rung}: .*illegal memory access") as lost:
            climb("device").warm_up()
        assert lost.value.sticky
    engine = climb("device")
    engine.warm_up()
    assert engine.info.notes["rung"] == "dense"
    assert "delete" in engine.info.notes["steps_down"][0]["reason"]


def test_what_a_lost_device_says_is_shortened_and_memory_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: said.append("emptied"))
    monkeypatch.setattr("gc.collect", lambda: said.append("collected"))
    info, tried = EngineInfo("cpu", "float32", "torch", "shared", {}), Tried(None, "")

    class Failing:
        """Fails when it is warmed up."""

        def __init__(self, error: Exception) -> None:
            self.error = error

        def warm_up(self) -> None:
            raise self.error

        def close(self) -> None:
            said.append("closed")

    def climb(*errors: Exception) -> str:
        said.clear()
        rungs = [Rung(str(number), lambda error=error: Failing(error)) for number, error in enumerate(errors)]
        with pytest.raises(EngineError) as failed:
            LadderEngine(random_ranker(CONFIG), rungs, info, tried).warm_up()
        return str(failed.value)

    left = climb(ValueError(), RuntimeError("x" * 1000))
    assert left == "0: ValueError: no reason given; 1: RuntimeError: " + "x" * 486
    assert said == ["closed", "collected", "emptied"] * 2

    def lost() -> None:
        raise RuntimeError("gone")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    assert "the next start leaves it out" in climb(ValueError("first"), ValueError("second"))
    assert not said


def test_before_a_rung_serves_an_engine_knows_nothing(climb: Any, tmp_path: Path) -> None:
    engine = climb("")
    assert engine.context_of("handle", "caller") is None
    assert engine.cache_stats().entries == 0
    engine.close()
    engine.warm_up()
    assert engine.cache_stats() == engine._engine.cache_stats()
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o700
    assert "recorded" not in (tmp_path / "kept/rungs.json").read_text(), "it has ended"


def test_a_rung_is_left_out_after_starts_that_ended_in_it(tmp_path: Path) -> None:
    for _ in range(TRIES):
        assert (
            Tried(tmp_path, "a").begin("recorded") == ""
        )  # and the process is gone: a crash, or a hang that was killed
    assert str(tmp_path) in Tried(tmp_path, "a").begin("recorded")
    assert Tried(tmp_path, "a").begin("plain") == ""
    assert Tried(tmp_path, "another torch").begin("recorded") == ""
    Tried(tmp_path, "another torch").end()
    assert Tried(tmp_path, "another torch").begin("recorded") == ""
    (tmp_path / "rungs.json").write_text("[1")
    assert Tried(tmp_path, "a").begin("recorded") == ""
    assert Tried(None, "a").begin("recorded") == ""
    assert Tried(Path("/proc/nowhere"), "a").begin("recorded") == ""
