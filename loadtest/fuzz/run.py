"""Sends calls from all sources to a target and counts broken promises."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from app.errors import DeadlineExceeded, Overloaded
from loadtest.fuzz.calls import JSON_TYPE, MAX_PROBLEM_BYTES, REQUEST_ID, Answer, Call, complaint
from loadtest.fuzz.frames import FrameMutator
from loadtest.fuzz.mutate import Mutator
from loadtest.fuzz.sources import apart, corpus, from_hypothesis, from_pages, from_schemathesis
from loadtest.fuzz.targets import Target
from loadtest.fuzz.wires import WireMutator
from loadtest.matrix import Row
from weights.format.manifest import Manifest

SHARES = {  # share of the time per source
    "mutations": 0.49, "wires": 0.15, "frames": 0.06, "pages": 0.12, "hypothesis": 0.03, "schemathesis": 0.07, "paths": 0.08,
}  # fmt: skip
SLOW = ("hypothesis", "schemathesis")  # slow to make, so made in a thread, since the application may share the loop
BLOCK = 64  # calls in flight together
WARM_UP_PATHS = 2 * BLOCK  # the first calls create the series that all others share
KEPT = 5
LATE = (Overloaded.status, DeadlineExceeded.status)  # statuses that a valid body may get on a busy machine

Known = dict[bytes, Any]


@dataclass(slots=True)
class Tally:
    """Counts of a run. `failures` keeps the first failed calls with their reasons.

    `known`: replies to bodies that were sent alone. Every later call with such a body must get the same reply.
    """

    known: Known = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, Call]] = field(default_factory=list)
    longest_problem_bytes: int = 0
    new_series: int = 0
    compared: int = 0

    def note(self, source: str, call: Call, answer: Answer) -> None:
        """Judge one answer."""
        self.sent[source] += 1
        self.statuses[answer.status] += 1
        if answer.status != 200:
            self.longest_problem_bytes = max(self.longest_problem_bytes, len(answer.body))
        if reason := complaint(answer) or self._crossed(call, answer):
            self.failed[reason] += 1
            if len(self.failures) < KEPT:
                self.failures.append((reason, call))

    def _crossed(self, call: Call, answer: Answer) -> str:
        """The complaint if the answer belongs to another call. `named` has given each call its own id."""
        name, given = call.headers[-1] if call.headers else (b"", b""), answer.headers.get(REQUEST_ID)
        is_ours = name[0] == REQUEST_ID and name[1].startswith(NAME)
        if is_ours and given not in (name[1], None):
            return "another request's name"
        is_known = call.path == "/rank" and call.headers[:-1] == (JSON_TYPE,) and call.body in self.known
        if not (is_ours and is_known) or call.method != "POST" or answer.status in LATE:
            return ""
        self.compared += 1
        is_right = answer.status == 200 and plain(answer) == self.known[call.body]
        return "" if is_right else "another request's scores"

    def rows(self) -> list[Row]:
        """The rows of the matrix."""
        tried, failed, paths = self.sent.total(), self.failed.total(), self.sent["paths"]
        longest = self.longest_problem_bytes
        names = ", ".join(f"{count} {source}" for source, count in self.sent.items())
        crossed = sum(count for reason, count in self.failed.items() if reason.startswith("another"))
        return [
            Row("B1", f"odd bodies and headers ({names})", tried, failed, failed, 0, "failures"),
            Row("B2", "longest problem reply among them", tried, 0, longest, MAX_PROBLEM_BYTES, "bytes"),
            Row("B9", "random paths and methods: new metric series", paths, 0, self.new_series, 0, "series"),
            Row("C2", "replies by name, and to known bodies by their scores", self.compared, 0, crossed, 0, "crossed"),
        ]


NAME = b"fuzz-"


def named(calls: Sequence[Call], first: int) -> list[Call]:
    """The calls, each with its own request id as last header unless it has one."""
    return [
        call
        if REQUEST_ID in dict(call.headers)
        else replace(call, headers=(*call.headers, (REQUEST_ID, NAME + b"%d" % number)))
        for number, call in enumerate(calls, first)
    ]


def plain(answer: Answer) -> Any:
    """A reply without fields that differ in each reply or after a reload: timings, request id, context handle."""
    content = orjson.loads(answer.body)
    if isinstance(content, list):  # a batch
        return content
    return {name: value for name, value in content.items() if name not in ("timings_ms", "request_id", "context")}


async def learn(target: Target, bodies: Sequence[bytes]) -> Known:
    """Send the bodies one by one; return the reply to each that gets 200."""
    answers = [(body, (await target.ask([Call(body)]))[0]) for body in bodies]
    return {body: plain(answer) for body, answer in answers if answer.status == 200}


def random_paths(seed: int) -> Iterator[Call]:
    """Endless calls of random, unserved paths, some with unknown methods."""
    source = random.Random(seed)
    while True:
        method = source.choice(("GET", "POST", "DELETE", f"M{source.getrandbits(24):X}"))
        yield Call(b"", path=f"/{source.getrandbits(64):x}/rank", method=method)


def sources(document: dict[str, Any], seed: int, manifest: Manifest, token: str) -> dict[str, Callable[[], Call]]:
    """By source, a function that returns its next call for the manifest's model. `token` opens the admin port."""
    bodies = corpus(seed)
    mutator, wires = Mutator(seed, bodies), WireMutator(seed, bodies, manifest.name, manifest.action_names)
    return {
        "mutations": mutator.call,
        "wires": wires.call,
        "frames": FrameMutator(seed, manifest.config).call,
        "hypothesis": apart(from_hypothesis, seed).__next__,
        "schemathesis": apart(from_schemathesis, document, seed).__next__,
        "paths": random_paths(seed).__next__,
        "pages": from_pages(seed, token).__next__,
    }


def series_by_route(exposition: bytes) -> int:
    """Number of request duration series, which random paths or methods could multiply."""
    return sum(line.startswith(b"ranker_http_request_duration_seconds") for line in exposition.splitlines())


async def fuzz(
    target: Target,
    calls: dict[str, Callable[[], Call]],
    count_series: Callable[[], int],
    *,
    requests: int,
    seconds: float,
    known: Known | None = None,
    on_progress: Callable[[Tally], None] = lambda tally: None,
    clock: Callable[[], float] = time.monotonic,
) -> Tally:
    """Send calls until `requests` were sent or the time is over. Each source gets its share of the time by `clock`."""
    tally, spent = Tally(known or {}), dict.fromkeys(calls, 0.0)
    until = clock() + seconds
    count_series()  # counting may itself create a series
    while tally.sent.total() < requests and clock() < until:
        source = min(calls, key=lambda name: spent[name] / SHARES[name])
        started = clock()
        made = await asyncio.to_thread(_block, calls[source]) if source in SLOW else _block(calls[source])
        block = named(made, tally.sent.total())
        before = count_series() if source == "paths" and tally.sent[source] >= WARM_UP_PATHS else None
        for call, answer in zip(block, await target.ask(block), strict=True):
            tally.note(source, call, answer)
        spent[source] += clock() - started
        if before is not None:
            tally.new_series += count_series() - before
        on_progress(tally)
    return tally


def _block(make: Callable[[], Call]) -> list[Call]:
    return [make() for _ in range(BLOCK)]
