"""`python -m loadtest.bench.front`: requests a second beside a bare ASGI function, by wrk in turns; one JSON line last.

The bare function parses the same bodies with orjson and sends a reply of the same size: what a server in Python can do at most.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import orjson

from loadtest.bench.service import ranking_bodies
from loadtest.generate import wrk
from loadtest.machine import ROOT, machine
from loadtest.servers.launch import Server, free_port, process, ranking_server
from loadtest.timing import Figure, ratio

TARGETS = {(7, 16): 0.25, (64, 16): 0.30}  # of the ratio
REPLY_BYTES = "FRONT_REPLY_BYTES"


async def bare(scope: Any, receive: Any, send: Any) -> None:
    """The ASGI function: read, parse, reply."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    orjson.loads(body or b"{}")
    size = os.environ[REPLY_BYTES]
    headers = [(b"content-type", b"application/json"), (b"content-length", size.encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"x" * int(size)})


def measure(
    server: Server, bodies: Sequence[bytes], candidates: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each number of connections; the sides take turns, so that a busy machine slows both."""
    if not wrk.IS_INSTALLED:
        return [{"candidates": candidates, "not measured": "wrk is not installed"}]
    first = httpx.post(f"{server.url}/rank", content=bodies[0], headers={"content-type": "application/json"})
    port, size = free_port(), {REPLY_BYTES: str(len(first.raise_for_status().content))}
    flags = "--loop uvloop --http httptools --no-access-log --log-level warning --lifespan off"
    command = [sys.executable, "-m", "uvicorn", "loadtest.bench.front:bare", "--port", str(port), *flags.split()]
    rows = []
    with process(command, size, port=port) as other:
        for connections in (1, 16):
            read: dict[str, list[wrk.Reading]] = {"ours": [], "bare": []}
            for _ in range(options.rounds):
                for side, target in (("ours", server), ("bare", other)):
                    read[side].append(wrk.read(f"{target.url}/rank", bodies, connections, options.seconds))
            ours, theirs = ([reading.good_per_s for reading in read[side]] for side in ("ours", "bare"))
            figures = {"ours_per_s": Figure.of(ours), "bare_per_s": Figure.of(theirs), "ratio": ratio(ours, theirs)}
            figures["p50_ms"] = Figure.of([reading.p50_ms for reading in read["ours"]])
            rows.append(
                {"candidates": candidates, "connections": connections, "target": TARGETS.get((candidates, connections))}
                | {name: [float(f"{part:.3g}") for part in (f.median, f.low, f.high)] for name, f in figures.items()}
            )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 whether or not the targets are met."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.front", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one reading")
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "weights" / "demo")
    options = parser.parse_args(arguments)
    with ranking_server(checkpoint=options.checkpoint, logs__format="json", logs__success_sample=1) as server:
        seven = orjson.dumps(orjson.loads((ROOT / "weights/demo/example.json").read_bytes()))
        many = [request.partition(b"\r\n\r\n")[2] for request in ranking_bodies(server.target, 64, 2000)]
        rows = measure(server, [seven], 7, options) + measure(server, many, 64, options)
    for row in rows:  # each figure: median, 10th and 90th percentile
        print("; ".join(f"{name.replace('_', ' ')} {value}" for name, value in row.items()))
    print(json.dumps({**machine(), "front": rows}, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
