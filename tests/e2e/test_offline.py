"""The scores of a log, offline, are the replies of the service to the same requests with the same events, bit for bit."""

from __future__ import annotations

import httpx
import numpy as np
import pytest

pytest.importorskip("pyarrow")

from loadtest.server import DEMO
from model.create import EngineOptions
from tests.weights.lab.scoring.test_scorer import as_table
from tests.weights.lab.training.small_run import WORLD, exact_body
from weights.checkpoint import load_checkpoint
from weights.lab.scoring.scorer import Scorer
from weights.lab.training.examples import Examples
from weights.lab.training.log import log_of
from weights.lab.world.simulate import simulate


@pytest.mark.slow
def test_offline_and_online_give_the_same_bits(client: httpx.Client) -> None:
    table = as_table(simulate(WORLD))
    scorer = Scorer(load_checkpoint(DEMO), EngineOptions(threads=1))
    examples, scored = Examples(log_of(table, "log"), scorer.manifest.config), scorer.score_table(table)
    scorer.close()
    offline = {name: scored[name].to_numpy() for name in scored.schema.names}
    compared = 0
    assert len(scored) == len(table)
    assert len(set(scored["score"].to_pylist())) > len(table) / 2
    for index in range(0, len(examples), 41):
        rows = examples.rows(index)
        reply = client.post("/rank", json=exact_body(examples, index) | {"reply": "columns"}).json()["candidates"]
        probabilities, score = np.array(reply["probabilities"], np.float32), np.array(reply["score"])
        order = np.lexsort((score, np.array(reply["post_id"], np.uint64)))
        rows = rows[np.lexsort((offline["score"][rows], offline["post_id"][rows]))]  # one post may be shown twice
        assert score[order].tobytes() == offline["score"][rows].tobytes()
        dwell = np.array(reply["continuous"]["dwell_time"], np.float32)
        assert dwell[order].tobytes() == offline["dwell_time"][rows].tobytes()
        for column, name in enumerate(scorer.manifest.action_names):
            assert probabilities[order, column].tobytes() == offline[f"p.{name}"][rows].tobytes()
        compared += len(rows)
    assert compared > 200
