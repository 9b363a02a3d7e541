"""A job gives the engine the candidates of a chunk, neither more nor others, and frees its place once."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from app.engine.job import RankJob
from tests.app.fakes import expected, request


def job(candidates: int, released: list[RankJob]) -> RankJob:
    context, items = request(1, candidates)
    worker: Any = None  # nothing here goes to the engine
    return RankJob(
        candidates=candidates, context_tokens=3, deadline=1.0, worker=worker, on_release=released.append,
        reserved=True, context=context, items=items,
    )  # fmt: skip


def test_every_chunk_holds_its_own_candidates() -> None:
    whole = job(7, [])
    for start, stop in combinations(range(8), 2):
        chunk = whole.part(start, stop).candidates
        assert chunk.post_ids.tolist() == whole.items.post_ids[start:stop].tolist()
        assert (len(chunk), chunk.first_slot) == (stop - start, whole.items.first_slot + start)


def test_a_place_is_freed_once() -> None:
    released: list[RankJob] = []
    ticket = job(2, released)
    ticket.release()
    ticket.release()
    assert released == [ticket]


def test_the_time_in_the_queue_ends_with_the_first_forward() -> None:
    told: list[Any] = []
    asked = job(2, [])
    assert asked.context is not None
    assert asked.items is not None
    asked.arrived, asked.started, asked.forward_seconds = 100.0, 100.25, 3.0
    asked.scores, asked.done = [expected(asked.context, asked.items, 1)], told.append
    asked.finish()
    assert (told[0].queue_seconds, told[0].forward_seconds) == (0.25, 3.0)
