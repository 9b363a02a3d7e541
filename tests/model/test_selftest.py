"""What a live engine is compared with at warm-up, and what is said of one that differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from model.batch import collate
from model.dense import DenseEngine, forward_on
from model.engine import EngineError, Item, Outcome
from model.native.engine import NativeEngine
from model.selftest import Definition, check_isolation
from model.tolerances import PARITY
from tests.model.builders import random_config, random_ranker, random_request


class Asked(DenseEngine):
    """Notes what it is asked for; `off` is added to all logits of the last of several requests."""

    off = 0.0

    def forward(self, items: Sequence[Item]) -> list[Outcome]:
        self.sizes = [(len(item.context), len(item.candidates)) for item in items]
        outcomes = super().forward(items)
        if self.off and len(items) > 1:
            last = outcomes[-1].scores
            outcomes[-1] = replace(outcomes[-1], scores=replace(last, logits=last.logits + np.float32(self.off)))
        return outcomes


def test_an_engine_is_checked_on_a_longest_and_an_empty_history() -> None:
    ranker = random_ranker(random_config(history_length=90))
    definition, engine = Definition(ranker), Asked(ranker, torch.float32)
    assert definition.check(engine) < 1e-5
    assert engine.sizes == [(90, 100), (0, 1)]
    allowed = PARITY[torch.float32].logits
    engine.off = 0.5 * allowed
    assert 0.4 * allowed < definition.check(engine) < 0.6 * allowed
    for off in (1.5 * allowed, float("nan")):
        engine.off = off
        with pytest.raises(EngineError, match=r"logits differ from the definition's by \S+, more than"):
            definition.check(engine)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 50), (torch.float32, 1000)])
def test_an_engine_may_differ_by_twice_the_loss_of_its_dtype(dtype: torch.dtype, factor: float) -> None:
    ranker = random_ranker(random_config())
    with torch.no_grad():
        ranker.heads.actions.weight.mul_(factor)  # large logits lose more than the tolerance
    definition, engine = Definition(ranker), Asked(ranker, dtype)
    worst, fixed = definition.check(engine), PARITY[dtype].logits
    assert worst > fixed
    engine.off = worst
    definition.check(engine)
    engine.off = 4 * worst + fixed
    with pytest.raises(EngineError, match="logits differ"):
        definition.check(engine)


def test_the_definition_is_computed_where_it_is_asked_for() -> None:
    """A layer at a time, so that neither the tables nor all layers need room there."""
    ranker = random_ranker(random_config(layers=3))
    context, candidates = random_request(ranker.config, 20, 5)
    batch = collate([(context, candidates)], ranker.config)
    logits, continuous = forward_on(ranker, batch, torch.float32, torch.device("meta"))
    assert logits.is_meta
    assert continuous.shape == (1, 5, 3)
    assert not any(parameter.is_meta for parameter in ranker.parameters())
    here = forward_on(ranker, batch, torch.float32, torch.device("cpu"))
    assert torch.equal(here[0], ranker(batch)[0])


class Swayed(NativeEngine):
    """One score is off in company, or alone."""

    sways = "nothing"

    def forward(self, items: Sequence[Item]) -> list[Outcome]:
        outcomes = super().forward(items)
        in_company, alone = len(items) > 1, len(items) == 1 and len(items[0].candidates) == 1
        if {"others": in_company, "itself": alone}.get(self.sways):
            outcomes[0].scores.logits[0, 0] += 1e-6
        return outcomes


@pytest.mark.parametrize(
    ("among", "said"), [("others", "3 candidates in a batch and by"), ("itself", "candidate 0 of 3 in its list")]
)
def test_a_score_that_depends_on_its_company_is_seen(among: str, said: str) -> None:
    engine = Swayed(random_ranker(random_config()), torch.float32, threads=1)
    assert check_isolation(engine, (1, 5, 3)) == {"comparisons": 3 + 1 + 3 + 3, "different_bits": 0}
    engine.sways = among
    with pytest.raises(EngineError, match=said):
        check_isolation(engine, (3, 5))
