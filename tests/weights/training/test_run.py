"""A run is repeatable to the last bit and leaves torch's settings as they were."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("pyarrow")

from tests.weights.training.small_run import TRAINING, small_config
from weights.training.run import train
from weights.training.world.simulate import World


def test_the_same_run_twice_gives_the_same_bits_and_another_seed_does_not(world: World) -> None:
    states = [
        train(world.log, small_config(), replace(TRAINING, epochs=1, seed=seed)).state_dict() for seed in (1, 1, 2)
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_training_leaves_torch_as_it_was(world: World) -> None:
    threads, mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    train(world.log, small_config(), replace(TRAINING, epochs=0.1, threads=threads + 1))
    assert (torch.get_num_threads(), torch.get_deterministic_debug_mode()) == (threads, mode)
