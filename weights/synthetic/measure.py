"""Measures import and load of a full-size checkpoint, each in a process of its own: seconds and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from weights.checkpoint import load_checkpoint
from weights.format.writer import TableDtype
from weights.published.importer import PublishedModel, import_published, labels_for
from weights.synthetic.published import write_published
from weights.synthetic.random_weights import mini_config


def footprint(work: Callable[[], object]) -> dict[str, float]:
    """Run `work` once. It returns seconds, and MiB of this process.

    `peak_anonymous_mib`, sampled every 2 ms, is memory that only swap could take back; `peak_resident_mib` includes mapped
    file pages, which the kernel may drop.
    """
    peak, stop = 0.0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not stop.wait(0.002):
            peak = max(peak, resident_mib()["RssAnon"])

    before = resident_mib()["RssAnon"]
    sampler = threading.Thread(target=sample)
    sampler.start()
    started = time.perf_counter()
    kept = work()
    seconds = time.perf_counter() - started
    stop.set()
    sampler.join()
    now = resident_mib()
    del kept
    return {
        "seconds": round(seconds, 2),
        "anonymous_before_mib": before,
        "anonymous_after_mib": now["RssAnon"],
        "peak_anonymous_mib": max(peak, now["RssAnon"]),
        "peak_resident_mib": now["VmHWM"],
    }


def resident_mib() -> dict[str, float]:
    """This process's RssAnon, RssFile and VmHWM (peak of both together) in MiB, as the Linux kernel counts them."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {
        line[0].rstrip(":"): round(int(line[1]) / 1024, 1) for line in lines if line[0].startswith(("Rss", "VmHWM"))
    }


def measure(rows: int, seed: int, work: Path | None) -> dict[str, dict[str, float]]:
    """Figures by step for a synthetic download with `rows` rows a table, in float32 and bfloat16. Removes its files."""
    results = {}
    with tempfile.TemporaryDirectory(dir=work) as directory:
        source = Path(directory) / "ranker"
        started = time.perf_counter()
        write_published(source, mini_config(seed, (rows, rows, rows)), seed)
        results["write the download"] = {"seconds": round(time.perf_counter() - started, 2)}
        for tables in ("float32", "bfloat16"):
            out = Path(directory) / tables
            results[f"import to {tables}"] = _child("import", str(source), str(out), tables)
            results[f"load {tables}"] = _child("load", str(out))
            _forget(out)
            results[f"load {tables} from disk"] = _child("load", str(out))
    return results


def _forget(directory: Path) -> None:
    """Drop a checkpoint's pages from the page cache, as after a reboot."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _child(*arguments: str) -> dict[str, float]:
    command = [sys.executable, "-m", "weights.synthetic.measure", *arguments]
    result: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return result


def _import(source: str, out: str, tables: TableDtype) -> object:
    with PublishedModel(Path(source)) as ranker:
        return import_published(ranker, Path(out), labels_for(ranker.config, "synthetic"), table_dtype=tables)


if __name__ == "__main__":
    jobs: dict[str, Callable[..., object]] = {"import": _import, "load": load_checkpoint}
    print(json.dumps(footprint(lambda: jobs[sys.argv[1]](*sys.argv[2:]))))
