"""One score a candidate: the same bits whatever the batch, added action by action, equal ones in their order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from model.ranking import combine, order_of

unit = st.floats(0, 1, width=32)


@settings(max_examples=100, deadline=None)
@given(npst.arrays(np.float32, st.tuples(st.integers(1, 70), st.just(3)), elements=unit), st.data())
def test_a_score_does_not_depend_on_the_batch(probabilities: Any, data: st.DataObject) -> None:
    weights = np.array(data.draw(st.lists(st.floats(-1e9, 1e9), min_size=3, max_size=3)))
    together = combine(probabilities, weights)
    alone = np.concatenate([combine(probabilities[place : place + 1], weights) for place in range(len(probabilities))])
    assert together.tobytes() == alone.tobytes()
    order = np.random.default_rng(0).permutation(len(probabilities))
    assert combine(probabilities[order], weights).tobytes() == together[order].tobytes()


@pytest.mark.parametrize("count", [1, 2, 3, 8, 65])
def test_scores_are_added_action_by_action(count: int) -> None:
    for seed in range(30):  # a sum over one column alone is right by chance half of the time
        random = np.random.default_rng(seed)
        probabilities, weights = random.random((count, 19), dtype=np.float32), random.normal(size=19)
        added = [sum((float(p) * w for p, w in zip(row, weights, strict=True)), 0.0) for row in probabilities]
        assert combine(probabilities, weights).tolist() == added
    assert str(combine(np.zeros((2, 1), np.float32), np.array([-1.0]))) == "[0. 0.]"  # not -0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([0.0, -0.0, 0.25, 0.5]), min_size=1, max_size=20))
def test_equal_scores_keep_their_order(values: list[float]) -> None:
    assert order_of(np.array(values)).tolist() == sorted(range(len(values)), key=lambda place: -values[place])
