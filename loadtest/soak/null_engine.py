"""An engine process whose forwards take no time, for measuring what is around it; with fronts, `RANKER_FRONTS=2 python -m
loadtest.soak.null_engine`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache

import numpy as np

from app import assembly
from app.environment import load_settings
from app.fronts import supervisor
from app.fronts.role import Role
from app.service.service import RankingService
from app.telemetry.metrics import Metrics
from loadtest.soak.fake_engine import FakeEngine, loader
from model.engine import Item, Outcome
from model.inputs import Scores


class NullEngine(FakeEngine):
    """Scores of zero at once, as an engine that the event loop runs itself."""

    def open(self) -> int:
        """A descriptor that is readable when something was begun."""
        self._descriptor = os.eventfd(0)
        return self._descriptor

    def begin(self, items: Sequence[Item]) -> None:
        """Only before its speed is known."""
        self._begun = items
        os.eventfd_write(self._descriptor, 1)

    def finish(self) -> list[Outcome]:
        """What was begun."""
        os.eventfd_read(self._descriptor)
        return self.forward(self._begun)

    def forward(self, items: Sequence[Item]) -> list[Outcome]:
        """One array a size."""
        return [Outcome(zeros(len(item.candidates)), None, "hit") for item in items]


@cache
def zeros(candidates: int) -> Scores:
    """Scores of so many candidates, three actions and one continuous output."""
    matrix = np.zeros((candidates, 3), np.float32)
    return Scores(matrix, matrix, matrix[:, :1], finite=True)


def main() -> int:
    """The exit code of the engine process, or of the supervisor that starts it."""
    role, settings = Role.inherited(), load_settings([])
    if role is None:
        return supervisor.run(settings, engine=[sys.executable, "-m", "loadtest.soak.null_engine"])
    return assembly.run(settings, role, RankingService(loader(NullEngine()), settings, Metrics()))


if __name__ == "__main__":
    sys.exit(main())
