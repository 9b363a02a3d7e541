"""The batcher as pure policy: what must hold for any order of arrivals, takes, cancellations and expiries."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from app.queue.batching import Batcher, Chunk, Work, chunk_count
from app.settings import Batching

BATCHING = Batching(max_requests=4, max_candidates=100, chunk_candidates=30)
FAR = 1e9


def job(candidates: int, *, tokens: int = 1, key: str | None = None, deadline: float = FAR) -> Work:
    return Work(candidates=candidates, context_tokens=tokens, deadline=deadline, key=key)


def serve(batcher: Batcher[Work], now: float = 0.0) -> list[Chunk[Work]]:
    """One forward: take, and put back what has chunks left."""
    chunks, _ = batcher.take(now)
    for chunk in chunks:
        chunk.job.computed = chunk.stop
        if chunk.stop < chunk.job.candidates:
            batcher.put_back(chunk.job)
    return chunks


class Machine(RuleBasedStateMachine):
    """Any order of events: budgets hold, chunks are contiguous, nobody is lost, computed twice, late or after cancelling."""

    def __init__(self) -> None:
        super().__init__()
        self.batcher: Batcher[Work] = Batcher(BATCHING)
        self.now = 0.0
        self.waiting: list[Work] = []

    @rule(
        candidates=st.integers(1, 250),
        tokens=st.integers(0, 1000),
        key=st.sampled_from([None, "a", "b"]),
        seconds=st.floats(0.1, 5),
    )
    def arrive(self, candidates: int, tokens: int, key: str | None, seconds: float) -> None:
        new = job(candidates, tokens=tokens, key=key, deadline=self.now + seconds)
        self.batcher.add(new, self.now)
        self.waiting.append(new)

    @rule(seconds=st.floats(0, 1))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(self.waiting))
        assert self.batcher.remove(gone)
        assert not self.batcher.remove(gone)
        self.waiting.remove(gone)

    @rule()
    def forward(self) -> None:
        chunks, expired = self.batcher.take(self.now)
        for late in expired:
            assert late.deadline <= self.now
            self.waiting.remove(late)
        assert bool(chunks) == bool(self.waiting)
        assert len({chunk.job for chunk in chunks}) == len(chunks) <= BATCHING.max_requests
        first, rest = chunks[:1], chunks[1:]
        assert sum(chunk.stop - chunk.start for chunk in chunks) <= BATCHING.max_candidates
        if rest:
            tokens = sum(chunk.context_tokens for chunk in rest)
            assert tokens <= BATCHING.max_context_tokens - min(first[0].context_tokens, BATCHING.max_context_tokens)
        for chunk in chunks:
            assert chunk.job.deadline > self.now
            assert chunk.start == chunk.job.computed < chunk.stop <= chunk.job.candidates
            assert chunk.stop - chunk.start <= BATCHING.chunk_candidates
            chunk.job.computed = chunk.stop
            if chunk.stop < chunk.job.candidates:
                self.batcher.put_back(chunk.job)
            else:
                self.waiting.remove(chunk.job)

    @invariant()
    def counts_are_right(self) -> None:
        assert len(self.batcher) == len(self.waiting)
        assert self.batcher.candidates == sum(each.candidates - each.computed for each in self.waiting)
        assert self.batcher.oldest() == min((each.arrived for each in self.waiting), default=None)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_no_chunk_is_larger_than_a_forward() -> None:
    assert chunk_count(1000, Batching(chunk_candidates=512, max_candidates=100)) == 10
    assert chunk_count(1000, Batching(chunk_candidates=100, max_candidates=512)) == 10


def test_a_later_chunk_takes_no_more_room_than_its_candidates() -> None:
    batcher = Batcher[Work](BATCHING)
    batcher.add(job(60, key="a"), 0.0)
    assert [(chunk.start, chunk.stop) for chunk in serve(batcher)] == [(0, 30)]
    batcher.add(job(30, key="b"), 0.0)
    assert {(chunk.job.key, chunk.start, chunk.stop) for chunk in serve(batcher)} == {("a", 30, 60), ("b", 0, 30)}


def test_small_requests_pass_between_the_chunks_of_a_long_one() -> None:
    batcher: Batcher[Work] = Batcher(Batching(max_candidates=100, chunk_candidates=100))
    long, small = job(2000), [job(10) for _ in range(5)]
    for each in (long, *small):
        batcher.add(each, 0.0)
    assert [chunk.job for chunk in serve(batcher)] == [long]
    assert [chunk.job for chunk in serve(batcher)] == small  # all of them before the second chunk
    chunks = [serve(batcher) for _ in range(19)]
    assert all([chunk.job for chunk in batch] == [long] for batch in chunks)
    assert long.computed == 2000
    assert len(batcher) == 0


def test_a_long_request_is_not_starved_by_a_stream_of_small_ones() -> None:
    batcher: Batcher[Work] = Batcher(Batching(max_candidates=100, chunk_candidates=100))
    long = job(500)
    batcher.add(long, 0.0)
    forwards = 0
    while long.computed < long.candidates:
        for _ in range(10):
            batcher.add(job(10), float(forwards))
        serve(batcher)
        forwards += 1
        assert forwards < 40


def test_chunks_are_even_and_only_the_first_pays_for_the_context() -> None:
    batcher: Batcher[Work] = Batcher(Batching(max_candidates=1000, chunk_candidates=512))
    batcher.add(job(513, tokens=128), 0.0)
    first, second = serve(batcher)[0], serve(batcher)[0]
    assert (first.start, first.stop, first.context_tokens) == (0, 257, 128)
    assert (second.start, second.stop, second.context_tokens) == (257, 513, 0)


def test_keys_share_by_cost_and_not_by_number_of_requests() -> None:
    batcher: Batcher[Work] = Batcher(Batching(max_requests=1, max_candidates=100, chunk_candidates=100))
    for _ in range(100):
        batcher.add(job(100, key="heavy"), 0.0)
    for _ in range(100):
        batcher.add(job(10, key="light"), 0.0)
    cost = {"heavy": 0, "light": 0}
    for _ in range(60):
        for chunk in serve(batcher):
            cost[str(chunk.job.key)] += chunk.cost
    assert cost["light"] == pytest.approx(cost["heavy"], abs=2 * 101)


def test_a_key_that_was_silent_earns_no_credit() -> None:
    batcher: Batcher[Work] = Batcher(Batching(max_requests=1, max_candidates=100, chunk_candidates=100))
    for _ in range(50):
        batcher.add(job(100, key="busy"), 0.0)
    for _ in range(30):
        serve(batcher)
    for _ in range(30):
        batcher.add(job(100, key="late"), 0.0)
    served = [serve(batcher)[0].job.key for _ in range(20)]
    assert 9 <= served.count("late") <= 11  # half, not all
