"""`python -m loadtest.bench.recommend`: what /recommend adds to encode, search and forward at one connection, by stage; one JSON line last.

Against a server of the demo, in turns: users whose vector and context are cached, new ones, and /rank of one user for comparison.
"""

from __future__ import annotations

import argparse
import itertools
import json
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from loadtest.generate.payload import post
from loadtest.generate.samples import server_timing
from loadtest.machine import ROOT, machine
from loadtest.servers.launch import HOST, ranking_server
from loadtest.timing import Figure

COMPUTED = ("encode", "search", "forward")
STAGES = ("parse", "queue", *COMPUTED, "serialize")
TARGET_MS = 0.5
DEMO = ROOT / "weights"
NEW_USERS = 10**12


class Connection:
    """One kept-alive connection that waits for each reply."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection((HOST, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, payload: bytes) -> dict[str, float]:
        """Milliseconds of each stage, `total` from the send to the last byte, and `outside` of them. Raises ValueError but for 200."""
        began = time.perf_counter()
        self.socket.sendall(payload)
        received = b""
        while b"\r\n\r\n" not in received:
            received += self.socket.recv(2**20)
        head, _, body = received.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:])
        while len(body) < int(fields["content-length"]):
            body += self.socket.recv(2**20)
        total = 1e3 * (time.perf_counter() - began)
        if not head.startswith(b"HTTP/1.1 200"):
            raise ValueError(body[:300])
        stages = {stage: server_timing(fields["server-timing"]).get(stage, 0.0) for stage in STAGES}
        rest = total - sum(stages[stage] for stage in COMPUTED)
        return stages | {"total": total, "outside": total - sum(stages.values()), "rest": rest}


def payloads() -> dict[str, Any]:
    """An endless iterator of requests for each side."""
    example = json.loads((DEMO / "demo" / "example.json").read_text())
    candidates = example.pop("candidates")
    ids = itertools.count(NEW_USERS)

    def request(path: str, **fields: Any) -> bytes:
        return post("bench", path, orjson.dumps(example | fields))

    return {
        "/rank, known user": itertools.repeat(request("/rank", candidates=candidates)),
        "/retrieve, known user": itertools.repeat(request("/retrieve", k=200)),
        "/recommend, known user": itertools.repeat(request("/recommend", k=200, top_k=20)),
        "/recommend, new user": (request("/recommend", k=200, top_k=20, user_id=str(user)) for user in ids),
    }


def measure(rounds: int, pause_seconds: float, threads: int) -> dict[str, dict[str, Figure]]:
    """Figures in milliseconds by side and stage."""
    found: dict[str, list[dict[str, float]]] = {}
    retrieval: dict[str, Any] = {
        "retrieval__checkpoint": DEMO / "demo-towers",
        "retrieval__corpus": DEMO / "demo-posts",
    }
    with ranking_server(checkpoint=DEMO / "demo", threads=threads, **retrieval) as server:
        connection, sides = Connection(server.port), payloads()
        for index in range(rounds + rounds // 5):
            for name, requests in sides.items():
                times = connection.ask(next(requests))
                if index >= rounds // 5:  # the first ones warm up
                    found.setdefault(name, []).append(times)
                time.sleep(pause_seconds)
    return {name: {key: Figure.of([row[key] for row in rows]) for key in rows[0]} for name, rows in found.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 whether or not the target is met: the table says so."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.recommend", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--pause-ms", type=float, default=1.0, help="between two requests")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    found = measure(options.rounds, options.pause_ms / 1e3, options.threads)
    columns = (*STAGES, "outside", "total", "rest")
    table = Table("", *columns, title=f"ms, p50; rest = total − ({' + '.join(COMPUTED)}), target {TARGET_MS:g}")
    for name, figures in found.items():
        spread = figures["rest"]
        cells = [f"{figures[key].median:.3f}" for key in columns[:-1]]
        table.add_row(name, *cells, f"{spread.median:.3f} ({spread.low:.3f}, {spread.high:.3f})")
    Console(width=170).print(table)
    rows = {name: {key: figure.median for key, figure in figures.items()} for name, figures in found.items()}
    print(json.dumps({**machine(), "rounds": options.rounds, "target_ms": TARGET_MS, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
