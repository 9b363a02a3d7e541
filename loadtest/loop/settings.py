"""How long the demo runs, how many people it has, and what happens to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

REWARD = {"favorite": 1.0, "repost": 1.0, "click": 0.5, "dwell": 0.2, "not_interested": -2.0}
"""What an action is worth. These are the checkpoint's score weights, so the service ranks by the reward that it expects."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Equal settings give the same people and candidates. Days count from 0; on `drift_day` tastes change, and what people did on
    `poisoned_day` is dealt out at random before it is joined."""

    seed: int = 1
    days: int = 14
    drift_day: int = 6
    poisoned_day: int = 11
    warm_up_days: int = 6  # served in a random order before day 0, to train the first checkpoint
    users: int = 240
    authors: int = 40
    new_authors: int = 2  # each day
    visits: int = 2  # of each user and day
    candidates: int = 20
    shown: int = 6
    temperature: float = 0.03  # of the exploration, in units of the reward
    nights: int = 2  # that each turn trains on
    window_seconds: int = 5

    @property
    def all_authors(self) -> int:
        """Those of the first day, and those who arrive later."""
        return self.authors + self.new_authors * (self.days - 1)


ARCHITECTURE: Mapping[str, object] = {
    "width": 32, "query_heads": 2, "kv_heads": 1, "head_width": 16, "history_length": 31,
}  # fmt: skip
FIRST_TRAINING: Mapping[str, object] = {"epochs": 4.0, "batch_contexts": 16, "counts_share": 0.0}
NIGHTLY_TRAINING: Mapping[str, object] = {"epochs": 4.0, "batch_contexts": 16, "learning_rate": 2e-3}
BOUNDS: Mapping[str, float] = {"min_activity": 0.4}
"""When tastes drift, people do much less at first. That is no fault of the night, so the demo allows for it."""

KINDS = ("optimum", "loop", "frozen", "chance")
"""The rankers that are compared, the best first."""
