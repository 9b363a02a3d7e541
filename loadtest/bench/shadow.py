"""`python -m loadtest.bench.shadow`: goodput and latency with a shadow checkpoint ÷ without, by wrk, the real engine; one JSON line last.

The demo is its own shadow and is asked to score every request again. At 16 connections nobody is refused; at 256 many are.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import httpx
import orjson
from rich.console import Console
from rich.table import Table

from loadtest.bench.scaling import processor_seconds
from loadtest.generate import wrk
from loadtest.machine import ROOT, machine
from loadtest.servers.launch import Server, ranking_server
from loadtest.timing import Figure, ratio

DEMO = ROOT / "weights" / "demo"
SHADOW: dict[str, Any] = {"shadow__checkpoint": DEMO, "shadow__share": 1.0}
SIDES = ("without", "again", "with")  # two servers without one: their ratio is the noise of this run
CONNECTIONS = (16, 256)


def measure(rounds: int, seconds: float) -> dict[tuple[str, int], list[dict[str, float]]]:
    """Readings by side and connections, with the processor time of the server's loop a reply.

    Every round runs every side, in turns that change; whoever waits is paused.
    """
    body = orjson.dumps(orjson.loads((DEMO / "example.json").read_bytes()))
    found: dict[tuple[str, int], list[dict[str, float]]] = {(side, many): [] for side in SIDES for many in CONNECTIONS}
    with ExitStack() as stack:
        servers = {
            side: stack.enter_context(ranking_server(checkpoint=DEMO, **(SHADOW if side == "with" else {})))
            for side in SIDES
        }
        assert _scores(servers["with"], body) == _scores(servers["without"], body)
        for server in servers.values():
            server.pause()
        for index in range(rounds):
            for side in SIDES[index % len(SIDES) :] + SIDES[: index % len(SIDES)]:
                servers[side].resume()
                wrk.read(f"{servers[side].url}/rank", [body], CONNECTIONS[0], 1)  # warm again
                for many in CONNECTIONS:
                    before = processor_seconds(servers[side].process.pid)
                    reading = wrk.read(f"{servers[side].url}/rank", [body], many, seconds)
                    spent = processor_seconds(servers[side].process.pid) - before
                    replies = (reading.good_per_s + reading.bad_per_s) * reading.seconds
                    found[side, many].append(reading._asdict() | {"cpu_us": 1e6 * spent / replies})
                servers[side].pause()
        for server in servers.values():
            server.resume()
        drawn = servers["with"].metric("ranker_shadow_requests_total")
        scored = servers["with"].metric("ranker_shadow_candidates_total") / len(orjson.loads(body)["candidates"])
        print(f"requests drawn for the shadow: {drawn:.0f}, that it has scored: {scored:.0f}")
    return found


def _scores(server: Server, body: bytes) -> list[float]:
    reply = httpx.post(f"{server.url}/rank", content=body, headers={"content-type": "application/json"})
    return [each["score"] for each in reply.raise_for_status().json()["candidates"]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0, whatever the figures: the table says them."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.shadow", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each reading")
    options = parser.parse_args(arguments)
    found = measure(options.rounds, options.seconds)
    table = Table("connections", "of", "with ÷ without", "again ÷ without")
    rows: dict[str, Any] = {}
    for many in CONNECTIONS:
        for name in ("good_per_s", "p50_ms", "p99_ms", "cpu_us"):
            read = {side: [reading[name] for reading in found[side, many]] for side in SIDES}
            figures = {side: ratio(read[side], read["without"]) for side in ("with", "again")}
            rows[f"{name} at {many}"] = {side: figure.median for side, figure in figures.items()} | {"read": read}
            table.add_row(str(many), name, *map(_text, figures.values()))
    Console().print(table)
    print(json.dumps({**machine(), "rounds": options.rounds, "seconds": options.seconds, "rows": rows}))
    return 0


def _text(figure: Figure) -> str:
    return f"{figure.median:.3f} ({figure.low:.3f} … {figure.high:.3f})"


if __name__ == "__main__":
    sys.exit(main())
