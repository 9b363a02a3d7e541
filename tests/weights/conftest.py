"""A small checkpoint; a small world and its examples, drawn once for all tests of training; and who scores its log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from weights.lab.scoring.scorer import Scorer
    from weights.lab.training.examples import Examples
    from weights.lab.world.simulate import World


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A small valid checkpoint, to be damaged."""
    from tests.weights.small import write_small

    write_small(tmp_path / "small", 5)
    return tmp_path / "small"


@pytest.fixture(scope="session")
def world() -> World:
    from tests.weights.lab.training.small_run import WORLD
    from weights.lab.world.simulate import simulate

    return simulate(WORLD)


@pytest.fixture(scope="session")
def examples(world: World) -> Examples:
    from tests.weights.lab.training.small_run import small_config
    from weights.lab.training.examples import Examples

    return Examples(world.log, small_config())


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    from model.create import EngineOptions
    from weights.checkpoint import load_checkpoint
    from weights.lab.scoring.scorer import Scorer

    scorer = Scorer(load_checkpoint("weights/demo"), EngineOptions(threads=1))
    yield scorer
    scorer.close()
