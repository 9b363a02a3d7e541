"""Sends calls from all sources to the application in process, and counts what they break. Makes up no calls itself."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp

from loadtest.fuzz.calls import MAX_PROBLEM_BYTES, Answer, Call, complaint, send
from loadtest.fuzz.mutate import Mutator
from loadtest.fuzz.sources import corpus, from_hypothesis, from_schemathesis
from loadtest.fuzz.wires import WireMutator
from loadtest.matrix import Row
from weights.format.manifest import Manifest

SHARES = {"mutations": 0.5, "wires": 0.2, "hypothesis": 0.1, "schemathesis": 0.15, "paths": 0.05}  # of the time
BLOCK = 32  # calls in flight together
WARM_UP_CALLS = 3000
KEPT = 5


@dataclass(slots=True)
class Tally:
    """What happened. `failures` keeps the first calls that failed, with the reason."""

    sent: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, Call]] = field(default_factory=list)
    longest_problem_bytes: int = 0
    new_series: int = 0

    def note(self, source: str, call: Call, answer: Answer) -> None:
        """Judge one answer."""
        self.sent[source] += 1
        self.statuses[answer.status] += 1
        if answer.status != 200:
            self.longest_problem_bytes = max(self.longest_problem_bytes, len(answer.body))
        if reason := complaint(answer):
            self.failed[reason] += 1
            if len(self.failures) < KEPT:
                self.failures.append((reason, call))

    def rows(self) -> list[Row]:
        """The rows of the matrix."""
        tried, failed, paths = self.sent.total(), self.failed.total(), self.sent["paths"]
        longest = self.longest_problem_bytes
        names = ", ".join(f"{count} {source}" for source, count in self.sent.items())
        return [
            Row("B1", f"odd bodies and headers in process ({names})", tried, failed, failed, 0, "failures"),
            Row("B2", "longest problem reply among them", tried, 0, longest, MAX_PROBLEM_BYTES, "bytes"),
            Row("B9", "random paths and methods: new metric series", paths, 0, self.new_series, 0, "series"),
        ]


def random_paths(seed: int) -> Iterator[Call]:
    """Endless paths that nobody serves, with methods that nobody knows."""
    source = random.Random(seed)
    while True:
        method = source.choice(("GET", "POST", "DELETE", f"M{source.getrandbits(24):X}"))
        yield Call(b"", path=f"/{source.getrandbits(64):x}/rank", method=method)


def sources(document: dict[str, Any], seed: int, manifest: Manifest) -> dict[str, Callable[[], Call]]:
    """The next call of each source, for the model of that manifest."""
    bodies = corpus(seed)
    mutator, wires = Mutator(seed, bodies), WireMutator(seed, bodies, manifest.name, manifest.action_names)
    generators = {
        "hypothesis": from_hypothesis(seed),
        "schemathesis": from_schemathesis(document, seed),
        "paths": random_paths(seed),
    }
    return {"mutations": mutator.call, "wires": wires.call} | {
        name: generator.__next__ for name, generator in generators.items()
    }


def series_by_route(exposition: bytes) -> int:
    """Series that carry a method and a route, and no status: those that a path could multiply."""
    return sum(line.startswith(b"ranker_http_request_duration_seconds") for line in exposition.splitlines())


async def fuzz(
    app: ASGIApp,
    calls: dict[str, Callable[[], Call]],
    count_series: Callable[[], int],
    *,
    requests: int,
    seconds: float,
    on_progress: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Send until enough requests were sent or the time is over, every source getting its share of the time."""
    tally, spent, series = Tally(), dict.fromkeys(calls, 0.0), 0
    until = time.monotonic() + seconds
    while tally.sent.total() < requests and time.monotonic() < until:
        source = min(calls, key=lambda name: spent[name] / SHARES[name])
        started = time.monotonic()
        block = await asyncio.to_thread(
            lambda make: [make() for _ in range(BLOCK)], calls[source]
        )  # else the loop is overrun
        for call, answer in zip(block, await asyncio.gather(*(send(app, call) for call in block)), strict=True):
            tally.note(source, call, answer)
        spent[source] += time.monotonic() - started
        if tally.sent.total() < WARM_UP_CALLS:
            series = count_series()
        on_progress(tally)
    tally.new_series = count_series() - series
    return tally
