"""Replicas around the fake engine, whose requests may hang or wait: for tests with and without Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from app.ray.replica import Replica
from app.service.service import RankingService
from app.settings import Settings
from app.telemetry.metrics import Metrics
from loadtest.soak.fake_engine import FakeEngine, loader

SLOW_SECONDS = 0.5
SLOW = range(2**40, 2**40 + 1000)  # users whose forwards take that long
HANG = 2**41  # the one whose forward takes for ever


class Planted(Replica):
    """A replica whose scores tell which request they are for."""

    def build(self, settings: Settings) -> RankingService:
        self.released = threading.Event()  # nothing hangs from then on
        return RankingService(loader(FakeEngine(before=self.before)), settings, Metrics())

    def before(self, items: Sequence[Any]) -> None:
        """Every forward that has such a user waits."""
        users = {item.context.user_id for item in items}
        if HANG in users:
            self.released.wait()
        if not users.isdisjoint(SLOW):
            time.sleep(SLOW_SECONDS)

    async def end(self) -> None:
        """Let go of what hangs, and stop."""
        self.released.set()
        await self.service.stop(1)
