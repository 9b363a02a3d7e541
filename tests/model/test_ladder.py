"""Each rung is reached by breaking the one above it, and no number that failed a check is served. No card is needed: torch's kernels
on a CPU stand in for Triton's, and what a card does is said by stand-ins of torch's own functions.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.create import EngineOptions, create_engine
from model.dense import DenseEngine
from model.device import is_given_up
from model.engine import Engine, EngineError, EngineInfo, Item
from model.ranker import Ranker
from model.split.engine import SplitEngine
from model.split.kernels.portable import PortableKernels
from model.split.ladder import LadderEngine, Rung
from model.split.probe import Trial, examine, try_in_child, use_private_cache_if_needed
from model.tolerances import PARITY
from tests.model.builders import random_config, random_ranker, random_request

CONFIG = random_config(layers=1, history_length=130)
TRIAL = Trial(CONFIG, "cpu", "float32", "shared", "triton")
CARD = torch.device("cuda", 0)

CHILD = """
import sys, time
from model.split import probe
from model.split.engine import SplitEngine
from model.split.kernels.portable import PortableKernels

class Hanging(PortableKernels):
    def gate(self, *given):
        time.sleep(600)

class HangingTrial(probe.Trial):
    def engine(self, ranker):
        return SplitEngine(ranker, kernels=lambda c, w, d: Hanging(c, w.rope), capacity=192)

print("what a library prints is no answer", flush=True)
probe.main(HangingTrial if "hangs" in sys.argv else probe.Trial)
"""


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Path:
    script = tmp_path_factory.mktemp("child") / "child.py"
    script.write_text(CHILD)
    return script


def climb(*rungs: Rung) -> LadderEngine:
    return LadderEngine(random_ranker(CONFIG), rungs, EngineInfo("cpu", "float32", "torch", "shared", {}))


def plain(kernels: Any = "torch") -> Engine:
    return SplitEngine(random_ranker(CONFIG), kernels=kernels, capacity=192, cache_bytes=2**20)


@pytest.mark.slow
def test_a_rung_that_hangs_in_a_child_gives_way_to_the_next(child: Path) -> None:
    def probe() -> str:
        return try_in_child(TRIAL, (sys.executable, str(child), "hangs"), 120, 4)

    engine = climb(Rung("recorded", plain, probe), Rung("torch", plain))
    started = time.monotonic()
    engine.warm_up()
    assert time.monotonic() - started < 150
    notes = engine.info.notes
    assert notes["rung"] == "torch"
    reason = "the trial was not done after 4 s after it had compiled"
    assert notes["steps_down"] == [{"rung": "recorded", "reason": reason}]
    item = Item(*random_request(CONFIG, 130, 100, seed=3))
    expected = DenseEngine(random_ranker(CONFIG), torch.float32).forward([item])[0].scores.logits
    assert np.abs(engine.forward([item])[0].scores.logits - expected).max() <= PARITY[torch.float32].logits


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ("import os; os.kill(os.getpid(), 11)", "the trial's process ended by signal 11: it said nothing"),
        ("import sys; sys.exit('no room')", "the trial's process ended without a result: no room"),
        ("import time; time.sleep(600)", "the trial was not done after 3 s, compiling"),
    ],
)
def test_a_child_without_an_answer_is_ended_and_says_why(work: str, said: str, tmp_path: Path) -> None:
    program = f"import os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); {work}"
    assert try_in_child(TRIAL, (sys.executable, "-c", program), 3 if "sleep" in work else 60, 60) == said
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


class Miscompiled(PortableKernels):
    def compile(self, forward: Any) -> None:
        raise NameError("softmix is not defined")


class Miscounting(PortableKernels):
    """Other numbers of contexts of more than two blocks of keys, whatever else is in the batch."""

    def attend(self, step: Any, query: Any, key_value: Any, layer: int, out: Any) -> None:
        super().attend(step, query, key_value, layer, out)
        for first, count, request, place in step.host.tiles[: step.host.count("tiles")].tolist():
            if place < 0 and step.states[request].length > 128:
                out[first : first + count, ::2] *= 1.5


@pytest.mark.parametrize(
    ("kernels", "error", "said", "has_compiled"),
    [
        (Miscompiled, NameError, "softmix is not defined", False),
        (Miscounting, EngineError, "logits differ from the definition's by", True),
    ],
)
def test_a_trial_compiles_and_compares_with_the_definition(
    kernels: type[PortableKernels], error: type[Exception], said: str, has_compiled: bool
) -> None:
    class Broken(Trial):
        def engine(self, ranker: Ranker) -> SplitEngine:
            return SplitEngine(
                ranker, kernels=lambda config, weights, dtype: kernels(config, weights.rope), capacity=192
            )

    compiled: list[bool] = []
    with pytest.raises(error, match=said):
        examine(Broken(CONFIG, "cpu", "float32", "shared", "torch"), lambda: compiled.append(True))
    assert compiled == [True] * has_compiled


@pytest.mark.slow
def test_a_rung_that_passes_in_a_child_is_not_tried_again(child: Path) -> None:
    asked: list[str] = []

    def probe() -> str:
        trial = Trial(CONFIG, "cpu", "float32", "shared", "torch")
        asked.append(try_in_child(trial, (sys.executable, str(child)), 120, 120))
        return asked[-1]

    for _ in range(2):
        engine = climb(Rung("recorded", plain, probe), Rung("torch", plain))
        started = time.monotonic()
        engine.warm_up()
        assert engine.info.notes["rung"] == "recorded"
        assert engine.info.notes["steps_down"] == []
    assert asked == ["", ""]
    assert try_in_child(Trial(CONFIG, "cpu", "float32", "shared", "torch"), ("/nowhere",)) == ""
    assert time.monotonic() - started < 60


class Wrong(PortableKernels):
    """The same wrong numbers whatever the batch, for these weights alone."""

    def multiply(self, step: Any, x: Any, weight: Any, out: Any) -> None:
        super().multiply(step, x, weight, out)
        if weight.shape[1] == 32:
            out[: step.rows] += 0.01


def test_a_way_that_fails_in_the_server_itself_is_left_too() -> None:
    """A trial has random weights: what the checkpoint's own lead to is seen here."""
    here = torch.device("cpu")
    wrong = Rung("recorded", lambda: plain(lambda *given: Wrong(given[0], given[1].rope)), device=here)
    engine = climb(wrong, Rung("torch", plain, device=here))
    engine.warm_up()
    assert engine.info.notes["rung"] == "torch"
    assert "logits differ from the definition's" in engine.info.notes["steps_down"][0]["reason"]
    assert engine.info.notes["difference_from_definition"] <= PARITY[torch.float32].logits
    engine.forward([Item(*random_request(CONFIG, 9, 5))])
    assert engine.cache_stats().entries == 1
    engine.close()
    assert engine.cache_stats().entries == 0


def test_a_device_lost_at_the_start_leaves_it_to_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    lost: list[bool] = []

    def synchronize(device: Any = None) -> None:
        if lost:
            raise RuntimeError("CUDA error: device-side assert triggered")

    def fails() -> Engine:
        lost.append(True)
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: synchronize())
    engine = climb(Rung("recorded", fails, device=CARD), Rung("torch", fails, device=CARD), Rung("cpu", plain))
    engine.warm_up()
    reasons = [step["reason"] for step in engine.info.notes["steps_down"]]
    assert engine.info.notes["rung"] == "cpu"
    assert reasons == ["AcceleratorError: CUDA error: device-side assert triggered", "this process has lost the device"]


def test_a_card_where_no_rung_passes_is_given_up() -> None:
    here = torch.device("cpu")

    def fails() -> Engine:
        raise RuntimeError("planted")

    assert not is_given_up(here)
    climb(Rung("torch", fails, device=here), Rung("cpu", plain)).warm_up()
    assert is_given_up("cpu:0")
    climb(Rung("torch", plain, device=here), Rung("cpu", plain)).warm_up()  # such as a reload
    assert not is_given_up(here)


@pytest.mark.slow
def test_an_unkillable_child_keeps_no_start_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that hangs in a driver."""
    monkeypatch.setattr(os, "killpg", lambda group, number: None)
    started = time.monotonic()
    hung = (sys.executable, "-c", "import time; time.sleep(20)")
    trial = Trial(CONFIG, "cpu", "bfloat16", "shared", "triton")
    assert try_in_child(trial, hung, 0.5, 0.5) == "the trial was not done after 0.5 s, compiling"
    assert time.monotonic() - started < 15


def test_when_no_way_passes_every_reason_is_said() -> None:
    def fails(error: Exception) -> Callable[[], Engine]:
        def build() -> Engine:
            raise error

        return build

    engine = climb(Rung("recorded", fails(ValueError())), Rung("cpu", fails(RuntimeError("x" * 1000))))
    with pytest.raises(EngineError) as failed:
        engine.warm_up()
    assert str(failed.value) == "recorded: ValueError: no reason given; cpu: RuntimeError: " + "x" * 486
    assert engine.context_of("handle", "caller") is None
    assert engine.cache_stats().entries == 0
    engine.close()


class Card:
    """Torch sees one. `trials` are those that were asked of a child, each answered with `answer`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: str = "") -> None:
        self.trials: list[Trial] = []
        self.free = 40 * 2**30
        self.questions = 0  # of this process

        def asked(device: Any = None) -> tuple[int, int]:
            self.questions += 1
            return self.free, 80 * 2**30

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", asked)
        monkeypatch.setattr("model.split.probe.try_in_child", lambda trial: (self.trials.append(trial), answer)[1])


def test_a_card_without_memory_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has next to nothing free, also after a trial that passed, as at a reload."""
    card, ranker = Card(monkeypatch), random_ranker(CONFIG)
    card.free = 2**18
    with pytest.raises(EngineError, match=r"recorded: .* does not fit: .* of memory are needed, and 0 MiB are free"):
        create_engine(ranker, EngineOptions(backend="torch")).warm_up()
    engine = create_engine(ranker, EngineOptions())
    engine.warm_up()
    assert len(engine.forward([Item(*random_request(CONFIG, 9, 5))])[0].scores) == 5
    assert engine.info.notes["rung"] == "cpu"
    assert all("does not fit" in step["reason"] for step in engine.info.notes["steps_down"])


def test_a_trial_without_room_for_the_checkpoint_ends_at_once() -> None:
    compiled: list[bool] = []
    with pytest.raises(EngineError, match=r"does not fit: 1073741824.0 GiB of memory are needed"):
        examine(replace(TRIAL, needed_bytes=2**60), lambda: compiled.append(True))
    assert not compiled


def test_memory_that_torch_keeps_for_later_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    card, ranker = Card(monkeypatch), random_ranker(CONFIG)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(card, "free", 2**30))
    card.free = 2**18
    engine = create_engine(ranker, EngineOptions())
    engine.warm_up()
    reasons = [step["reason"] for step in engine.info.notes["steps_down"]]
    assert not [reason for reason in reasons if "does not fit" in reason]


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_no_card_is_asked_anything_before_a_trial_passed(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that hangs would hang the start."""
    card = Card(monkeypatch, "the trial was not done after 240 s, compiling")
    engine = create_engine(random_ranker(CONFIG), EngineOptions(backend=backend))
    with nullcontext() if backend == "auto" else pytest.raises(EngineError, match="recorded: the trial was not done"):
        engine.warm_up()
    assert [trial.kernels for trial in card.trials] == ["triton", "torch"][: 2 if backend == "auto" else 1]
    assert card.questions == 0


@pytest.mark.parametrize("tables", [torch.float32, torch.bfloat16])
def test_a_trial_has_tables_of_the_checkpoints_dtype(tables: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that reads them is another one for each."""
    card, ranker = Card(monkeypatch, "planted"), random_ranker(CONFIG)
    ranker.tables.to(tables)
    create_engine(ranker, EngineOptions()).warm_up()
    trial = Trial.from_json(card.trials[0].to_json())
    assert trial == card.trials[0]
    assert replace(trial, device="cpu").ranker().tables.dtype() == tables


@pytest.mark.parametrize("home", [None, "/proc/nowhere"])
def test_without_a_home_kernels_go_to_a_temporary_directory(home: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", home) if home else monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path.replace("~", home) if home else path)
    use_private_cache_if_needed()
    kept = Path(os.environ["TRITON_CACHE_DIR"])
    assert kept.is_dir()
    assert os.access(kept, os.W_OK)
    use_private_cache_if_needed()
    assert os.environ["TRITON_CACHE_DIR"] == str(kept)
    monkeypatch.delenv("TRITON_CACHE_DIR")
