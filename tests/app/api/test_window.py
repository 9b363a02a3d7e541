"""A call has about one forward's worth in the queue: what is beyond it waits until something of the call has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from app.api.window import Window
from app.errors import Overloaded
from app.settings import Batching

pytestmark = pytest.mark.anyio


class Door:
    """Lets in from the `refused + 1`-th time on."""

    def __init__(self, refused: int = 0) -> None:
        self.refused = refused
        self.asked = self.inside = 0

    @contextmanager
    def __call__(self) -> Iterator[Any]:
        self.asked += 1
        if self.asked <= self.refused:
            raise Overloaded("full")
        self.inside += 1
        try:
            yield object()
        finally:
            self.inside -= 1


async def turns() -> None:
    """Let the event loop do all that it can do by now."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("size", [(10, 0), (0, 80)], ids=["candidates", "context tokens"])
async def test_a_full_forward_lets_no_more_in_until_one_of_it_ends(size: tuple[int, int]) -> None:
    window, door = Window(Batching(max_candidates=10)), Door()
    one, two, three = ExitStack(), ExitStack(), ExitStack()
    with one, two, three:
        await window.enter(one, door, size[0] - 1, size[1] - 1)
        await window.enter(two, door, 1, 1)
        third = asyncio.create_task(window.enter(three, door, 1, 1))
        await turns()
        assert (len(window), door.asked, third.done()) == (2, 2, False)
        two.close()
        await asyncio.wait_for(third, 10)
        assert (len(window), door.asked, door.inside) == (2, 3, 2)
    assert (len(window), door.inside) == (0, 0)


async def test_who_is_refused_asks_again_when_one_of_its_own_ends() -> None:
    window, door = Window(Batching()), Door()
    with ExitStack() as one, ExitStack() as two:
        await window.enter(one, door, 1, 1)
        door.refused = 2
        second = asyncio.create_task(window.enter(two, door, 1, 1))
        await turns()
        assert (door.asked, second.done()) == (2, False)
        one.close()
        await asyncio.wait_for(second, 10)
        assert (door.asked, len(window)) == (3, 1)


async def test_who_is_refused_with_nothing_queued_is_told() -> None:
    with ExitStack() as places, pytest.raises(Overloaded):  # nobody will make room
        await Window(Batching()).enter(places, Door(refused=1), 1, 1)
