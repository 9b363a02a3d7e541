"""Rows of the thin path: goodput of callers who ignore `Retry-After`, and what refusing them costs. `python -m
loadtest.bench.impatience --before DIR --plot FILE` draws goodput against their number, beside another commit.

wrk counts 200s and refusals a second; our own generator, in turns with it, adds the latency of the 200s, which wrk mixes with that
of refusals. What a refusal costs is read off the processor time of a server that holds none back: at 32 connections all is 200,
at 512 most is refused.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure as Picture

from loadtest.bench.table import Row
from loadtest.generate import wrk
from loadtest.generate.generator import closed_samples
from loadtest.machine import ROOT, commit, machine
from loadtest.servers.launch import Server, ranking_server
from loadtest.timing import Figure, ratio

DEMO = ROOT / "weights" / "demo"
LOGGED: dict[str, Any] = {"checkpoint": DEMO, "logs__format": "json", "logs__success_sample": 1}
CONNECTIONS = (8, 16, 32, 64, 128, 256)
FEW, MANY = 32, 256
BARE = "bare"  # the side that is a bare function
MOST_CONNECTIONS = 512  # for the cost of a refusal
MOST_REQUESTS = 200_000  # of one reading


class Reading(NamedTuple):
    """200s a second by wrk and by our own generator, refusals by wrk, and the 99th percentile of the latency of 200s."""

    good: float
    refused: float
    good_ours: float
    p99_ms: float


class Impatience:
    """Sides take turns, and each meets every number of connections."""

    def __init__(self, sides: dict[str, Server], body: bytes, seconds: float, connections: Sequence[int]) -> None:
        self.sides = sides
        self.body = body
        self.seconds = seconds
        self.connections = connections
        self.found: dict[tuple[str, int], list[Reading]] = {}

    def read(self) -> None:
        """One reading of each."""
        for connections in self.connections:
            for side, server in self.sides.items():
                by_wrk = wrk.read(f"{server.url}/rank", [self.body], connections, self.seconds)
                reading = Reading(by_wrk.good_per_s, by_wrk.bad_per_s, *self._ours(server, connections))
                self.found.setdefault((side, connections), []).append(reading)

    def rows(self) -> list[Row]:
        """Of the first side; beside the bare function's where that is one, because connections cost every server some goodput."""
        side = next(iter(self.sides))
        many, few = (list(zip(*self.found[side, connections], strict=True)) for connections in (MANY, FEW))
        what = f"200s a second, {MANY} impatient connections ÷ {FEW}"
        rows = [
            Row(f"{what}, wrk", ratio(list(many[0]), list(few[0])), "", 0.9, at_least=True),
            Row(f"{what}, our generator", ratio(list(many[2]), list(few[2])), "", 0.9, at_least=True),
            Row(f"p99 of 200s, {MANY} ÷ {FEW}", ratio(list(many[3]), list(few[3])), "", 3.0, at_least=False),
        ]
        if BARE in self.sides:
            ours, bare = (
                [m.good / f.good for m, f in zip(self.found[each, MANY], self.found[each, FEW], strict=True)]
                for each in (side, BARE)
            )
            rows.append(Row(f"{what}, and that ÷ the bare function's, wrk", ratio(ours, bare), "", 0.9, at_least=True))
        return rows

    def figures(self) -> list[dict[str, Any]]:
        """Every side at every number of connections, for the JSON line."""
        return [
            {"side": side, "connections": connections, "readings": [each._asdict() for each in found]}
            for (side, connections), found in self.found.items()
        ]

    def _ours(self, server: Server, connections: int) -> tuple[float, float]:
        requests = [server.target.request(self.body)] * MOST_REQUESTS
        address, warm_up = (server.target.host, server.target.port), 8 * connections
        samples = closed_samples(address, requests, clients=connections, seconds=self.seconds, warm_up=warm_up)
        good = samples.status == 200
        p99_ms = 1e3 * float(np.percentile(samples.service_seconds[good], 99)) if good.any() else float("nan")
        return float(good.sum() / samples.done.max()), p99_ms


class RefusalCost:
    """Processor time of a refusal beside that of a small request that is ranked."""

    def __init__(self, stack: ExitStack, body: bytes, seconds: float) -> None:
        self.body = body
        self.seconds = seconds
        self.server = stack.enter_context(ranking_server(connections__held_refusals=0, **LOGGED))
        self.ranked_ms: list[float] = []
        self.refused_ms: list[float] = []

    def read(self) -> None:
        """One reading of both."""
        costs, readings = [], []
        for connections in (FEW, MOST_CONNECTIONS):
            before = cpu_seconds(self.server)
            readings.append(wrk.read(f"{self.server.url}/rank", [self.body], connections, self.seconds))
            costs.append(1e3 * (cpu_seconds(self.server) - before))
        few, most = readings
        self.ranked_ms.append(costs[0] / (few.good_per_s * few.seconds))
        refused = most.bad_per_s * most.seconds
        self.refused_ms.append((costs[1] - self.ranked_ms[-1] * most.good_per_s * most.seconds) / max(refused, 1.0))

    def rows(self) -> list[Row]:
        """The share."""
        figure = ratio(self.refused_ms, self.ranked_ms)
        ours, reference = Figure.of(self.refused_ms).median, Figure.of(self.ranked_ms).median
        name = "cost of a refusal ÷ of a small request, processor time"
        return [Row(name, figure, "", 0.04, at_least=False, ours_ms=ours, reference_ms=reference)]


def cpu_seconds(server: Server) -> float:
    """Processor time of the server's process so far."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def example() -> bytes:
    """The demo's request of 7 candidates, on one line."""
    return json.dumps(json.loads((DEMO / "example.json").read_bytes()), separators=(",", ":")).encode()


def plot(found: Impatience, path: Path) -> None:
    """Goodput against connections, one line a side, with its spread."""
    figure = Picture(figsize=(7, 3.4), layout="constrained")
    axis = figure.subplots()
    for side in found.sides:
        rates = [Figure.of([each.good for each in found.found[side, count]]) for count in found.connections]
        [line] = axis.plot(found.connections, [rate.median for rate in rates], "o-", label=side)
        low, high = [rate.low for rate in rates], [rate.high for rate in rates]
        axis.fill_between(found.connections, low, high, color=line.get_color(), alpha=0.15)
    axis.set(xlabel="closed-loop connections that ignore Retry-After", ylabel="200s a second", ylim=(0, None))
    axis.set_xscale("log", base=2)
    axis.set_xticks(found.connections, [str(count) for count in found.connections])
    axis.grid(True)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, draw, and print one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.impatience", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one reading")
    parser.add_argument("--before", type=Path, help="a checkout of another commit, measured in turns with this one")
    parser.add_argument("--plot", type=Path, help="a PNG of goodput against connections")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        roots = {"now": ROOT} | ({"before": options.before.absolute()} if options.before else {})
        sides = {
            f"{side} ({commit(root)})": stack.enter_context(ranking_server(root=root, **LOGGED))
            for side, root in roots.items()
        }
        found = Impatience(sides, example(), options.seconds, CONNECTIONS)
        for _ in range(options.rounds):
            found.read()
    if options.plot:
        plot(found, options.plot)
    print(json.dumps({**machine(), "impatience": found.figures()}, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
