"""How long the demo runs, how many people it has, and what happens to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    warm_up_days: int = 5  # served in a random order before day 0, to train the first checkpoint
    users: int = 260
    new_users: int = 0  # each day
    authors: int = 24
    new_authors: int = 1  # each day
    visits: int = 2  # of each user and day
    candidates: int = 20
    shown: int = 8
    temperature: float = 0.06  # of the exploration, in units of the reward
    nights: int = 1  # that each turn trains on: with more, tastes that are gone are learned again
    held_out: float = 0.2  # of a night's requests: both models are judged on them
    window_seconds: int = 5

    @property
    def bounds(self) -> Mapping[str, float]:
        """The bounds of the nightly checks. When tastes change, people do much less at first. That is no fault of the night, so it is
        allowed for; half of the events missing would not be noticed here."""
        return {"min_activity": 0.25, "min_rankings": self.users}

    @property
    def all_users(self) -> int:
        """Those of the first day, and those who arrive later."""
        return self.users + self.new_users * (self.days - 1)

    @property
    def all_authors(self) -> int:
        """Those of the first day, and those who arrive later."""
        return self.authors + self.new_authors * (self.days - 1)


WORLD: Mapping[str, Any] = {
    "topics": 6, "follows": 5, "posts_per_author_day": 4.0, "author_quality_sd": 1.5, "freshness_mean": 0.8,
    "freshness_sd": 0.2, "surface_taste_sd": 0.1, "activity_sd": 0.5, "interest_low": -0.3, "interest_high": 0.5,
    "follow_appeal": 0.3, "attach_appeal": 0.3, "dislike_appeal": -0.7, "reject_appeal": -1.5,
}  # fmt: skip
"""Settings of the world. Much of what is liked here is liked by everybody, so that a few hundred people can teach it in a night."""
ARCHITECTURE: Mapping[str, Any] = {
    "width": 32, "query_heads": 2, "kv_heads": 1, "head_width": 16, "history_length": 31,
}  # fmt: skip
FIRST_TRAINING: Mapping[str, Any] = {"epochs": 8.0, "batch_contexts": 8, "counts_share": 0.0}
NIGHTLY_TRAINING: Mapping[str, Any] = {"epochs": 16.0, "batch_contexts": 8, "learning_rate": 4e-3}
"""Many passes over a night of a few thousand impressions: the larger a night, the fewer it needs."""
KINDS = ("optimum", "loop", "frozen", "chance")
"""The rankers that are compared, the best first."""
