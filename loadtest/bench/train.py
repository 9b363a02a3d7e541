"""The trainer beside a bare loop, and the memory of training from a log on disk."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch

from loadtest.bench.offline import copies
from loadtest.machine import ROOT
from loadtest.matrix import Row, publish
from loadtest.timing import Figure, alternate, ratio
from weights.training.examples import Examples, training_batch
from weights.training.log import write_log
from weights.training.run import reproducible, split
from weights.training.settings import TrainSettings, demo_config
from weights.training.trainer import Trainer
from weights.training.world.settings import WorldSettings
from weights.training.world.simulate import simulate

STEPS, BATCH, IMPRESSIONS = 10, 32, 24  # of a reading; requests of a step; posts of a request
MEMORY = """
import sys
from pathlib import Path
from weights.training.examples import Examples
from weights.training.log import read_log
from weights.training.run import train
from weights.training.settings import TrainSettings, demo_config
from weights.training.sorted_log import open_sorted, sort_log
log = Path(sys.argv[2])
if sys.argv[1] == "disk":
    sort_log(log, log.with_name(log.name + "-sorted"))
    log = open_sorted(log.with_name(log.name + "-sorted"))
else:
    log = read_log(log)
train(log, demo_config(len(log.action_names)), TrainSettings(epochs=10 * 32 / len(log) * 24, validation_requests=32))
"""


def speed_row(users: int, rounds: int) -> Row:
    """The trainer's impressions a second ÷ those of a loop that has its batches and only goes forward and backward."""
    log = simulate(WorldSettings(users=users, new_users=0)).log
    settings = TrainSettings(epochs=100)
    examples = Examples(log, demo_config(len(log.action_names)))
    trainer = Trainer(examples, *split(len(examples), 64), settings)
    trainer.advance()
    shares = {name: getattr(settings, name) for name in ("fresh_user_share", "fresh_post_share", "max_candidates")}
    batches = [
        training_batch(examples, trainer.train[step * BATCH :][:BATCH], np.random.default_rng(step), **shares)
        for step in range(STEPS)
    ]

    def bare() -> None:
        for batch, labels in batches:
            trainer.optimizer.zero_grad()
            trainer.plain(batch, labels).backward()

    def trained() -> None:
        for _ in range(STEPS):
            trainer.advance()

    with reproducible(settings.threads):
        seconds = alternate({"trainer": trained, "bare": bare}, rounds)
    sides = [Figure.of(values).scaled(1 / STEPS) for values in seconds.values()]
    rates = " ÷ ".join(f"{BATCH * IMPRESSIONS / side.median:.0f}" for side in sides)
    name = f"trainer ÷ bare loop, impressions a second ({rates})"
    return Row.of(name, ratio(seconds["bare"], seconds["trainer"]), "", 0.75, at_least=True, sides=sides)


def demo_log_times(times: int, directory: Path) -> int:
    """The log of a world of the demo's size, so many times over with other users, as files in a directory; its rows."""
    write_log(one := directory.with_name("one.parquet"), simulate(WorldSettings()).log)
    copies(one, times, directory)
    return times * int(pq.read_metadata(one).num_rows)


def memory_rows(times: int) -> list[Row]:
    """The most memory of its own that a process takes to sort a log and begin to train on it, and to train on it in memory."""
    with tempfile.TemporaryDirectory() as place:
        small, large = Path(place, "small"), Path(place, "large")
        demo_log_times(1, small)
        rows = demo_log_times(times, large)
        disk, more, held = own_memory("disk", small), own_memory("disk", large), own_memory("memory", large)
    name = f"a log of {rows} impressions on disk ({more:.0f} MiB) ÷ "
    return [
        Row.of(f"{name}one of {rows // times} ({disk:.0f} MiB)", Figure.of([more / disk]), "", 1.5),
        Row.of(f"{name}the same in memory ({held:.0f} MiB)", Figure.of([more / held]), "", 0.5),
    ]


def own_memory(how: str, log: Path) -> float:
    """MiB, at most. Pages of a mapped file are not counted: the kernel takes them back when it needs them."""
    run, most = subprocess.Popen([sys.executable, "-c", MEMORY, how, str(log)], cwd=ROOT), 0
    while run.poll() is None:
        found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{run.pid}/status").read_text())
        most = max(most, int(found[1]) if found else 0)
        time.sleep(0.01)
    if run.returncode:
        raise RuntimeError(f"training from {how} ended with {run.returncode}")
    return most / 1024


def measure(rounds: int = 7, times: int = 10) -> None:
    """The trainer beside a bare loop, and its memory with the demo's log on disk, so many `times` over; 0 leaves either out."""
    done = [speed_row(200, rounds)] if rounds else []
    publish(done + (memory_rows(times) if times else []), {"torch": torch.__version__})
