"""What the log of what was served costs: the service with it beside the service without, by wrk, in turns."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from loadtest.bench.http import CONNECTIONS, Load, first_visits
from loadtest.generate import wrk
from loadtest.rows import Row
from loadtest.server import DEMO, Server, serving
from loadtest.timing import ratio

LEAST_RATE = 0.95
"""The requests a second with the log must be at least this share of those without."""
TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")


def served_rows(rounds: int, seconds: float) -> Iterator[Row]:
    """Rates and processor time a request with the log of all users, by those without it."""
    settings: dict[str, Any] = {"logs__success_sample": 1, "queue__max_wait_seconds": 0}
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(**settings) as without,
        serving(**settings, served__directory=Path(folder) / "served") as logging,
    ):
        sides = {"without": without, "logging": logging}
        for load in served_loads():
            rates: dict[str, list[float]] = {name: [] for name in sides}
            costs: dict[str, list[float]] = {name: [] for name in sides}
            for turn in range(rounds + 1):
                for name, server in sorted(sides.items(), reverse=turn % 2 == 1):
                    before = processor_seconds(server)
                    reading = wrk.read(
                        server.url + load.path,
                        load.bodies,
                        CONNECTIONS,
                        seconds,
                        headers={**load.headers, **wrk.PATIENT},
                    )
                    if turn:  # the first round warms up
                        rates[name].append(reading.good_per_s)
                        costs[name].append((processor_seconds(server) - before) / (reading.good_per_s * seconds))
            rate = ratio(rates["logging"], rates["without"])
            yield Row.of(f"{load.what}: requests/s, logged ÷ not", rate, "×", load.at_least, at_least=True)
            yield Row.of(f"{load.what}: processor time, logged ÷ not", ratio(costs["logging"], costs["without"]), "×")
        lost = sum(int(logging.metric("ranker_served_dropped_total", reason=why)) for why in REASONS)
        print(f"{lost} rankings dropped")


REASONS = ("queue_full", "not_written", "fault")


def served_loads() -> list[Load]:
    """Seven candidates with one history, and 64 candidates each time with another history."""
    json = {"content-type": "application/json"}
    seven = [orjson.dumps(orjson.loads((DEMO / "example.json").read_bytes()))]
    many = [orjson.dumps(page) for page in first_visits(64)]
    return [
        Load("7 candidates", "/rank", json, seven, CONNECTIONS, LEAST_RATE),
        Load("64 candidates, every history new", "/rank", json, many, CONNECTIONS, LEAST_RATE),
    ]


def processor_seconds(server: Server) -> float:
    """What the process has used of all processors so far."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_SECONDS
