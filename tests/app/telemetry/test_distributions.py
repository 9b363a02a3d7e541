"""Distribution of probabilities: what is counted is what was replied, and a reload loses nothing."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from app.telemetry import metrics, shadow
from app.telemetry.metrics import PROBABILITIES, ReplyProbabilities


def samples(*replies: tuple[tuple[str, ...], list[list[float]]]) -> dict[tuple[str, str], float]:
    registry, counted = CollectorRegistry(), ReplyProbabilities()
    registry.register(counted)
    for names, values in replies:
        counted.record(names, np.array(values, np.float32))
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            found[sample.labels["action"], sample.labels.get("le", sample.name.rpartition("_")[2])] = sample.value
    return found


def test_the_mean_over_candidates_is_counted_once_a_reply() -> None:
    found = samples((("like", "report"), [[0.2, 0.0], [0.6, 0.0]]))
    assert (found["like", "0.3"], found["like", "0.5"], found["like", "+Inf"]) == (0, 1, 1)
    assert found["report", "0.001"] == 1
    assert np.isclose(found["like", "sum"], 0.4)


def test_a_bucket_holds_its_upper_bound_and_the_last_holds_the_rest() -> None:
    found = samples((("a",), [[0.5]]), (("a",), [[np.nextafter(np.float32(0.5), np.float32(1))]]), (("a",), [[0.99]]))
    assert [found["a", bound] for bound in ("0.3", "0.5", "0.7", "0.9", "+Inf")] == [0, 1, 2, 2, 3]


SHARES = {
    "probabilities": PROBABILITIES,
    "padding": metrics.RATIOS,
    "distances": shadow.DISTANCES,
    "overlap": shadow.SHARES,
}
OTHERS = {"latency": metrics.LATENCY_SECONDS, "sizes": metrics.SIZES, "rows": metrics.ROWS, "seconds": shadow.SECONDS}


@pytest.mark.parametrize("name", SHARES | OTHERS)
def test_the_bounds_of_a_histogram_ascend_and_those_of_shares_stay_below_one(name: str) -> None:
    bounds = list((SHARES | OTHERS)[name])
    assert bounds == sorted(set(bounds))
    assert name in OTHERS or 0 <= bounds[0] < bounds[-1] < 1


def test_a_name_that_two_checkpoints_share_is_one_series() -> None:
    found = samples((("a", "b"), [[0.1, 0.2]]), (("b", "c"), [[0.4, 0.9]]))
    assert {action: found[action, "count"] for action in "abc"} == {"a": 1, "b": 2, "c": 1}
