"""The first half hour on a card: guarded phases in separate processes, JSON lines that survive, a table, and a last JSON line.

`--device cpu --tiny` tries everything without a card. docs/gpu.md explains the output.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from loadtest.geometries import GEOMETRIES
from loadtest.gpu.card import Card
from loadtest.gpu.faults import FAULTS
from loadtest.gpu.phases import BISECT, Phase, all_phases
from loadtest.gpu.table import Record
from loadtest.machine import commit

RESERVED = 20  # seconds kept for summaries and for copying results back
EXIT_SECONDS = 5.0  # of a process that was killed


class Stop:
    """Ends the bench at a signal, but not while a process is being started, which would then run on unnoticed."""

    def __init__(self) -> None:
        self.is_held = False
        self._number = 0

    def __call__(self, number: int, _frame: object) -> None:
        self._number = number
        if not self.is_held:
            sys.exit(128 + number)

    def release(self) -> None:
        """Allow signals again. Raises SystemExit if one came meanwhile."""
        self.is_held = False
        if self._number:
            sys.exit(128 + self._number)


STOP = Stop()


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes and few readings: a trial of the bench itself"
    )
    parser.add_argument(
        "--geometries", nargs="+", choices=list(GEOMETRIES), default=["mini", "seed", "flagship", "nano"]
    )
    parser.add_argument("--phases", nargs="+", help="only phases whose names begin with these")
    parser.add_argument("--seconds", type=float, default=1800, help="total time; the last 20 s are kept for results")
    parser.add_argument("--phase-seconds", type=float, help="the most that any phase may take")
    results = Path(os.environ.get("OUT", "loadtest/results"))
    parser.add_argument("--out", type=Path, default=results, help="directory for all results: $OUT")
    parser.add_argument("--fault", choices=FAULTS, default="", help="plant one, to see that it is found and named")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # runs one phase in this process, with its records in --log
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(packed=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the bench. Return 0 if every phase ran without a problem, 2 without a card, else 1."""
    options = arguments(argv)
    if options.run:
        return run_phase(options)
    options.log = options.out / f"gpu-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.jsonl"
    started = time.monotonic()
    ended: dict[str, str] = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, STOP)
    try:
        if options.device == "cuda" and not torch.cuda.is_available():
            print("no CUDA device here: nothing was measured (try --device cpu --tiny)", file=sys.stderr)
            return 2
        options.out.mkdir(parents=True, exist_ok=True)
        chosen = {
            name: phase
            for name, phase in all_phases(options.geometries).items()
            if not options.phases or name.startswith(tuple(options.phases))
        }
        ended |= dict.fromkeys(chosen, "stopped")  # what a phase keeps if a signal ends the bench before it
        run_all(options, chosen, ended, started)
    finally:
        report = summary(options, ended, time.monotonic() - started)
        for line in table(options.log):
            print(line)
        print(json.dumps(report), flush=True)
    return 0 if report["ok"] else 1


def run_all(options: argparse.Namespace, phases: dict[str, Phase], ended: dict[str, str], started: float) -> None:
    """Run one phase after the other within the remaining time, then `bisect` after a problem. Record in `ended` how each ended."""
    queue = list(phases.items())
    for name, phase in queue:
        left = options.seconds - (time.monotonic() - started) - RESERVED
        blocking = {"CUDA_LAUNCH_BLOCKING": "1"} if phase is BISECT else {}
        limit = min(options.phase_seconds or phase.seconds, left)
        ended[name] = run_apart(options, name, limit, **blocking) if limit > 1 else "left out"
        print(f"{name:<16} {ended[name]}, {time.monotonic() - started:.1f} s since the start", flush=True)
        leave(options, summary(options, ended, time.monotonic() - started))
        if name == queue[-1][0] and phase is not BISECT and not set(ended.values()) <= {"ok", "left out"}:
            queue.append(("bisect", BISECT))


def leave(options: argparse.Namespace, report: Record) -> None:
    """Write the summary so far and Triton's compiled kernels next to the JSON lines. The kernels' archive is replaced atomically."""
    options.log.with_suffix(".json").write_text(json.dumps(report))
    cache = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    count = sum(1 for _ in cache.glob("*")) if cache.is_dir() else 0
    if options.device == "cuda" and count != options.packed:
        with tarfile.open(options.out / "part.tar.gz", "w:gz", compresslevel=1) as packed:
            packed.add(cache, ".")
        (options.out / "part.tar.gz").rename(options.out / "triton-cache.tar.gz")
        options.packed = count


def run_apart(options: argparse.Namespace, name: str, limit: float, **environment: str) -> str:
    """Run one phase in a separate process. Return how it ended: `ok`, `problems`, `failed: …`, `died by signal …` or `hung: …`."""
    command = [
        sys.executable,
        "-m",
        "loadtest.gpu",
        "--device",
        options.device,
        "--run",
        name,
        "--log",
        str(options.log),
    ]
    command += ["--tiny"] * options.tiny + (["--fault", options.fault] if options.fault else [])
    # measure compiled kernels, even if the caller uses the interpreter
    inherited = {variable: value for variable, value in os.environ.items() if variable != "TRITON_INTERPRET"}
    try:
        code, said = _finished(command, inherited | environment, limit)
    except subprocess.TimeoutExpired:
        end = f"hung: not done after {limit:.3g} s"
    else:
        words = (said.strip().splitlines() or ["no word"])[-1]
        end = {0: "ok", 1: "problems"}.get(code) or (
            f"failed: {words}" if code > 0 else f"died by signal {-code}: {words}"
        )
    if end.startswith(("hung", "died", "failed")):
        write(options.log, {"phase": name, "problem": end})
    return end


def _finished(command: list[str], environment: dict[str, str], limit: float) -> tuple[int, str]:
    """Exit code and standard error of a command. An exception during the wait kills the process and its children. One that does not end
    even then, as in a driver, is left behind."""
    STOP.is_held = True
    child = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        STOP.release()
        said = child.communicate(timeout=limit)[1]
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # and its compiler processes
        with suppress(subprocess.TimeoutExpired):
            child.wait(EXIT_SECONDS)
        raise
    return child.returncode, said


def run_phase(options: argparse.Namespace) -> int:
    """Run a phase in this process. Return 1 if it found a problem, 3 after an exception, else 0."""
    card = Card(torch.device(options.device), tiny=options.tiny, fault=options.fault)
    phase = BISECT if options.run == "bisect" else all_phases(list(GEOMETRIES))[options.run]
    shared = {
        "phase": options.run, "commit": commit(), "card": card.name, "tiny": card.tiny, "torch": torch.__version__,
        "cuda": torch.version.cuda, "triton": _triton(), "python": platform.python_version(),
    }  # fmt: skip
    problems = 0
    try:
        for record in phase.run(card, phase.geometry):
            problems += "problem" in record
            write(options.log, shared | {"at": round(time.time(), 1)} | record)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 3
    return int(problems > 0)


def write(log: Path, record: Record) -> None:
    """Append a line and flush it to disk, so that it survives whatever comes next."""
    with log.open("a") as file:
        file.write(json.dumps(record, default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(log: Path) -> list[Record]:
    """The records of a log, in order. A truncated line is left out."""
    records = []
    for line in log.read_text().splitlines() if log.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def table(log: Path) -> list[str]:
    """The figures and the problems as lines to print."""
    records = read(log)
    lines = [f"  {_line(record)}" for record in records if "figure" in record]
    return lines + [f"  ! {record['phase']}: {record['problem']}" for record in records if "problem" in record]


def summary(options: argparse.Namespace, ended: dict[str, str], seconds: float) -> Record:
    """The summary, printed as the last line and written to a file after every phase."""
    records = read(options.log)
    head = next((record for record in records if "card" in record), {})
    machine = next((record["nvidia_smi"] for record in records if "nvidia_smi" in record), None)
    return {
        "ok": bool(ended) and all(end == "ok" for end in ended.values()),
        "measured_on": head.get("card"), "driver": machine, "commit": head.get("commit"), "torch": head.get("torch"),
        "triton": head.get("triton"), "command": sys.argv[1:], "tiny": options.tiny, "fault": options.fault, "phases": ended,
        "figures": {record["name"]: record["figure"] for record in records if "figure" in record},
        "problems": [f"{record['phase']}: {record['problem']}" for record in records if "problem" in record][:20],
        "log": str(options.log), "seconds": round(seconds, 1),
    }  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    text = f"{row['name']:<62} {row['figure']:>12.4g} {row['unit']:<4}"
    if "low" in row:
        text += f" ({row['low']:.4g} to {row['high']:.4g})"
    if "beside" in row:
        text += f"  ({row['beside']})"
    if "target" in row:
        text += f"  target {row['target']:.4g}: {'met' if row.get('met') else 'missed'}"
    if "floor" in row:
        text += f", floor {row['floor']:.4g}"
    return text + (f"  wall {row['wall_ms']:.3g} ms" if "wall_ms" in row else "")


def _triton() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


if __name__ == "__main__":
    sys.exit(main())
