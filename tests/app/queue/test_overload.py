"""L1 as a simulation: admission and batcher as they are, around an engine of 40 requests a second, in time that takes none."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from app.queue.admission import Admission
from app.queue.batching import Batcher, Chunk, Work
from app.queue.forecast import Running
from app.settings import Batching, Queue
from tests.support.fakes import FakeClock

FORWARD_SECONDS, BATCH, CANDIDATES, TOKENS = 0.1, 4, 16, 4
CAPACITY_RPS = BATCH / FORWARD_SECONDS
BATCHING = Batching(max_candidates=BATCH * CANDIDATES, chunk_candidates=BATCH * CANDIDATES)


@dataclass
class Outcome:
    """`p99` in forwards, from the arrival to the end; `goodput` as a share of the capacity, `refused` of what was asked."""

    p99: float
    goodput: float
    refused: float


def offer(multiple: float, seconds: float = 50.0, seed: int = 1, wait_forwards: float = 0.7) -> Outcome:
    """Poisson arrivals at a multiple of the capacity, where the longest wait is this part of a forward."""
    clock, draw = FakeClock(0.0), random.Random(seed)
    chunks: list[Chunk[Work]] = []
    began = 0.0

    def running() -> Running:
        return Running(len(chunks), len(chunks) * CANDIDATES, len(chunks) * TOKENS, clock() - began)

    queue = Queue(max_wait_seconds=wait_forwards * FORWARD_SECONDS)
    admission, batcher = Admission(queue, BATCHING, clock), Batcher[Work](BATCHING)
    admission.forward_time.observe(CANDIDATES + TOKENS, FORWARD_SECONDS)  # the row asks one by one before
    took: list[float] = []
    asked, arrival = 0, 0.0
    while arrival < seconds:
        ends = began + FORWARD_SECONDS if chunks else float("inf")
        clock.now = min(arrival, ends)
        if ends <= arrival:
            for chunk in chunks:
                took.append((ends - chunk.job.arrived) / FORWARD_SECONDS)
                admission.remove(chunk.job)
            admission.forward_time.observe(sum(chunk.cost for chunk in chunks), FORWARD_SECONDS)
            chunks = []
        else:
            asked += 1
            job = Work(candidates=CANDIDATES, context_tokens=TOKENS, deadline=float("inf"))
            if admission.full(running()) is None and admission.refusal(job, running()) is None:
                admission.add(job)
                batcher.add(job, clock())
            arrival += draw.expovariate(multiple * CAPACITY_RPS)
        if not chunks and len(batcher):
            (chunks, _), began = batcher.take(clock()), clock()
    took.sort()
    done = len(took) + admission.requests
    return Outcome(took[int(0.99 * len(took))], len(took) / seconds / CAPACITY_RPS, 1 - done / asked)


@pytest.mark.parametrize("multiple", [0.5, 1, 2, 10])
@pytest.mark.parametrize("seconds", [6.0, 50.0])
def test_the_admitted_wait_little_and_the_engine_stays_busy(multiple: float, seconds: float) -> None:
    found = offer(multiple, seconds)
    assert found.p99 <= 2.0
    assert multiple < 10 or seconds < 50 or found.p99 <= 1.8  # room for what a simulation does not have
    assert multiple < 2 or found.goodput >= 0.95
    assert multiple > 0.5 or found.refused <= 0.06


def test_without_a_limit_the_admitted_wait_for_many_forwards() -> None:
    assert offer(5, 6.0, wait_forwards=0).p99 > 10
