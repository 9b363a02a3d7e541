"""What a log says about rankers that did not choose its order is too good, and the estimates with propensities are not."""

from __future__ import annotations

import pytest

pytest.importorskip("duckdb")

from loadtest.loop.bias import OTHERS, biases
from loadtest.loop.settings import LoopSettings


def test_a_log_flatters_rankers_that_did_not_choose_its_order() -> None:
    found = biases(LoopSettings(users=120))
    assert found.keys() == OTHERS.keys()
    assert found["a better model"].truth > found["a worse model"].truth > found["a random order"].truth
    for name, bias in found.items():
        assert bias.resorted > bias.truth, name
        assert bias.snips.low <= bias.truth <= bias.snips.high, name
    assert found["a random order"].resorted > 1.4 * found["a random order"].truth
