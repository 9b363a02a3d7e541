"""The commands that load a running server or compare it with other stacks. `measure` and `peers` do the measuring."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from loadtest.generate.traffic import TrafficSettings, fresh_seed
from loadtest.machine import DEMO, RESULTS
from loadtest.measure.figures import Slo
from loadtest.measure.runs import LoadRun, RunSettings
from loadtest.report.pages import write_report
from loadtest.servers.launch import ranking_server
from loadtest.servers.target import Target

Url = Annotated[
    str, typer.Option("--url", help="Server to load; `start` starts one from this checkout and stops it again.")
]
Out = Annotated[Path, typer.Option("--out", help="Directory for run.json, samples.npz, the report and its plots.")]
Seconds = Annotated[float, typer.Option(help="Length of the measured part, or of a block.")]
Warmup = Annotated[float, typer.Option(help="Seconds of traffic before it, not measured.")]
SloMs = Annotated[float, typer.Option(help="Objective: latency in milliseconds, from the due time.")]
SloShare = Annotated[float, typer.Option(help="Objective: share of all offered requests that must meet it.")]
Candidates = Annotated[int, typer.Option(help="Exactly this many candidates a request; 0: the model's mix.")]
Production = Annotated[
    bool, typer.Option("--production", help="1 022 events and 2 800 candidates a request, whatever else is asked for.")
]
Seed = Annotated[
    int, typer.Option(help="Seed of traffic and arrivals; 0: a new one, so that no user is in the server's cache.")
]
Arrivals = Annotated[Literal["poisson", "constant"], typer.Option(help="Independent users (poisson) or a metronome.")]

say = partial(print, file=sys.stderr, flush=True)


def open_loop(
    url: Url = "http://127.0.0.1:8000",
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 100.0,
    seconds: Seconds = 30.0,
    warmup: Warmup = 5.0,
    arrivals: Arrivals = "poisson",
    slo_ms: SloMs = 50.0,
    slo_share: SloShare = 0.99,
    candidates: Candidates = 0,
    production: Production = False,
    seed: Seed = 0,
    out: Out = RESULTS / "open",
) -> None:
    """Load at a fixed rate, whatever the server does, and write a report. Exit code 1 if nothing was answered."""
    traffic = _traffic(candidates, production, seed)
    settings = RunSettings(rate, seconds, warmup, arrivals, Slo(slo_ms, slo_share), traffic=traffic)
    with _target(url) as target:
        run = LoadRun(target, settings).run(seed=traffic.seed)
    run.save(out)
    report(out)
    _print(run.meta, "summary", "generator")
    raise typer.Exit(not run.summary["answered_rps"])


def search(
    url: Url = "http://127.0.0.1:8000",
    start: Annotated[float, typer.Option(help="First rate, requests a second.")] = 20.0,
    seconds: Seconds = 10.0,
    warmup: Warmup = 2.0,
    arrivals: Arrivals = "poisson",
    slo_ms: SloMs = 50.0,
    slo_share: SloShare = 0.99,
    candidates: Candidates = 0,
    production: Production = False,
    seed: Seed = 0,
    precision: Annotated[float, typer.Option(help="Stop when the rate is known this well, as a share.")] = 0.05,
    out: Out = RESULTS / "search",
) -> None:
    """Find the highest rate at which the objective holds."""
    from loadtest.measure.search import SearchSettings, search_server

    settings = RunSettings(
        start, seconds, warmup, arrivals, Slo(slo_ms, slo_share), traffic=_traffic(candidates, production, seed)
    )
    with _target(url) as target:
        found = search_server(target, settings, SearchSettings(start_rps=start, precision=precision), say)
    _write(out, found)
    _print(found, "capacity_rps", "limited_by_generator", "machine")


def compare(
    a: Annotated[str, typer.Argument(help="A commit, or the URL of a server.")],
    b: Annotated[str, typer.Argument(help="A second commit or URL; `.` is this working tree.")],
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 100.0,
    blocks: Annotated[int, typer.Option(help="Blocks per side.")] = 10,
    seconds: Seconds = 6.0,
    warmup: Warmup = 1.0,
    slo_ms: SloMs = 50.0,
    candidates: Candidates = 0,
    production: Production = False,
    smallest_effect: Annotated[float, typer.Option(help="Differences below this share are not judged.")] = 0.03,
    checkpoint: Path = DEMO,
    out: Out = RESULTS / "compare",
) -> None:
    """Is B faster or slower than A, beyond noise? Measured in alternating blocks. Exit code 1 if B is worse."""
    from loadtest.measure.compare import compare_sides

    settings = RunSettings(rate, seconds, warmup, slo=Slo(slo_ms), traffic=_traffic(candidates, production, 0))
    result = compare_sides(a, b, settings, blocks, smallest_effect, checkpoint, say)
    _write(out, result)
    _print(result, "a", "b", "comparison")
    raise typer.Exit(result["comparison"]["verdict"] == "worse")


def peers(
    seconds: Seconds = 5.0,
    blocks: Annotated[int, typer.Option(help="Blocks a server; their order is rotated.")] = 3,
    candidates: Candidates = 64,
    production: Production = False,
    checkpoint: Path = DEMO,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="What every trunk computes in.")] = "bfloat16",
    only: Annotated[list[str] | None, typer.Option(help="Name of a server, may be repeated; all without it.")] = None,
    out: Out = RESULTS / "peers",
) -> None:
    """The same traffic and model behind other serving stacks; run it in the environment that `make peers` creates."""
    from loadtest.peers.run import Stand, chosen, measure_peers

    stand = Stand(checkpoint, dtype, candidates, os.cpu_count() or 1, production)
    result = measure_peers(stand, chosen(only or [], say), seconds, blocks, say)
    _write(out, result)
    _print(result, "rows")


def report(
    directory: Annotated[Path, typer.Argument(help="Directory that holds a run.json.")] = RESULTS / "open",
) -> None:
    """Write the report of a stored run again."""
    say(f"report: {write_report(directory)}")


def _traffic(candidates: int, production: bool, seed: int) -> TrafficSettings:
    seed = seed or fresh_seed()
    if production:
        return TrafficSettings.production(seed)
    settings = TrafficSettings(seed=seed)
    return settings.with_fixed_candidates(candidates) if candidates else settings


@contextmanager
def _target(url: str) -> Iterator[Target]:
    """The server at this address, or for `start` one started from this checkout."""
    if url != "start":
        yield Target.parse(url)
    else:
        with ranking_server() as server:
            yield server.target


def _write(out: Path, values: Mapping[str, Any]) -> None:
    """Store the results, write their report, and print the report if it is text."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "run.json").write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
    report(out)
    print(values.get("report", ""))


def _print(values: Mapping[str, Any], *names: str) -> None:
    """Print these values as the last line, in JSON."""
    print(json.dumps({name: values[name] for name in names}, sort_keys=True))
