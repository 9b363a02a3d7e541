"""`python -m loadtest.bench.recommend`: what /recommend adds to encode, search and forward at one connection, by wrk; one JSON line last.

Against a server of the demo, in turns: users whose vector and context are cached, new ones, and /rank of one user for comparison.
With `--before DIR` also a checkout of another commit. The stages are those that the replies of the same run name.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from loadtest.generate import wrk
from loadtest.machine import ROOT, commit, machine
from loadtest.servers.launch import Server, ranking_server
from loadtest.timing import Figure, ratio

COMPUTED = ("encode", "search", "forward")
STAGES = ("parse", "queue", *COMPUTED, "serialize")
TARGET_MS = 0.5
DEMO = ROOT / "weights"
FIRST_NEW_USER, NEW_USERS = 10**12, 5_000  # in each reading

Times = Mapping[str, list[float]]


def bodies(reading: int) -> dict[tuple[str, str], list[bytes]]:
    """What is asked, by path and user. New users are those of this reading alone."""
    example = json.loads((DEMO / "demo" / "example.json").read_text())
    candidates = example.pop("candidates")

    first = FIRST_NEW_USER + reading * NEW_USERS

    def body(**fields: Any) -> bytes:
        return orjson.dumps(example | fields)

    return {
        ("/rank", "known user"): [body(candidates=candidates)],
        ("/retrieve", "known user"): [body(k=200)],
        ("/recommend", "known user"): [body(k=200, top_k=20)],
        ("/recommend", "new user"): [
            body(k=200, top_k=20, user_id=str(user)) for user in range(first, first + NEW_USERS)
        ],
    }


def read(server: Server, path: str, asked: Sequence[bytes], seconds: float) -> dict[str, float]:
    """Milliseconds at one connection: medians of each stage, `total`, `outside` of the stages, and the `rest` beside what is computed."""
    reading = wrk.read(server.url + path, asked, 1, seconds, says_stages=True)
    if reading.bad_per_s:
        raise ValueError(f"{path} was refused {reading.bad_per_s:.0f} times a second")
    stages = {stage: reading.stages_ms.get(stage, 0.0) for stage in STAGES}
    rest = reading.p50_ms - sum(stages[stage] for stage in COMPUTED)
    return stages | {"outside": reading.p50_ms - sum(stages.values()), "total": reading.p50_ms, "rest": rest}


def measure(rounds: int, seconds: float, threads: int, before: Path | None) -> dict[tuple[str, str, str], Times]:
    """A reading a round of each side, by commit, path and user; a server that is not asked stands still."""
    settings: dict[str, Any] = {
        "checkpoint": DEMO / "demo",
        "retrieval__checkpoint": DEMO / "demo-towers",
        "retrieval__corpus": DEMO / "demo-posts",
        "threads": threads,
    }
    found: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    with ExitStack() as stack:
        roots = {"now": ROOT} | ({"before": before} if before else {})
        servers = {name: stack.enter_context(ranking_server(root=root, **settings)) for name, root in roots.items()}
        for server in servers.values():
            server.pause()
        for index in range(rounds + 1):
            for (path, user), asked in bodies(index).items():
                for name, server in servers.items():
                    server.resume()
                    times = read(server, path, asked, seconds)
                    server.pause()
                    for key, value in times.items() if index else ():  # the first one warms up
                        found.setdefault((name, path, user), {}).setdefault(key, []).append(value)
    return dict(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 whether or not the target is met: the table says so."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.recommend", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each reading")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--before", type=Path, help="a checkout of another commit")
    options = parser.parse_args(arguments)
    found = measure(options.rounds, options.seconds, options.threads, options.before)
    title = f"ms at one connection, wrk, p50; rest = total − ({' + '.join(COMPUTED)}), target {TARGET_MS:g}"
    table = Table("", *STAGES, "outside", "total", "rest", "rest ÷ before", title=title)
    for (name, path, user), times in found.items():
        cells = [f"{Figure.of(times[key]).median:.3f}" for key in (*STAGES, "outside", "total")]
        against = found.get(("before", path, user)) if name == "now" else None
        share = "" if against is None else _spread(ratio(times["rest"], against["rest"]))
        table.add_row(f"{path}, {user}, {name}", *cells, _spread(Figure.of(times["rest"])), share)
    Console(width=190).print(table)
    rows = [{"commit": name, "path": path, "user": user, **times} for (name, path, user), times in found.items()]
    run = machine() | ({"before": commit(options.before)} if options.before else {})
    print(json.dumps({**run, "target_ms": TARGET_MS, "rows": rows}))
    return 0


def _spread(figure: Figure) -> str:
    return f"{figure.median:.2f} ({figure.low:.2f} … {figure.high:.2f})"


if __name__ == "__main__":
    sys.exit(main())
