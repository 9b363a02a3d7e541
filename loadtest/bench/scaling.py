"""Rows of the thin path: what several fronts do around an engine process whose forwards take no time, every process on a core of its own
where there are enough."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

from loadtest.bench.table import Row
from loadtest.generate import wrk
from loadtest.generate.payload import rank_body
from loadtest.servers.launch import Server, ranking_server
from loadtest.timing import ratio

NULL = (sys.executable, "-m", "loadtest.soak.null_engine")
SHARE = 0.8  # of the number of fronts
CANDIDATES = 7
CONNECTIONS = 16  # of each front


class Scaling:
    """One front and N of them, in turns."""

    def __init__(self, stack: ExitStack, fronts: int, seconds: float) -> None:
        self.body = rank_body(1, CANDIDATES)
        self.seconds = seconds
        self.fronts = fronts
        self.servers: dict[int, Server] = {}
        self.rates: dict[int, list[float]] = {1: [], fronts: []}
        self.costs: dict[int, list[float]] = {1: [], fronts: []}  # a front's processor seconds of a request
        for count in (1, fronts):
            server = stack.enter_context(
                ranking_server(*NULL, fronts=count, logs__level="info", logs__format="json", queue__max_wait_seconds=0)
            )
            self.servers[count] = server

    def read(self) -> None:
        """One reading of each."""
        for count, server in self.servers.items():
            fronts = pin(server)
            before = sum(map(processor_seconds, fronts))
            reading = wrk.read(
                f"{server.url}/rank", [self.body], CONNECTIONS * count, self.seconds, core=(os.cpu_count() or 1) - 1
            )
            spent = sum(map(processor_seconds, fronts)) - before
            self.rates[count].append(reading.good_per_s)
            self.costs[count].append(spent / (reading.good_per_s * reading.seconds))

    def rows(self) -> list[Row]:
        """By the clock, and by the processor time of the fronts: what they would do with enough cores."""
        what, target = f"{self.fronts} fronts ÷ one, engine of no time, {CANDIDATES} candidates", SHARE * self.fronts
        cheaper = ratio(self.costs[1], self.costs[self.fronts])
        return [
            Row(
                f"{what}, pinned on {os.cpu_count()} cores",
                ratio(self.rates[self.fronts], self.rates[1]),
                "×",
                target,
                at_least=True,
            ),
            Row(f"{what}, by processor time of fronts", cheaper.scaled(self.fronts), "×", target, at_least=True),
        ]


def pin(server: Server) -> list[int]:
    """Fronts take the first cores, everything else the last one; the process ids of the fronts."""
    lines, cores = server.lines, os.cpu_count() or 1
    fronts = {int(line["front"]): int(line["process"]) for line in lines if line["event"] == "front_started"}
    [engine] = [int(line["process"]) for line in lines if line["event"] == "engine_started"]
    for process, core in [*((process, number - 1) for number, process in fronts.items()), (engine, len(fronts))]:
        for thread in Path(f"/proc/{process}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {min(core, cores - 1)})
    return list(fronts.values())


def processor_seconds(process: int) -> float:
    """Of a process's main thread, on which its event loop runs."""
    return int(Path(f"/proc/{process}/task/{process}/schedstat").read_text().split()[0]) / 1e9
