"""Rows of the thin path: requests a second beside a bare ASGI function, and the latency of one caller, by wrk."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import httpx

from loadtest.bench.impatience import BARE
from loadtest.bench.table import Row
from loadtest.generate import wrk
from loadtest.servers.bare import bare_server
from loadtest.servers.launch import Server
from loadtest.timing import Figure, ratio

SMALL, LARGE, COLUMNS = "7 candidates", "64 candidates", "64 candidates in columns"
TARGETS = {SMALL: 0.25, LARGE: 0.30, COLUMNS: 0.30}  # ratio at 16 connections
TARGET_P50_MS = 0.50


class Load(NamedTuple):
    """Requests of one size and form, in turn, over so many connections."""

    requests: str
    connections: int


class Rates:
    """All sides answer the same requests in turns: `ours`, one process; `fronts`; `before`, another commit; and the bare function."""

    def __init__(
        self, stack: ExitStack, sides: dict[str, Server], bodies: dict[str, Sequence[bytes]], seconds: float
    ) -> None:
        """`bodies` by what they are: `SMALL` and the like."""
        self.bodies = bodies
        self.seconds = seconds
        self.sides: dict[str, dict[str, Server]] = {}
        self.found: dict[tuple[str, Load], list[wrk.Reading]] = {}
        for requests, asked in bodies.items():
            first = httpx.post(
                f"{sides['ours'].url}/rank", content=asked[0], headers={"content-type": "application/json"}
            )
            bare = stack.enter_context(bare_server(len(first.raise_for_status().content)))
            self.sides[requests] = {BARE: bare, **sides}

    def read(self) -> None:
        """One reading of each side under each load."""
        for requests, sides in self.sides.items():
            for connections in (1, 16):
                for side, server in sides.items():
                    reading = wrk.read(f"{server.url}/rank", self.bodies[requests], connections, self.seconds)
                    self.found.setdefault((side, Load(requests, connections)), []).append(reading)

    def rows(self) -> list[Row]:
        """With targets those of the specification; the others say how one process compares with fronts, and with what it was."""
        rows = []
        for load in (Load(requests, 16) for requests in self.bodies):
            what, target = f"{load.requests}, 16 connections", TARGETS[load.requests]
            share = ratio(self._rates("ours", load), self._rates(BARE, load))
            rows.append(Row(f"requests/s ÷ bare, {what}, one process", share, "", target, at_least=True))
            if "fronts" in self.sides[load.requests]:
                share = ratio(self._rates("fronts", load), self._rates(BARE, load))
                rows.append(Row(f"requests/s ÷ bare, {what}, fronts", share, "", target, at_least=True))
            if "before" in self.sides[load.requests]:
                gain = ratio(self._rates("ours", load), self._rates("before", load))
                rows.append(Row(f"requests/s ÷ those before, {what}, one process", gain, "×", 1.0, at_least=True))
        alone = Figure.of([reading.p50_ms for reading in self.found["ours", Load(SMALL, 1)]])
        rows.append(Row("p50 at one connection, 7 candidates", alone, "ms", TARGET_P50_MS, at_least=False))
        return rows

    def figures(self) -> list[dict[str, object]]:
        """Every side under every load, for the JSON line."""
        return [
            {"side": side, **load._asdict(), "per_s": self._rates(side, load), "p50_ms": [one.p50_ms for one in found]}
            for (side, load), found in self.found.items()
        ]

    def _rates(self, side: str, load: Load) -> list[float]:
        return [reading.good_per_s for reading in self.found[side, load]]
