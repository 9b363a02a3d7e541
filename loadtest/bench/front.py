"""`python -m loadtest.bench.front`: the table of the thin path in one alternated run, appended to the history; one JSON line last.

In every round each part takes one reading of all of its sides, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from loadtest.bench.hop import Hop
from loadtest.bench.impatience import BARE, FEW, LOGGED, MANY, Impatience, RefusalCost, example
from loadtest.bench.long_bodies import LongBodies
from loadtest.bench.rates import COLUMNS, LARGE, SMALL, Rates
from loadtest.bench.scaling import Scaling
from loadtest.bench.service import first_visits, mini_checkpoint, reply_rows
from loadtest.bench.start import start_row
from loadtest.bench.table import Row, append_history, show
from loadtest.generate import wrk
from loadtest.machine import ROOT, commit, machine
from loadtest.servers.launch import Server, ranking_server
from loadtest.timing import Figure

RESULTS = ROOT / "loadtest" / "results"
BLOCKING_CLIENTS = 100
USERS = 2000  # in turn


class Part(Protocol):
    """Some rows of the table."""

    def read(self) -> None:
        """One round."""
        ...

    def rows(self) -> list[Row]:
        """What all rounds gave."""
        ...


class Replies:
    """The server's own time to write a reply of 512 candidates, by wire."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.found: list[list[Row]] = []

    def read(self) -> None:
        """Two hundred requests on each wire."""
        self.found.append(list(reply_rows(self.server.target)))

    def rows(self) -> list[Row]:
        """The medians of the rounds."""
        return [
            Row(
                rounds[0].name, Figure.of([row.figure.median for row in rounds]), "ms", rounds[0].target, at_least=False
            )
            for rounds in zip(*self.found, strict=True)
        ]


def parts(stack: ExitStack, options: argparse.Namespace) -> Iterator[Part]:
    """All of the table, with the servers that they need."""
    one = stack.enter_context(ranking_server(**LOGGED))
    small, seconds = [example()], options.seconds
    if wrk.IS_INSTALLED:
        sides = {"ours": one, "fronts": stack.enter_context(ranking_server(**LOGGED, fronts=options.fronts))}
        if options.before:
            sides["before"] = stack.enter_context(ranking_server(root=options.before, **LOGGED))
        large, columns = (first_visits(one.target, 64, USERS, as_objects=objects) for objects in (True, False))
        rates = Rates(stack, sides, {SMALL: small, LARGE: large, COLUMNS: columns}, seconds)
        yield rates
        yield Impatience({"now": one, BARE: rates.sides[SMALL][BARE]}, small[0], seconds, (FEW, MANY))
        yield RefusalCost(stack, small[0], seconds)
        yield Scaling(stack, options.fronts, seconds)
    yield LongBodies(one, -(-BLOCKING_CLIENTS // options.rounds))
    yield Replies(stack.enter_context(ranking_server(checkpoint=stack.enter_context(mini_checkpoint()))))
    yield Hop(stack, seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 whether or not the targets are met: the table says so."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.front", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one reading")
    parser.add_argument("--fronts", type=int, default=2, help="so many, beside one process")
    parser.add_argument(
        "--before", type=Path, help="a checkout of another commit: one process must not be slower, nor import more"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="where history.csv is")
    options = parser.parse_args(arguments)
    console, run = Console(stderr=True), {**machine(), "torch": importlib.metadata.version("torch")}
    rows: list[Row] = []
    figures: dict[str, Any] = {}
    with ExitStack() as stack:
        found = list(parts(stack, options))
        for number in range(options.rounds):
            for part in found:
                part.read()
                console.print(f"round {number + 1}/{options.rounds}: {type(part).__name__}")
        for part in found:
            rows += part.rows()
            if isinstance(part, Rates | Impatience):
                figures[type(part).__name__.lower()] = part.figures()
    if options.before:
        rows.append(start_row(options.before, **LOGGED))
        run["before"] = commit(options.before)
    append_history(options.results / "history.csv", rows, run)
    show(rows, Console(width=150))
    if not wrk.IS_INSTALLED:
        print("wrk is not installed: rates, goodput, the cost of refusals and several fronts were not measured.")
    print(json.dumps({**run, "rows": [row.to_dict() for row in rows], **figures}, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
