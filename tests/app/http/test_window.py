"""A call has about one forward's worth in the queue: what is beyond it waits until something of the call has ended."""

from __future__ import annotations

import asyncio

import pytest

from app.errors import Overloaded
from app.http.window import Window
from app.settings import Batching
from tests.app.bounds import bounded

pytestmark = pytest.mark.anyio


async def turns() -> None:
    """Let the event loop do all that it can do by now."""
    for _ in range(10):
        await asyncio.sleep(0)


class Door:
    """Lets in from the `refused + 1`-th time on, and keeps what each asked with."""

    def __init__(self, refused: int = 0) -> None:
        self.refused = refused
        self.asked: list[tuple[bool, bool]] = []

    def __call__(self, *, again: bool, waits: bool) -> None:
        self.asked.append((again, waits))
        if len(self.asked) <= self.refused:
            raise Overloaded("full")


@pytest.mark.parametrize("size", [(10, 0), (0, 20)])  # candidates, context tokens
async def test_a_full_forward_lets_no_more_in_until_one_of_it_ends(size: tuple[int, int]) -> None:
    window, door = Window(bounded(Batching(max_candidates=10), max_context_tokens=20)), Door()
    one = (min(size[0], 1), min(size[1], 1))
    end, never = asyncio.Event(), asyncio.Event()
    held = window.begin(never.wait(), size[0] - one[0], size[1] - one[1])
    await asyncio.wait_for(window.admit(door), 10)  # a forward holds one more
    window.begin(end.wait(), *one)
    third = asyncio.create_task(window.admit(door))
    await turns()
    assert (len(window), len(door.asked), third.done()) == (2, 1, False)
    end.set()
    await asyncio.wait_for(third, 10)
    assert (len(window), door.asked) == (1, [(False, True)] * 2)
    await window.close()
    assert held.cancelled(), "it has ended, and will not end later"


async def test_who_is_refused_asks_again_when_one_of_its_own_ends() -> None:
    window, door, end = Window(Batching()), Door(refused=1), asyncio.Event()
    window.begin(end.wait(), 1, 1)
    place = asyncio.create_task(window.admit(door))
    await turns()
    assert (door.asked, place.done()) == ([(False, True)], False)
    end.set()
    await asyncio.wait_for(place, 10)
    assert door.asked == [(False, True), (True, False)]


async def test_who_is_refused_with_nothing_queued_is_told() -> None:
    with pytest.raises(Overloaded):  # nobody will make room
        await Window(Batching()).admit(Door(refused=1))
