"""`python -m loadtest.bench.offline`: offline scoring beside the engine alone, and the memory of a job as its log grows tenfold."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from rich.console import Console

from loadtest.bench.table import Row, show
from loadtest.machine import ROOT, machine
from loadtest.timing import Figure, ratio
from model.create import EngineOptions
from weights.checkpoint import load_checkpoint
from weights.scoring.job import PARTITION_ROWS, partition_of, score_log
from weights.scoring.scorer import Scorer, batches
from weights.training.log import write_log
from weights.training.world.settings import WorldSettings
from weights.training.world.simulate import simulate

CHECKPOINT = ROOT / "weights" / "demo"
PARTITIONS = 4
JOB = """
import re, sys, time
from pathlib import Path
from model.create import EngineOptions
from weights.checkpoint import load_checkpoint
from weights.scoring.job import score_log
from weights.scoring.scorer import Scorer
scorer = Scorer(load_checkpoint(sys.argv[1]), EngineOptions())
began = time.perf_counter()
rows = score_log(Path(sys.argv[2]), Path(sys.argv[3]), scorer, partitions=int(sys.argv[4]))
seconds, most = time.perf_counter() - began, re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())
print(rows, seconds, most[1])
"""


def speed_rows(log: Path, rounds: int, threads: int) -> list[Row]:
    """The engine's time for the forwards of a job ÷ the time of the whole job, from Parquet to Parquet: by the clock, and of processors."""
    scorer = Scorer(load_checkpoint(CHECKPOINT), EngineOptions(threads=threads))
    table = pq.read_table(log)
    where = partition_of(table["user_id"].to_numpy(), PARTITIONS)
    forwards = [
        items for part in range(PARTITIONS) for items in batches(scorer.prepare(table.filter(pa.array(where == part))))
    ]

    def engine_alone() -> None:
        for items in forwards:
            scorer.engine.forward(items)

    def job() -> None:
        with tempfile.TemporaryDirectory() as out:
            score_log(log, Path(out), scorer, partitions=PARTITIONS)

    sides: dict[str, tuple[Callable[[], None], list[tuple[float, float]]]] = {
        "engine": (engine_alone, []),
        "job": (job, []),
    }
    for turn in range(rounds + 1):
        for side, readings in sides.values():
            scorer.engine.warm_up()  # empties its cache
            began = time.perf_counter(), time.process_time()
            side()
            took = time.perf_counter() - began[0], time.process_time() - began[1]
            readings += [took] * (turn > 0)
    scorer.close()
    rows = []
    for place, what in enumerate(("rows a second ÷ the engine's own", "rows a processor's second ÷ the engine's own")):
        engine, whole = ([reading[place] for reading in readings] for _, readings in sides.values())
        name = f"{len(table)} impressions, {threads} threads: {what}"
        medians = [1e3 * Figure.of(seconds).median for seconds in (whole, engine)]
        rows.append(Row(name, ratio(engine, whole), "", 0.9, True, *medians))
    return rows


def job_of(log: Path, out: Path, partitions: int) -> dict[str, float]:
    """Rows, seconds and the most memory, in MiB, of a job in a process of its own."""
    command = [sys.executable, "-c", JOB, str(CHECKPOINT), str(log), str(out), str(partitions)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    return {"rows": int(done[0]), "seconds": float(done[1]), "MiB": int(done[2]) / 1024}


def copies(log: Path, times: int, directory: Path) -> None:
    """The log so many times over, each time with other users and requests."""
    directory.mkdir()
    table = pq.read_table(log)
    for copy in range(times):
        moved = table
        for name in ("user_id", "request_id"):
            column = pc.bit_wise_xor(table[name], pa.scalar(copy << 40, pa.uint64()))
            moved = moved.set_column(moved.schema.get_field_index(name), name, column)
        pq.write_table(moved, directory / f"{copy:03}.parquet", compression="zstd")


def memory_rows(rows: int) -> tuple[list[Row], list[dict[str, float]]]:
    """Jobs over a world's log, and over ten times as much, with partitions of equal size, no larger than a job's own."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        users = max(40, round(rows / 10 / 1250))  # of about 1 250 impressions each
        parts = -(-rows // 10 // PARTITION_ROWS)
        write_log(place / "one.parquet", simulate(WorldSettings(users=users, new_users=0)).log)
        for name, times in (("less", 1), ("more", 10)):
            copies(place / "one.parquet", times, place / name)
        less, more = (
            job_of(place / name, place / f"{name}-out", parts)
            for name, parts in (("less", parts), ("more", 10 * parts))
        )
    name = f"{more['rows']:.0f} impressions ÷ {less['rows']:.0f}: most memory of the job"
    return [Row(name, Figure.of([more["MiB"] / less["MiB"]]), "", 2.0, False)], [less, more]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 whether or not the targets are met: the table says so."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.offline", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, default=1_000_000, help="impressions of the larger log; 0 leaves it out")
    options = parser.parse_args(arguments)
    began, console = time.perf_counter(), Console(width=150)
    with tempfile.TemporaryDirectory() as directory:
        write_log(path := Path(directory) / "log.parquet", simulate(WorldSettings(users=200, new_users=0)).log)
        done = speed_rows(path, options.rounds, options.threads)
    jobs: list[Any] = []
    if options.rows:
        further, jobs = memory_rows(options.rows)
        done += further
    show(done, console)
    for job in jobs:
        console.print(f"{job['rows']} impressions: {job['seconds']:.1f} s, {job['MiB']:.0f} MiB at most")
    run = {**machine(), "torch": torch.__version__, "threads": options.threads, "took_s": time.perf_counter() - began}
    print(json.dumps({**run, "rows": [row.to_dict() for row in done], "jobs": jobs}, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
