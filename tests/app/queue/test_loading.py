"""What runs before a model serves: a load that was given up stops, a refusal is a sentence."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from app.corpus.loading import corpus_loader
from app.queue.loading import checkpoint_loader
from app.queue.runners import Steps
from app.settings import Settings
from model.engine import EngineError
from tests.support import corpora
from weights.checkpoint import load_checkpoint, load_encoder, save_checkpoint
from weights.corpus.store import CorpusLabels, write_corpus
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


def threads_left_by(load: Callable[[], object], reason: str) -> int:
    """How many threads four refused loads leave. One before them starts those that the process keeps."""
    counts = []
    for _ in range(5):
        with pytest.raises(EngineError, match=reason):
            load()
        counts.append(len(os.listdir("/proc/self/task")))
    return counts[-1] - counts[0]


def test_a_checkpoint_that_fails_its_warm_up_leaves_no_threads(tmp_path: Path) -> None:
    demo = load_checkpoint(DEMO)
    with torch.no_grad():
        for name, parameter in demo.ranker.named_parameters():
            if name.startswith("heads.actions"):
                parameter.copy_(parameter.sign() * 2e38)
    labels = {"action_names": demo.manifest.action_names, "continuous": demo.manifest.continuous}
    save_checkpoint(tmp_path / "overflows", demo.ranker, name="overflows", **labels)
    load = checkpoint_loader(Settings(device="cpu", threads=4))
    assert threads_left_by(lambda: load(tmp_path / "overflows", Steps()), "not finite") == 0


def test_a_load_given_up_before_its_warm_up_leaves_no_threads() -> None:
    class GivenUp(Steps):
        def warming(self) -> None:
            super().warming()
            self.stop()

    load = checkpoint_loader(Settings(device="cpu", threads=4))
    assert threads_left_by(lambda: load(DEMO, GivenUp()), "the load was cancelled") == 0


def test_a_corpus_that_fails_its_warm_up_leaves_no_threads(tmp_path: Path) -> None:
    """It has vectors of other towers."""
    towers, _ = corpora.written(tmp_path)
    vectors = torch.nn.functional.normalize(torch.ones(2, 32), dim=1)
    columns = {"vectors": vectors, "post_ids": torch.tensor([1, 2]), "author_ids": torch.tensor([3, 4])}
    encoder = load_encoder(towers)
    labels = CorpusLabels("others", "v1")
    write_corpus(tmp_path / "others", labels, encoder, 2, ["post_ids", "author_ids"], lambda name: [columns[name]])
    load = corpus_loader(Settings(device="cpu", threads=4))
    refused = "does not hold the vectors of this retrieval checkpoint"
    assert threads_left_by(lambda: load(towers, tmp_path / "others", None), refused) == 0
