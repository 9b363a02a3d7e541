"""What runs before a model serves: a load that was given up stops, a refusal is a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.queue.loading import checkpoint_loader
from app.queue.runners import Steps
from app.settings import Settings
from model.engine import EngineError
from weights.errors import CheckpointError

DEMO = Path(__file__).parents[3] / "weights" / "demo"
CPU = Settings(device="cpu", threads=1)


def test_a_load_that_nobody_waits_for_stops_while_it_reads() -> None:
    steps = Steps()
    steps.stop()
    with pytest.raises(EngineError, match="the load was cancelled"):
        checkpoint_loader(CPU)(DEMO, steps)
    assert not steps.is_warming


def test_a_load_that_was_read_warms_up_and_describes_itself() -> None:
    steps = Steps()
    model = checkpoint_loader(CPU)(DEMO, steps)
    assert steps.is_warming
    assert model.changed_file() == ""
    manifest = model.served.manifest
    assert model.labels() == {
        "name": manifest.name,
        "version": manifest.version,
        "checkpoint": manifest.digest,
        "dtype": model.engine.info.dtype,
        "device": "cpu",
    }
    model.engine.close()


def test_a_directory_without_a_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        checkpoint_loader(CPU)(tmp_path, Steps())


@pytest.mark.parametrize("threads", [3, 5])
def test_without_a_compiler_any_number_of_threads_starts_in_fp32(threads: int) -> None:
    """The warm-up checks that no bit depends on the batch; numbers that do not divide the work evenly showed that some did."""
    settings = Settings(device="cpu", backend="torch", dtype="float32", threads=threads)
    checkpoint_loader(settings)(DEMO, Steps()).engine.close()
