"""Two processes take the step of one, to the bit of the plain definition; killed, they resume with the bits of a run left alone."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")

from safetensors.torch import load_file, save_file
from torch.distributed.run import config_from_args, get_args_parser

from model.batch import Batch
from model.ranker import Tables
from tests.weights.training.ranks import on_ranks
from tests.weights.training.small_run import TRAINING, small_config, small_trainer
from weights.training.examples import Examples, Labels, training_batch
from weights.training.log import Log
from weights.training.processes import Processes, ProcessesError, joined, mean_gradients
from weights.training.run import reproducible, train
from weights.training.settings import TrainSettings
from weights.training.state import STATE_NAME
from weights.training.trainer import Status
from weights.training.world.simulate import World

RUN = replace(TRAINING, epochs=0.5, init="unit", evaluate_every=8, validation_requests=40)
TOLERANCE = 1e-5  # relative, of a loss: other order of sums


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the losses by step, as in the processes that `on_ranks` begins."""
    monkeypatch.setattr("weights.training.run.draw_curve", lambda curve, path: None)


class Silent(Processes):
    """The fault: the gradients of the tables stay where they are."""

    def exchange(self, tables: Tables, batch: Batch) -> None:
        pass


def parts_of(examples: Examples, processes: int, case: str) -> list[tuple[Batch, Labels]]:
    """A batch in parts. Of the last, `padding` makes every row padding and every dwell unknown."""
    parts = []
    for rank in range(processes):
        batch, labels = training_batch(
            examples, np.arange(300, 316), np.random.default_rng(1), fresh_user_share=0.1, fresh_post_share=0.5,
            max_candidates=64, part=Processes(rank, processes).part(16),
        )  # fmt: skip
        if case == "padding" and rank == processes - 1:
            rows = {name: torch.zeros_like(getattr(batch, name)) for name in Batch.__slots__ if name.endswith("_rows")}
            batch, labels = replace(batch, **rows), replace(labels, dwelt=labels.dwelt & False, dwelt_weight=0.0)
        parts.append((batch, labels))
    return parts


CASES = {"requests": True, "padding": True, "silent": False}  # and whether the bits are equal


def backwards(processes: Processes, log: Log, out: Path) -> None:
    """Write the gradients of this process after the exchange, in each case."""
    examples = Examples(log, small_config())
    for case in CASES:
        trainer = small_trainer(examples, init="unit")
        objective = processes.distributed(trainer.plain)
        batch, labels = parts_of(examples, processes.size, case)[processes.rank]
        objective(batch, labels).backward()
        (Silent if case == "silent" else Processes).exchange(processes, trainer.ranker.tables, batch)
        found = {name: p.grad for name, p in trainer.ranker.named_parameters() if p.grad is not None}
        save_file(found, out / f"{case}-{processes.rank}.safetensors")


@pytest.fixture(scope="module")
def gradients(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes wrote, each in every case."""
    out = tmp_path_factory.mktemp("gradients")
    assert on_ranks(2, backwards, out / "ranks", world.log, out) == [0, 0]
    return out


@pytest.mark.parametrize(("case", "equal"), CASES.items())
def test_a_backward_of_two_processes_has_the_bits_of_the_plain_definition(
    case: str, equal: bool, examples: Examples, gradients: Path
) -> None:
    trainer = small_trainer(examples, init="unit")
    with reproducible(1):
        mean_gradients(trainer.plain, parts_of(examples, 2, case))
    expected = {name: p.grad for name, p in trainer.ranker.named_parameters() if p.grad is not None}
    for rank in range(2):
        found = load_file(gradients / f"{case}-{rank}.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found) == equal
    if case == "requests":  # and the plain definition is the gradient of the whole batch
        (whole,) = parts_of(examples, 1, case)
        mean_gradients(trainer.plain, [whole])
        for name, p in trainer.ranker.named_parameters():
            assert p.grad is not None
            assert torch.allclose(p.grad, expected[name], rtol=1e-4, atol=1e-6), name
        assert all(bool(expected[f"tables.{name}"].any()) for name in ("user", "post", "author"))


def a_run(
    processes: Processes, log: Log, settings: TrainSettings, state: Path, resume: bool = False, fault: str = ""
) -> None:
    """Train to the end, and write the weights of each rank; or to where `fault` is."""

    def report(status: Status) -> None:
        if fault == "rank 1 at step 13" and processes.rank == 1 and status.step == 13:
            os.kill(os.getpid(), signal.SIGKILL)

    if fault == "rank 0 while it saves" and processes.rank == 0:
        replace_file, saved = Path.replace, []

        def die_the_second_time(new: Path, old: Path) -> Path:
            saved.append(old.name == STATE_NAME)
            if sum(saved) == 2:
                os.truncate(new, new.stat().st_size // 2)  # not whole yet
                os.kill(os.getpid(), signal.SIGKILL)
            return replace_file(new, old)

        Path.replace = die_the_second_time  # type: ignore[assignment, method-assign]
    run = Silent(processes.rank, processes.size) if fault == "silent" else processes
    ranker = train(log, small_config(), settings, state=state, resume=resume, report=report, processes=run)
    save_file(ranker.state_dict(), state / f"rank-{processes.rank}.safetensors")


@pytest.fixture(scope="module")
def undisturbed(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state that two processes left at their end."""
    place = tmp_path_factory.mktemp("undisturbed")
    assert on_ranks(2, a_run, place / "ranks", world.log, RUN, place / "state") == [0, 0]
    return place / "state"


def test_two_processes_train_as_one_does(world: World, undisturbed: Path, tmp_path: Path) -> None:
    train(world.log, small_config(), RUN, state=tmp_path)
    alone, both = (load_file(path / STATE_NAME)["curve"] for path in (tmp_path, undisturbed))
    apart = ((alone - both).abs() / alone)[:, 1]
    assert len(alone) == len(both) >= 20
    assert float(apart.max()) < TOLERANCE
    assert bool((alone[:, 1] != both[:, 1]).any()), "sums in another order: to be equal to the bit would be a surprise"
    ranks = [load_file(undisturbed / f"rank-{rank}.safetensors") for rank in range(2)]
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in ranks[0])


@pytest.mark.parametrize("fault", ["rank 1 at step 13", "rank 0 while it saves"])
def test_a_run_whose_process_is_killed_resumes_to_the_same_bits(
    fault: str, world: World, undisturbed: Path, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    codes = on_ranks(2, a_run, tmp_path / "killed", world.log, RUN, state, False, fault)
    assert sorted(codes) == [-9, 1]
    assert on_ranks(2, a_run, tmp_path / "resumed", world.log, RUN, state, True) == [0, 0]
    for name in (STATE_NAME, "rank-0.safetensors", "rank-1.safetensors"):
        assert (state / name).read_bytes() == (undisturbed / name).read_bytes(), name


def test_a_run_resumes_with_another_number_of_processes(world: World, undisturbed: Path, tmp_path: Path) -> None:
    class Ended(Exception):
        pass

    def end(status: Status) -> None:
        if status.step == 9:
            raise Ended

    state = tmp_path / "state"
    with pytest.raises(Ended):
        train(world.log, small_config(), RUN, state=state, report=end)
    assert on_ranks(2, a_run, tmp_path / "ranks", world.log, RUN, state, True) == [0, 0]
    both, mixed = (load_file(path / STATE_NAME)["curve"][:, 1] for path in (undisturbed, state))
    assert float(((both - mixed).abs() / both).max()) < TOLERANCE


def test_torchrun_takes_the_command_of_the_page_as_it_is_meant() -> None:
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
    words = shlex.split(next(line for line in page.splitlines() if line.startswith("torchrun ")))
    config, _, arguments = config_from_args(get_args_parser().parse_args(words[1:]))
    assert config.nproc_per_node == 2
    module = words.index("weights")
    assert arguments[-len(words[module:]) - 1 :] == ["-m", *words[module:]]


def with_other_seeds(processes: Processes, log: Log) -> None:
    train(log, small_config(), replace(RUN, seed=processes.rank), processes=processes)


def with_other_logs(processes: Processes, log: Log) -> None:
    actions = log.actions.copy()
    actions[0] ^= processes.rank == 1
    train(replace(log, actions=actions), small_config(), RUN, processes=processes)


@pytest.mark.parametrize(("work", "reason"), [(with_other_seeds, "settings, weights"), (with_other_logs, "log")])
def test_processes_with_other_arguments_or_data_are_refused(
    work: Callable[..., None], reason: str, world: World, tmp_path: Path
) -> None:
    assert on_ranks(2, work, tmp_path / "ranks", world.log) == [1, 1]
    assert (
        f"the processes of this run differ in {reason}: all need the same"
        in (tmp_path / "ranks" / "error-1").read_text()
    )


def test_processes_that_cannot_share_a_batch_and_cards_that_are_not_there_are_refused() -> None:
    with pytest.raises(ProcessesError, match="3 processes cannot share a batch of 16 requests"):
        Processes(0, 3).part(16)
    if not torch.cuda.is_available():
        with pytest.raises(ProcessesError, match="needs a card"), joined("cuda"):
            pass


def test_processes_that_hold_different_weights_are_stopped_at_the_next_evaluation(world: World, tmp_path: Path) -> None:
    codes = on_ranks(2, a_run, tmp_path / "ranks", world.log, RUN, tmp_path / "state", False, "silent", anew=True)
    assert codes == [1, 1]
    assert "differ in weights at step 8" in (tmp_path / "ranks" / "error-1").read_text()
    # a thread of the group that is left may wait for the interpreter's lock while its end is waited for
    for rank in range(2):
        assert "gloo" not in (tmp_path / "ranks" / f"threads-{rank}").read_text()
