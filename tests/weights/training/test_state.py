"""An interrupted run continues with the same bits; a state of another run is refused."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")

from safetensors.torch import save_file

from tests.weights.training.small_run import small_trainer
from weights.training import state
from weights.training.examples import Examples
from weights.training.run import reproducible
from weights.training.state import STATE_NAME, StateError, load_state, save_state


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What is compared to the bit is computed as a run does."""
    with reproducible(1):
        yield


@pytest.mark.parametrize("dwell", ["known", "seldom known"])
def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(
    dwell: str, examples: Examples, tmp_path: Path
) -> None:
    if dwell == "seldom known":  # its head has no gradient in some steps, and has done fewer than the others
        log = examples.log
        seconds = np.where(log.request_id % 20 == 0, log.dwell_seconds, 0).astype(np.float32)
        examples = Examples(replace(log, dwell_seconds=seconds), examples.config)
    whole = small_trainer(examples, epochs=0.6)
    whole.run(lambda status: None, lambda current: None)
    part = small_trainer(examples, epochs=0.6)
    for _ in range(20):
        part.advance()
    part.evaluate()
    save_state(part, tmp_path)
    rest = small_trainer(examples, epochs=0.6)
    load_state(rest, tmp_path)
    assert rest.step == 20 < rest.steps
    rest.run(lambda status: None, lambda current: None)
    expected, got = whole.ranker.state_dict(), rest.ranker.state_dict()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    # control: without the moments of the optimiser the run ends elsewhere
    forgetful = small_trainer(examples, epochs=0.6)
    load_state(forgetful, tmp_path)
    forgetful.optimizer.state.clear()
    forgetful.run(lambda status: None, lambda current: None)
    assert not all(torch.equal(expected[name], forgetful.ranker.state_dict()[name]) for name in expected)


def test_a_state_of_another_run_or_build_is_refused(
    examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_trainer(examples)
    run.advance()
    run.evaluate()
    save_state(run, tmp_path)
    with pytest.raises(StateError, match="settings"):
        load_state(small_trainer(examples, seed=9), tmp_path)
    with pytest.raises(StateError, match="cannot be read"):
        load_state(run, tmp_path / "absent")
    (tmp_path / "foreign").mkdir()
    save_file({"weight": torch.zeros(1)}, tmp_path / "foreign" / state.STATE_NAME)  # of another program: no counters
    with pytest.raises(StateError, match="cannot be read"):
        load_state(run, tmp_path / "foreign")
    monkeypatch.setattr(state, "COUNTERS", (*state.COUNTERS, "new_counter"))
    with pytest.raises(StateError, match="new_counter"):
        load_state(run, tmp_path)


def test_a_full_disk_leaves_the_state_before_and_is_refused_in_a_sentence(examples: Examples, tmp_path: Path) -> None:
    trainer = small_trainer(examples, epochs=1)
    save_state(trainer, tmp_path)
    before = (tmp_path / STATE_NAME).read_bytes()
    trainer.advance()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(StateError, match=r"state\.safetensors cannot be written: .*File too large"):
            save_state(trainer, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / STATE_NAME).read_bytes() == before
