"""Counts of the history in training: a candidate is told of the events before its own request, as when it is served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from model.inputs import COUNT_EDGES
from model.ranker import Ranker
from tests.weights.call import call
from tests.weights.lab.training.small_run import small_config
from weights.checkpoint import load_manifest
from weights.lab.training import initial
from weights.lab.training.examples import Examples, HiddenShares
from weights.lab.training.log import write_log
from weights.lab.world.simulate import World

COUNTING = replace(small_config(), history_counts=True)
HIDDEN = HiddenShares(users=0.5, posts=0.5, authors=0.5, codes=0.5)


@pytest.mark.parametrize("levels", [0, 2])
def test_a_group_tells_each_candidate_of_its_own_past(world: World, levels: int) -> None:
    """Requests that share a context in training have the counts that each has by itself, whatever ids are hidden."""
    config = replace(COUNTING, code_levels=levels, code_values=9 * bool(levels))
    numbers = world.log.post_id.astype(np.int64)[:, None] // 8 ** np.arange(levels) % 9 + 1
    log = replace(world.log, codes=numbers)
    examples = Examples(log, config)
    of_user = np.flatnonzero(examples.users == examples.users[np.argmax(examples.history_lengths)])
    fitting = of_user[examples.last[of_user] - examples.first[of_user] <= config.history_length]
    group = fitting[-3:]
    assert len(set(examples.history_lengths[group])) > 1, "all of them have one past, so this shows little"
    batch, _, _ = examples.training_batch([group], np.random.default_rng(1), HIDDEN, 1000)
    alone = [examples.batch([request])[0].candidate_codes[0, :, levels:] for request in group.tolist()]
    assert batch.candidate_codes[0, :, levels:].tolist() == [row for part in alone for row in part.tolist()]
    assert sum(part.sum() for part in alone) > 0


def test_an_untrained_model_takes_more_for_more() -> None:
    """Rows of one count are multiples of one vector that grow with the count."""
    import torch

    ranker = Ranker(COUNTING)
    initial.upstream(ranker, torch.Generator().manual_seed(1))
    rows = ranker.tokens.code_table.detach().unflatten(0, (COUNTING.token_levels, COUNTING.token_values))
    lengths = rows.norm(dim=-1)
    assert (lengths.diff(dim=1) > 0).all()
    assert torch.allclose(rows[0] / lengths[0, :, None], rows[0, :1] / lengths[0, 0], atol=1e-5)
    assert COUNTING.token_values == len(COUNT_EDGES)


@pytest.mark.slow
def test_train_makes_a_model_that_counts(world: World, tmp_path: Path) -> None:
    write_log(tmp_path / "log.parquet", world.log)
    small = [word for name in ("width=16", "layers=1", "epochs=0.2", "history_counts=true") for word in ("--set", name)]
    trained = call("train", "--log", tmp_path / "log.parquet", "--out", tmp_path / "ranker", *small)
    assert trained.exit_code == 0, trained.output
    assert load_manifest(tmp_path / "ranker").config.history_counts
