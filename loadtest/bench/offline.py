"""Offline work: scoring a log against the engine alone, and its memory on a log ten times as large."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from loadtest.machine import DEMO, ROOT
from loadtest.matrix import Row, publish
from loadtest.timing import Figure, ratio
from model.create import EngineOptions
from weights.checkpoint import load_checkpoint
from weights.scoring.job import PARTITION_ROWS, partition_of, score_log
from weights.scoring.scorer import Scorer, batches
from weights.training.log import write_log
from weights.world.settings import WorldSettings
from weights.world.simulate import simulate

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
    """Time of the engine for a job's forwards ÷ time of the whole job, Parquet to Parquet: wall clock, then processor time."""
    scorer = Scorer(load_checkpoint(DEMO), EngineOptions(threads=threads))
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

    sides: tuple[Callable[[], None], ...] = (job, engine_alone)
    readings: list[list[tuple[float, float]]] = [[], []]
    for turn in range(rounds + 1):
        for side, found in zip(sides, readings, strict=True):
            scorer.engine.warm_up()  # empties its cache
            began = time.perf_counter(), time.process_time()
            side()
            took = time.perf_counter() - began[0], time.process_time() - began[1]
            found += [took] * (turn > 0)
    scorer.close()
    rows = []
    for place, what in enumerate(("rows a second ÷ the engine's own", "rows a processor's second ÷ the engine's own")):
        whole, engine = ([reading[place] for reading in found] for found in readings)
        name = f"{len(table)} impressions, {threads} threads: {what}"
        pair = [Figure.of(whole), Figure.of(engine)]
        rows.append(Row.of(name, ratio(engine, whole), "", 0.9, at_least=True, sides=pair))
    return rows


def copies(log: Path, times: int, directory: Path) -> None:
    """Write `times` copies of the log, each with other user and request ids."""
    directory.mkdir()
    table = pq.read_table(log)
    for copy in range(times):
        moved = table
        for name in ("user_id", "request_id"):
            column = pc.bit_wise_xor(table[name], pa.scalar(copy << 40, pa.uint64()))
            moved = moved.set_column(moved.schema.get_field_index(name), name, column)
        pq.write_table(moved, directory / f"{copy:03}.parquet", compression="zstd")


def memory_row(rows: int) -> Row:
    """Peak memory of a job on a log ÷ that on a tenth of it; partitions have equal size, at most a job's default."""
    found: list[tuple[int, float]] = []
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        users = max(40, round(rows / 10 / 1250))  # about 1 250 impressions per user
        parts = -(-rows // 10 // PARTITION_ROWS)
        write_log(place / "one.parquet", simulate(WorldSettings(users=users, new_users=0)).log)
        for name, times in (("less", 1), ("more", 10)):
            copies(place / "one.parquet", times, place / name)
            arguments = [DEMO, place / name, place / f"{name}-out", times * parts]
            command = [sys.executable, "-c", JOB, *map(str, arguments)]
            done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
            found.append((int(done[0]), int(done[2]) / 1024))
            print(f"{done[0]} impressions: {float(done[1]):.1f} s, {found[-1][1]:.0f} MiB at most")
    (few, less), (many, more) = found
    return Row.of(f"{many} impressions ÷ {few}: most memory of the job", Figure.of([more / less]), "", 2.0)


def measure(rounds: int = 7, threads: int = 0, rows: int = 1_000_000) -> None:
    """Offline scoring against the engine alone, and memory as the log grows tenfold to `rows` impressions (0: no memory row)."""
    threads = threads or torch.get_num_threads()
    with tempfile.TemporaryDirectory() as directory:
        write_log(path := Path(directory) / "log.parquet", simulate(WorldSettings(users=200, new_users=0)).log)
        done = speed_rows(path, rounds, threads)
    if rows:
        done.append(memory_row(rows))
    publish(done, {"torch": torch.__version__, "threads": threads})
