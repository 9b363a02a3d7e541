"""The requests of one call that are in the queue: about one forward's worth at a time, so that a call neither fills the queue for
others nor is refused because of its own requests."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from app.errors import Overloaded
from app.settings import Batching

Admitted = TypeVar("Admitted")
Result = TypeVar("Result")


class Admit(Protocol[Admitted]):  # type: ignore[misc]  # a result
    """Asks for a place; `again` and `waits` as of `Service.admit`."""

    def __call__(self, *, again: bool, waits: bool) -> Admitted: ...


class Window:
    """Belongs to the event loop; `close` it at the end."""

    def __init__(self, batching: Batching) -> None:
        self.batching = batching
        self._queued: dict[asyncio.Task[Any], tuple[int, int]] = {}  # candidates and context tokens of each

    def __len__(self) -> int:
        return len(self._queued)

    async def admit(self, admit: Admit[Admitted], *, again: bool = False) -> Admitted:
        """Return what `admit` returns, once there is room. Raises what it raises; Overloaded only if nothing of this call is queued."""
        while True:
            while self._is_enough():
                await self._one_ends()
            try:
                return admit(again=again, waits=bool(self._queued))
            except Overloaded:
                again = True
                if not self._queued:
                    raise
                await self._one_ends()

    def begin(self, work: Coroutine[Any, Any, Result], candidates: int, context_tokens: int) -> asyncio.Task[Result]:
        """Start a task that ranks what was admitted."""
        task = asyncio.get_running_loop().create_task(work)
        self._queued[task] = candidates, context_tokens
        return task

    async def close(self) -> None:
        """Cancel what is left in the queue."""
        for task in self._queued:
            task.cancel()
        await asyncio.gather(*self._queued, return_exceptions=True)

    def _is_enough(self) -> bool:
        sizes = self._queued.values()
        return (
            sum(candidates for candidates, _ in sizes) >= self.batching.max_candidates
            or sum(tokens for _, tokens in sizes) >= self.batching.max_context_tokens
        )

    async def _one_ends(self) -> None:
        done, _ = await asyncio.wait(self._queued, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            del self._queued[task]
