"""Runs the service around a fake engine with planted delays and faults: `python -m loadtest.soak.faulty_server --forward-ms=5`."""

from __future__ import annotations

import argparse
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import uvicorn
from starlette.requests import Request
from starlette.responses import Response

from app import assembly, budgets
from app.engine import runners
from app.engine.loading import LoadedModel, LoadedRetrieval, Loader, RetrievalLoader, Steps, retrieval_loader
from app.environment import load_settings
from app.explore import pages
from app.fronts.role import Role
from app.http.application import create_app
from app.limits import Limits, Queue
from app.server import observer
from app.service.service import RankingService
from app.service.watchdog import Watchdog
from app.settings import Settings
from app.telemetry import sink
from app.telemetry.metrics import Metrics
from loadtest.soak.fake_engine import FakeEngine, loader
from loadtest.soak.servers import HANG, RAISE, STICKY
from model.engine import EngineError, Item, Outcome
from model.inputs import Scores
from model.retrieval.engine import Users
from model.retrieval.inputs import Answers, Query
from weights.errors import CheckpointError

leaked: list[bytearray] = []
device = threading.Lock()
limitless = budgets.Budget.__init__


class FaultyEngine(FakeEngine):
    """A fake engine with delays, failures for certain users, and the faults chosen on the command line."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options

    def forward(self, items: Sequence[Item]) -> list[Outcome]:
        options, users = self.options, {item.context.user_id for item in items}
        work = sum(len(item.candidates) for item in items)
        use_device(options.forward_ms + options.candidate_us * work / 1000)
        if HANG in users:
            time.sleep(options.hang_seconds)
        if STICKY in users:
            raise EngineError("the device is gone", sticky=True)
        if RAISE in users:
            raise MemoryError("planted")
        outcomes = super().forward(items)
        del self.forwards[:], self.chunks[:]
        if options.leak_bytes:
            leaked.extend(bytearray(options.leak_bytes) for _ in items)
        return crossed(outcomes) if options.cross else outcomes


class NullEngine(FakeEngine):
    """Returns zero scores at once and runs in the event loop, for measuring everything around the engine."""

    def open(self) -> int:
        """A descriptor that becomes readable after `begin`."""
        self._descriptor = os.eventfd(0)
        return self._descriptor

    def begin(self, items: Sequence[Item]) -> None:
        """Begin a forward; used only before the engine's speed is known."""
        self._begun = items
        os.eventfd_write(self._descriptor, 1)

    def finish(self) -> list[Outcome]:
        """Outcomes of the forward that was begun."""
        os.eventfd_read(self._descriptor)
        return self.forward(self._begun)

    def forward(self, items: Sequence[Item]) -> list[Outcome]:
        """Outcomes with shared arrays of zeros, one per number of candidates."""
        return [Outcome(zeros(len(item.candidates)), None, "hit") for item in items]


@cache
def zeros(candidates: int) -> Scores:
    """Zero scores of this many candidates, for three actions and one continuous output."""
    matrix = np.zeros((candidates, 3), np.float32)
    return Scores(matrix, matrix, matrix[:, :1], finite=True)


def crossed(outcomes: list[Outcome]) -> list[Outcome]:
    """Swap outcomes among requests with equally many candidates, so that no length reveals the mistake."""
    found = list(outcomes)
    for size in {len(outcome.scores) for outcome in outcomes}:
        places = [place for place, outcome in enumerate(outcomes) if len(outcome.scores) == size]
        for place, other in zip(places, places[1:] + places[:1], strict=True):
            found[place] = outcomes[other]
    return found


def hanging(load: RetrievalLoader, seconds: float) -> RetrievalLoader:
    """Wrap a loader so that searches of the user HANG take this many seconds."""

    def loaded() -> LoadedRetrieval:
        found = load()
        search = found.engine.retrieve

        def retrieve(queries: Sequence[Query], users: Users) -> Answers:
            if any(query.context.user_id == HANG for query in queries):
                time.sleep(seconds)
            return search(queries, users)

        vars(found.engine)["retrieve"] = retrieve
        return found

    return loaded


def load_late_and_fail(seconds: float) -> Loader:
    """A loader that fails with CheckpointError after this many seconds."""

    def load(steps: Steps) -> LoadedModel:
        time.sleep(seconds)
        raise CheckpointError("planted")

    return load


def use_device(milliseconds: float) -> None:
    """Occupy the only device, which computes one forward at a time."""
    with device:
        time.sleep(milliseconds / 1000)


def stock_server(settings: Settings, service: RankingService) -> int:
    """Serve with uvicorn's own connections: no deadlines, no limits, no care about bytes after a broken request."""
    uvicorn.run(create_app(settings, service), host=settings.host, port=settings.port, log_config=None)
    return 0


async def made_anew(kept: pages.Kept[Any], key: Any, request: Request) -> Response:
    """Build the reply anew instead of using the kept one."""
    return Response(kept._make(key))


PLANTED: dict[str, tuple[str, Sequence[tuple[Any, str, Any]]]] = {  # flag → help, and the attributes to replace
    "--eager-shadow": (
        "the second checkpoint ignores waiting requests",
        [(RankingService, "is_busy", lambda self: False)],
    ),
    "--searches-in-loop": ("no search is too long for the event loop", [(runners, "SHORT_SEARCH_SECONDS", math.inf)]),
    "--no-loop-watch": ("nobody watches the event loop", [(Watchdog, "watch_loop", lambda self: None)]),
    "--no-rest": ("no connection rests after a request that held the loop", [(budgets, "REST_TIMES", 0.0)]),
    "--nothing-kept": ("replies that are kept are built for every request", [(pages.Kept, "reply", made_anew)]),
    "--no-budgets": (
        "budgets are unlimited",
        [(budgets.Budget, "__init__", lambda budget, limit: limitless(budget, 2**60))],
    ),
    "--none-held": ("no refusal is delayed", [(observer, "HELD_REFUSALS", 0)]),
    "--small-budgets": (
        "room for a sixteenth of what comes",
        [
            (sink.Sink.__init__, "__defaults__", (2**16,)),
            (Limits, "buffered_bytes", 4 * 2**20),
            (Limits, "batch_candidates", 2**14),
            (Queue, "max_context_tokens", 2**14),
        ],
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--forward-ms", type=float, default=0.0)
    parser.add_argument("--candidate-us", type=float, default=0.0)
    parser.add_argument("--null", action="store_true", help="forwards take no time, and scores are zero")
    parser.add_argument("--hang-seconds", type=float, default=3600.0)
    parser.add_argument(
        "--shadow-ms", type=float, default=0.0, help="a second checkpoint's forward, on the same device"
    )
    parser.add_argument("--leak-bytes", type=int, default=0)
    parser.add_argument("--refused-after-seconds", type=float, help="the first load fails")
    parser.add_argument("--cross", action="store_true", help="give each caller of a batch the scores of the next")
    parser.add_argument("--stock-protocol", action="store_true", help="uvicorn's own connections")
    for flag, (told, _) in PLANTED.items():
        parser.add_argument(flag, action="append_const", dest="planted", const=flag, help=told)
    options = parser.parse_args()
    for flag in options.planted or ():
        for owner, name, value in PLANTED[flag][1]:
            setattr(owner, name, value)
    role, settings = Role.inherited(), load_settings([])
    refused = options.refused_after_seconds
    engine = NullEngine() if options.null else FaultyEngine(options)
    load = loader(engine) if refused is None else load_late_and_fail(refused)
    towers, corpus = settings.retrieval.checkpoint, settings.retrieval.corpus
    retrieval = None
    if towers is not None and corpus is not None:
        retrieval = hanging(retrieval_loader(towers, corpus, settings), options.hang_seconds)
    second = (
        None
        if settings.shadow.checkpoint is None
        else loader(FakeEngine(2, lambda items: use_device(options.shadow_ms)), "v2")
    )
    service = RankingService(load, settings, Metrics(), retrieval=retrieval, second=second)
    return stock_server(settings, service) if options.stock_protocol else assembly.run(settings, role, service)


if __name__ == "__main__":
    sys.exit(main())
