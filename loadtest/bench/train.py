"""`python -m loadtest.bench.train`: two training processes beside one, killed, resumed; the trainer beside a bare loop; logs on disk."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from loadtest.bench.offline import copies
from loadtest.bench.table import Row, show
from loadtest.machine import ROOT, machine
from loadtest.servers.launch import start_process
from loadtest.timing import Figure, alternate, ratio
from weights.training.examples import Examples, training_batch
from weights.training.log import write_log
from weights.training.run import reproducible, split
from weights.training.settings import TrainSettings, demo_config
from weights.training.state import STATE_NAME
from weights.training.trainer import Trainer
from weights.training.world.settings import WorldSettings
from weights.training.world.simulate import simulate

WORKER = """
import os
from pathlib import Path
from weights.commands.checkpoints import app
from weights.training.processes import Processes
Path(os.environ["PIDS"], os.environ.get("RANK", "0")).write_text(str(os.getpid()))
if os.environ["CONTROL"] == "tables":  # their gradients stay where they are, and nobody looks
    Processes.exchange = lambda self, tables, batch: None
    Processes.agree = lambda self, facts: None
app()
"""
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


class Runs:
    """Training runs of one log by the command line, in processes of their own. Each leaves its state in a directory of its name."""

    def __init__(self, place: Path, log: Path, steps: int) -> None:
        self.place, self.log, self.steps = place, log, steps
        (place / "worker.py").write_text(WORKER)
        requests = split(len(np.unique(pq.read_table(log)["request_id"])), 64)[0].size
        self.settings = [f"epochs={steps * 16 / requests}", "batch_requests=16", "warmup_steps=20"]
        self.settings += ["evaluate_every=20", "validation_requests=64"]

    def start(self, name: str, processes: int, control: str = "", resume: bool = False) -> subprocess.Popen[str]:
        words = [word for setting in self.settings for word in ("--set", setting)] + ["--resume"] * resume
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "--"]
        out = self.place / f"{name}-checkpoint"
        arguments = ["train", "--log", self.log, "--out", out, "--state", self.place / name, "--replace", *words]
        (self.place / f"{name}-pids").mkdir(exist_ok=True)
        environment = os.environ | {
            "CONTROL": control,
            "PIDS": str(self.place / f"{name}-pids"),
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, *launcher * (processes > 1), *map(str, [self.place / "worker.py", *arguments])]
        return start_process(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def finish(self, name: str, processes: int, control: str = "", resume: bool = False) -> None:
        run = self.start(name, processes, control, resume)
        _, errors = run.communicate()
        if run.returncode:
            raise RuntimeError(f"the run {name!r} ended with {run.returncode}: {errors}")

    def state(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.place / name / STATE_NAME)


def process_rows(runs: Runs) -> list[Row]:
    """Two processes against one; with a fault planted; and killed halfway, resumed with and without the optimiser's moments."""
    runs.finish("one", 1)
    runs.finish("two", 2)
    runs.finish("control", 2, "tables")
    runs.finish("killed", 2, resume=kill_halfway(runs, "killed"))
    kill_halfway(runs, "forgetful")
    kept = runs.place / "forgetful" / STATE_NAME
    forget_moments(kept)
    runs.finish("forgetful", 2, resume=True)
    alone = runs.state("one")["curve"][:, 1]

    def apart(name: str) -> Figure:
        return Figure.of([float(((runs.state(name)["curve"][:, 1] - alone).abs() / alone).max())])

    def differing(name: str) -> Figure:
        expected, found = runs.state("two"), runs.state(name)
        return Figure.of([sum(not torch.equal(expected[key], found[key]) for key in expected if key != "curve")])

    steps = len(alone)
    return [
        Row(
            f"2 processes against 1, {steps} steps: largest relative difference of a loss",
            apart("two"),
            "",
            1e-5,
            False,
        ),
        Row("control: the same without the exchange of the tables' gradients", apart("control"), "", 1e-5, True),
        Row("a process killed and the run resumed: tensors that differ", differing("killed"), "", 0, False),
        Row("control: the same without the optimiser's moments", differing("forgetful"), "", 1, True),
    ]


def kill_halfway(runs: Runs, name: str) -> bool:
    """Start two processes, and `kill -9` the second when half of the steps are in the state."""
    run = runs.start(name, 2)
    while run.poll() is None:
        saved = runs.place / name / STATE_NAME
        if saved.exists() and len(load_file(saved)["curve"]) >= runs.steps // 2:
            os.kill(int((runs.place / f"{name}-pids" / "1").read_text()), signal.SIGKILL)
            break
        time.sleep(0.05)
    _, errors = run.communicate()
    if not run.returncode or "-9" not in errors:
        raise RuntimeError(f"the run {name!r} was to be killed and ended with {run.returncode}: {errors}")
    return True


def forget_moments(state: Path) -> None:
    """Set the first moments of a state to 0."""
    with torch.no_grad():
        tensors = {
            name: torch.zeros_like(t) if name.startswith("exp_avg.") else t for name, t in load_file(state).items()
        }
    length = int.from_bytes(state.read_bytes()[:8], "little")
    header = json.loads(state.read_bytes()[8 : 8 + length])["__metadata__"]
    save_file(tensors, state, metadata=header)


def speed_row(log_users: int, rounds: int) -> Row:
    """The trainer's impressions a second ÷ those of a loop that has its batches and only goes forward and backward."""
    log = simulate(WorldSettings(users=log_users, new_users=0)).log
    settings = TrainSettings(epochs=100)
    examples = Examples(log, demo_config(len(log.action_names)))
    trainer = Trainer(examples, *split(len(examples), 64), settings)
    trainer.advance()
    shares = {name: getattr(settings, name) for name in ("fresh_user_share", "fresh_post_share", "max_candidates")}
    steps = 10
    batches = [
        training_batch(examples, trainer.train[step * 32 : (step + 1) * 32], np.random.default_rng(step), **shares)
        for step in range(steps)
    ]

    def bare() -> None:
        for batch, labels in batches:
            trainer.optimizer.zero_grad()
            trainer.plain(batch, labels).backward()

    def trained() -> None:
        for _ in range(steps):
            trainer.advance()

    with reproducible(settings.threads):
        seconds = alternate({"trainer": trained, "bare": bare}, rounds)
    impressions = steps * 32 * 24
    rates = {name: impressions / Figure.of(values).median for name, values in seconds.items()}
    name = f"trainer ÷ bare loop, impressions a second ({rates['trainer']:.0f} ÷ {rates['bare']:.0f})"
    sides = {name: 1e3 / steps * Figure.of(values).median for name, values in seconds.items()}
    return Row(name, ratio(seconds["bare"], seconds["trainer"]), "", 0.75, True, sides["trainer"], sides["bare"])


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
        Row(f"{name}one of {rows // times} ({disk:.0f} MiB)", Figure.of([more / disk]), "", 1.5, False),
        Row(f"{name}the same in memory ({held:.0f} MiB)", Figure.of([more / held]), "", 0.5, False),
    ]


def own_memory(how: str, log: Path) -> float:
    """MiB, at most. Pages of a mapped file are not counted: the kernel takes them back when it needs them."""
    run, most = start_process([sys.executable, "-c", MEMORY, how, str(log)], cwd=ROOT), 0
    while run.poll() is None:
        found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{run.pid}/status").read_text())
        most = max(most, int(found[1]) if found else 0)
        time.sleep(0.01)
    if run.returncode:
        raise RuntimeError(f"training from {how} ended with {run.returncode}")
    return most / 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 whether or not the targets are met: the table says so."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.train", description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="of the runs on several processes; 0 leaves them out")
    parser.add_argument("--rounds", type=int, default=7, help="of the trainer and the bare loop; 0 leaves them out")
    parser.add_argument("--times", type=int, default=10, help="the demo's log so many times over; 0 leaves it out")
    options = parser.parse_args(arguments)
    began, done = time.perf_counter(), []
    if options.steps:
        with tempfile.TemporaryDirectory() as place:
            write_log(log := Path(place, "log.parquet"), simulate(WorldSettings(users=200, new_users=0)).log)
            done += process_rows(Runs(Path(place), log, options.steps))
    if options.rounds:
        done.append(speed_row(200, options.rounds))
    if options.times:
        done += memory_rows(options.times)
    show(done, Console(width=150))
    run = {**machine(), "torch": torch.__version__, "took_s": time.perf_counter() - began}
    print(json.dumps({**run, "rows": [row.to_dict() for row in done]}, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
