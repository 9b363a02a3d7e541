"""`make bench`: engines beside their plain definition and the limit of the machine, HTTP beside another checkout, in turns, and limits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from loadtest.rows import Row, publish


def measure(
    only: Annotated[
        Literal["all", "engines", "codes", "http", "batches", "served", "limits"], typer.Option(help="What to measure.")
    ] = "all",
    before: Annotated[
        Path | None, typer.Option(help="Another checkout, with its own .venv or ours, for HTTP in turns.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Readings of each side.")] = 9,
    seconds: Annotated[float, typer.Option(help="Length of one reading of throughput.")] = 3.0,
    dtype: Literal["auto", "bfloat16", "float32"] = "auto",
    workers: Annotated[
        int, typer.Option(help="Also: this many uvicorn workers before one engine, beside one process.")
    ] = 0,
) -> None:
    """Each figure is a ratio or a median with its spread. Exit code 0 even if a target is missed."""
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        print(f"{row.what}: {row.figure:.3g} {row.unit}", file=sys.stderr, flush=True)

    if only in ("all", "engines"):
        from loadtest.bench.engines import engine_rows

        for row in engine_rows(dtype, rounds):
            add(row)
    if only in ("all", "codes"):
        from loadtest.bench.engines import code_rows

        for row in code_rows(dtype, rounds):
            add(row)
    if only in ("all", "http"):
        from loadtest.bench.http import http_rows

        for row in http_rows(before, rounds, seconds, workers):
            add(row)
    if only in ("all", "batches"):
        from loadtest.bench.http import batch_rows

        for row in batch_rows(before, rounds, seconds, workers or 2):
            add(row)
    if only in ("all", "served"):
        from loadtest.bench.served import served_rows

        for row in served_rows(rounds, seconds):
            add(row)
    if only in ("all", "limits"):
        from loadtest.bench.limits import limit_rows

        for row in limit_rows(rounds, seconds):
            add(row)
    publish(rows, rounds=rounds, before=None if before is None else str(before.name))
