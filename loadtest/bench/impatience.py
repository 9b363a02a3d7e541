"""`python -m loadtest.bench.impatience`: goodput and latency of closed-loop callers who ignore `Retry-After`; one JSON line last.

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
from typing import Any

import numpy as np
import orjson
from matplotlib.figure import Figure as Picture

from loadtest.generate import wrk
from loadtest.generate.generator import closed_samples
from loadtest.machine import ROOT, machine
from loadtest.servers.launch import Server, ranking_server
from loadtest.timing import Figure

CONNECTIONS = (32, 64, 128, 256)
LEAST_CONNECTIONS, MOST_CONNECTIONS = 32, 512  # for the cost of a refusal
MOST_REQUESTS = 200_000  # of one reading


def ours(server: Server, body: bytes, connections: int, seconds: float) -> tuple[float, float]:
    """200s a second and the 99th percentile of their latency in ms, by our own generator."""
    address = server.target.host, server.target.port
    requests = [server.target.request(body)] * MOST_REQUESTS
    samples = closed_samples(address, requests, clients=connections, seconds=seconds, warm_up=8 * connections)
    good = samples.status == 200
    return float(good.sum() / samples.done.max()), 1e3 * float(np.percentile(samples.service_seconds[good], 99))


def cpu_seconds(server: Server) -> float:
    """Processor time of the server's process so far."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def refusal_cost(server: Server, body: bytes, seconds: float) -> dict[str, float]:
    """Processor milliseconds of a request that is ranked, and of one that is refused."""
    costs, served = [], []
    for connections in (LEAST_CONNECTIONS, MOST_CONNECTIONS):
        before = cpu_seconds(server)
        reading = wrk.read(f"{server.url}/rank", [body], connections, seconds, refusals=True)
        costs.append(cpu_seconds(server) - before)
        served.append((reading.good_per_s * seconds, reading.bad_per_s * seconds))
    ranked = costs[0] / served[0][0]
    return {"ranked": 1e3 * ranked, "refused": 1e3 * (costs[1] - ranked * served[1][0]) / max(served[1][1], 1.0)}


def measure(sides: dict[str, Server], body: bytes, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each side and number of connections; the sides take turns."""
    read: dict[tuple[str, int], list[tuple[float, float, float, float]]] = {}
    for _ in range(options.rounds):
        for connections in CONNECTIONS:
            for side, server in sides.items():
                found = wrk.read(f"{server.url}/rank", [body], connections, options.seconds, refusals=True)
                own, p99 = ours(server, body, connections, options.seconds)
                read.setdefault((side, connections), []).append((found.good_per_s, found.bad_per_s, own, p99))
    names = ("good_per_s", "refused_per_s", "good_per_s_ours", "p99_ms_of_good")
    rows = []
    for (side, connections), readings in read.items():
        least = read[side, LEAST_CONNECTIONS]
        figures = {
            name: Figure.of(list(column)) for name, column in zip(names, zip(*readings, strict=True), strict=True)
        }
        for name, column in (("good", 0), ("good_ours", 2), ("p99", 3)):
            pairs = zip(readings, least, strict=True)
            figures[f"{name}_ratio_to_{LEAST_CONNECTIONS}"] = Figure.of(
                [now[column] / then[column] for now, then in pairs]
            )
        rows.append(
            {"side": side, "connections": connections}
            | {name: [float(f"{part:.3g}") for part in (f.median, f.low, f.high)] for name, f in figures.items()}
        )
    return rows


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Goodput against connections, one line a side."""
    figure = Picture(figsize=(7, 3.4), layout="constrained")
    axis = figure.subplots()
    for side in dict.fromkeys(row["side"] for row in rows):
        mine = [row for row in rows if row["side"] == side]
        axis.plot([row["connections"] for row in mine], [row["good_per_s"][0] for row in mine], "o-", label=side)
    axis.set(xlabel="closed-loop connections that ignore Retry-After", ylabel="200s a second", ylim=(0, None))
    axis.grid(True)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 whether or not the targets are met."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.impatience", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of one reading")
    parser.add_argument("--before", type=Path, help="a checkout of another commit, measured in turns with this one")
    parser.add_argument("--plot", type=Path, help="a PNG of goodput against connections")
    options = parser.parse_args(arguments)
    body = orjson.dumps(orjson.loads((ROOT / "weights/demo/example.json").read_bytes()))
    settings: dict[str, Any] = {
        "checkpoint": ROOT / "weights" / "demo",
        "logs__format": "json",
        "logs__success_sample": 1,
    }
    with ExitStack() as stack:
        roots = {"now": ROOT} | ({"before": options.before.absolute()} if options.before else {})
        sides = {side: stack.enter_context(ranking_server(root=root, **settings)) for side, root in roots.items()}
        rows = measure(sides, body, options)
        eager = stack.enter_context(ranking_server(connections__held_refusals=0, **settings))
        costs = [refusal_cost(eager, body, options.seconds) for _ in range(options.rounds)]
    cost = {name: Figure.of([each[name] for each in costs]) for name in costs[0]}
    share = Figure.of([each["refused"] / each["ranked"] for each in costs])
    for row in rows:  # each figure: median, 10th and 90th percentile
        print("; ".join(f"{name.replace('_', ' ')} {value}" for name, value in row.items()))
    print(
        "; ".join(f"processor ms, {name}: {f.median:.3g}" for name, f in cost.items()) + f"; share {share.median:.2g}"
    )
    if options.plot:
        plot(rows, options.plot)
    found = {"ranked_ms": cost["ranked"].median, "refused_ms": cost["refused"].median, "share": share.median}
    print(json.dumps({**machine(), "impatience": rows, "refusal": found}, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
