"""`python -m loadtest.soak.plot`: offered load against goodput and latency, 0.5× to 10× of the capacity, as a PNG and a table."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from loadtest.generate.http_client import precise_loop
from loadtest.soak.overload import CAPACITY_RPS, ENGINE, SETTINGS, Load, offer, unloaded
from loadtest.soak.servers import fake

MULTIPLES = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0)
PLOT = Path("docs/images/overload.png")


def measure(seconds: float) -> tuple[float, list[Load]]:
    """The unloaded p99 in seconds, and what each offered load did; a fake engine of known capacity behind the whole service."""
    with fake(*ENGINE, **SETTINGS) as server, asyncio.Runner(loop_factory=precise_loop) as runner:
        alone = runner.run(unloaded(server, 40))
        return alone, [runner.run(offer(server, multiple, seconds / len(MULTIPLES))) for multiple in MULTIPLES]


def plot(alone: float, loads: list[Load], path: Path) -> None:
    """Goodput above, the 99th percentiles below; the dashed lines are the capacity and what the contract allows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    offered = [load.multiple for load in loads]
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6), layout="constrained")
    above.plot(offered, [load.goodput_rps for load in loads], "o-", label="answered 200")
    above.plot(offered, [load.refused_rps for load in loads], "s:", label="refused 429")
    above.axhline(CAPACITY_RPS, linestyle="--", color="grey", label="capacity")
    above.set_yscale("symlog", linthresh=10)
    above.set_ylim(bottom=0)
    above.set_ylabel("requests / s")
    above.legend()
    below.plot(offered, [1e3 * load.admitted_p99 for load in loads], "o-", label="p99 of the answered")
    below.plot(offered, [1e3 * load.rejected_p99 for load in loads], "s:", label="p99 of the refused")
    below.axhline(2e3 * alone, linestyle="--", color="grey", label="2 × unloaded p99")
    below.set_ylim(bottom=0)
    below.set_xlabel("offered load, multiples of the capacity")
    below.set_ylabel("ms")
    below.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90.0, help="time for all loads together")
    parser.add_argument("--out", type=Path, default=PLOT)
    options = parser.parse_args()
    alone, loads = measure(options.seconds)
    plot(alone, loads, options.out)
    print("| offered | goodput / s | p99 answered ms | p99 refused ms | neither |\n|---|---|---|---|---|")
    for load in loads:
        print(
            f"| {load.multiple}× | {load.goodput_rps:.1f} | {1e3 * load.admitted_p99:.1f} | "
            f"{1e3 * load.rejected_p99:.1f} | {load.broken} |"
        )
    peak = max(load.goodput_rps for load in loads)
    last = loads[-1]
    summary = {
        "unloaded_p99_ms": 1e3 * alone,
        "goodput_at_10x": last.goodput_rps / peak,
        "stretch_at_10x": last.admitted_p99 / alone,
        "plot": str(options.out),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
