"""`python -m loadtest.bench`: prints the targets table, draws the cost curves, appends to the history, ends with one JSON line."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import torch
from rich.console import Console

from loadtest.bench import curves, engines, service
from loadtest.bench.table import Row, append_history, show
from loadtest.bits import small_config
from loadtest.machine import ROOT, machine
from model.native.build import Vectors
from model.native.engine import NativeEngine
from model.synthetic import random_ranker

RESULTS = ROOT / "loadtest" / "results"


def rows(dtype: torch.dtype, options: argparse.Namespace) -> Iterator[Row]:
    """Every row of the table, as it is measured."""
    if options.vectors != "auto":
        yield from engines.vector_rows(options.rounds, options.vectors)
    yield from engines.speed_rows(dtype, options.rounds, options.vectors)
    if options.vectors == "auto":
        yield from engines.preset_rows(dtype, options.rounds)
    yield from engines.product_rows(dtype, options.rounds, options.vectors)
    yield engines.growth_row(dtype, options.rounds, options.vectors)
    yield engines.bits_row(options.compositions, options.vectors)
    if not options.engine_only and options.vectors == "auto":
        yield from service.service_rows(str(dtype).removeprefix("torch."), options.seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 whether or not the targets are met: the table says so."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="readings of each engine side")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of one throughput reading")
    parser.add_argument("--compositions", type=int, default=2000, help="random compositions for the row on bits")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument(
        "--vectors", choices=get_args(Vectors), default="auto", help="hold our engine and torch to these"
    )
    parser.add_argument("--engine-only", action="store_true", help="leave the HTTP rows out, as with --vectors")
    parser.add_argument("--no-curves", action="store_true", help="leave the cost curves out")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where history.csv and the curves go")
    options = parser.parse_args(arguments)
    if options.vectors == "avx2" and not os.environ.get("ATEN_CPU_CAPABILITY"):  # torch reads it as it is imported
        command = [sys.executable, "-m", "loadtest.bench", *(sys.argv[1:] if arguments is None else arguments)]
        held = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
        return subprocess.run(command, env=held, check=False).returncode
    console = Console(stderr=True)
    chosen = (
        NativeEngine(random_ranker(small_config()), vectors=options.vectors).info.dtype
        if options.dtype == "auto"
        else options.dtype
    )
    dtype: torch.dtype = getattr(torch, chosen)
    run = {
        **machine(),
        "torch": torch.__version__,
        "dtype": chosen,
        "threads": torch.get_num_threads(),
        "vectors": options.vectors,
    }
    done = []
    for row in rows(dtype, options):
        console.print(f"{row.name}: {row.figure.median:.3g} {row.unit} ({'met' if row.met else 'missed'})")
        done.append(row)
    options.results.mkdir(parents=True, exist_ok=True)
    points = (
        [] if options.no_curves or options.vectors != "auto" else curves.measure(dtype, max(options.rounds // 3, 3))
    )
    if points:
        curves.draw(points, options.results / "cost-curves.png")
        (options.results / "cost-curves.json").write_text(json.dumps(curves.as_numbers(points), indent=1) + "\n")
    append_history(options.results / "history.csv", done, run)
    show(done, Console(width=150))
    print(json.dumps({**run, "rows": [row.to_dict() for row in done]}, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
