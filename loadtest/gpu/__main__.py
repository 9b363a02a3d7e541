"""Runs the checks, then the table, and prints one JSON line last. `--device cpu --tiny` tries everything without a card."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from loadtest.geometries import GEOMETRIES
from loadtest.gpu.card import Card
from loadtest.gpu.checks import parity
from loadtest.gpu.table import Geometry, Row


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes and few readings: a trial of the script itself"
    )
    parser.add_argument(
        "--geometries", nargs="+", choices=list(GEOMETRIES), default=["mini", "seed", "flagship", "nano"]
    )
    parser.add_argument(
        "--seconds", type=float, default=420, help="geometries that would start later than this are left out"
    )
    parser.add_argument("--out", type=Path, help="directory for gpu.json, loadtest/results for example")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """0 when everything asked for was measured; 1 when a check failed or a geometry was left out."""
    options = arguments(given)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured (try --device cpu --tiny)", file=sys.stderr)
        return 2
    started = time.monotonic()
    card = Card(torch.device(options.device), tiny=options.tiny)
    report = _environment(card)
    report["parity"] = parity(card)
    print(f"parity with the dense definition, largest difference of a logit: {report['parity']}", flush=True)
    ceilings = card.ceilings()
    report["ceilings"] = {"bf16_tflops": ceilings.tflops, "copy_gb_per_s": ceilings.gigabytes_per_second}
    print(
        f"{card.name}: {ceilings.tflops:.0f} TFLOP/s bf16, {ceilings.gigabytes_per_second:.0f} GB/s copied", flush=True
    )
    rows: list[Row] = []
    report["bits"], report["engines"], report["left_out"], report["peer_errors"] = {}, {}, [], []
    for name in options.geometries:
        if time.monotonic() - started > options.seconds:
            report["left_out"].append(name)
            continue
        geometry = Geometry(name, card, ceilings)
        report["bits"][name] = geometry.bits(5 if card.tiny else 100)
        report["engines"][name] = {**geometry.engine.info.notes, "products": _used(geometry.engine.info.notes)}
        print(f"{name}: {report['bits'][name]}, {time.monotonic() - started:.0f} s so far", flush=True)
        for row in geometry.rows():
            rows.append(row)
            print(_line(row), flush=True)
        report["peer_errors"] += geometry.peer_errors
        del geometry
        if card.is_cuda:
            torch.cuda.empty_cache()
    report["rows"] = [row.as_dict() for row in rows]
    report["seconds"] = round(time.monotonic() - started, 1)
    return _finish(report, options.out)


def _environment(card: Card) -> dict[str, Any]:
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = None
    return {
        "measured_on": card.name,
        "tiny": card.tiny,
        "torch": torch.__version__,
        "triton": version,
        "python": platform.python_version(),
    }


def _used(notes: dict[str, Any]) -> Any:
    """How often each kind of matrix product was chosen, over all shapes and sizes: the whole choice is too long to print."""
    kinds: dict[str, int] = {}
    for by_size in notes["products"].values():
        for kind in by_size.values() if isinstance(by_size, dict) else by_size:
            kinds[str(kind)] = kinds.get(str(kind), 0) + 1
    return kinds


def _line(row: Row) -> str:
    shares: Iterable[tuple[str, float | None]] = (
        ("of the matrix rate", row.matrix_share),
        ("of the bandwidth", row.bandwidth_share),
    )
    text = f"  {row.name:<62} {row.figure:>12.4g} {row.unit:<4}"
    if row.low is not None and row.high is not None:
        text += f" ({row.low:.4g} to {row.high:.4g})"
    if row.target is not None:
        text += f"  target {row.target:.4g}: {'met' if row.met else 'missed'}"
    if row.floor is not None:
        text += f", floor {row.floor:.4g}"
    text += "".join(f"  {share:.0%} {name}" for name, share in shares if share is not None)
    return text + (f"  wall {row.wall_ms:.3g} ms" if row.wall_ms is not None else "")


def _finish(report: dict[str, Any], out: Path | None) -> int:
    line = json.dumps(report)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    print(line)
    return 1 if report["left_out"] else 0


if __name__ == "__main__":
    sys.exit(main())
