"""One request in the queue, as policy sees it: how much work it is, whose it is, and until when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]  # seconds that never run backwards


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """`context_tokens` are user and history. `served` counts the candidates of finished chunks, of which there are `chunks`.

    Times are clock seconds; `key` is the caller's API key, by name.
    """

    candidates: int
    context_tokens: int
    deadline: float
    chunks: int = 1
    key: str | None = None
    arrived: float = 0.0
    served: int = 0

    @property
    def cost(self) -> int:
        """One number to add up: tokens that run through the model."""
        return self.candidates + self.context_tokens
