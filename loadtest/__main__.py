"""`python -m loadtest`: the command line of the load tests. Parses and prints; the work is done elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loadtest.generate.traffic import TrafficSettings, fresh_seed
from loadtest.machine import ROOT
from loadtest.measure.figures import Slo
from loadtest.measure.runs import LoadRun, Run, RunSettings
from loadtest.servers.launch import ranking_server
from loadtest.servers.target import Target, TargetError

RESULTS = ROOT / "loadtest" / "results"

cli = typer.Typer(no_args_is_help=True, add_completion=False, help="Load tests of the ranking server.")
console = Console(stderr=True, soft_wrap=True)


class ArrivalKind(StrEnum):
    """Gaps between arrivals."""

    poisson = "poisson"
    constant = "constant"


Url = Annotated[
    str, typer.Option("--url", help="Server to load; `start` starts one from this checkout and stops it again.")
]
Out = Annotated[Path, typer.Option("--out", help="Directory for run.json, samples.npz, report.html and plots.")]
Seconds = Annotated[float, typer.Option(help="Length of the measured part.")]
Warmup = Annotated[float, typer.Option(help="Traffic before it that is not measured.")]
SloMs = Annotated[float, typer.Option(help="Objective: latency in milliseconds, from the due time.")]
SloShare = Annotated[float, typer.Option(help="Objective: share of all offered requests that must meet it.")]
Candidates = Annotated[int, typer.Option(help="Exactly this many candidates a request; 0: the model's mix.")]
Seed = Annotated[
    int,
    typer.Option(
        help="Of traffic and arrivals. 0: a fresh one, so that a server that still runs knows none of its users."
    ),
]
Kind = Annotated[ArrivalKind, typer.Option("--arrivals", help="Independent users (poisson) or a metronome.")]


@cli.command("open")
def open_command(
    url: Url = "http://127.0.0.1:8000",
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 100.0,
    seconds: Seconds = 30.0,
    warmup: Warmup = 5.0,
    arrivals: Kind = ArrivalKind.poisson,
    slo_ms: SloMs = 50.0,
    slo_share: SloShare = 0.99,
    candidates: Candidates = 0,
    seed: Seed = 0,
    clients: Annotated[int, typer.Option(help="Closed loop of this many clients instead; hides waiting.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds until a request counts as failed.")] = 10.0,
    deadline_ms: Annotated[int, typer.Option(help="X-Request-Timeout-Ms of every request; 0: none.")] = 0,
    out: Out = RESULTS / "open",
) -> None:
    """Load at a fixed rate, whatever the server does, and write a report."""
    settings = RunSettings(
        rate, seconds, warmup, arrivals.value, clients, Slo(slo_ms, slo_share), timeout, deadline_ms=deadline_ms or None,
        traffic=_traffic(candidates, seed),
    )  # fmt: skip
    with _target(url) as target:
        run = LoadRun(target, settings).run(seed=settings.traffic.seed)
    run.save(out)
    _finish(out)
    print(json.dumps({"summary": run.summary, "generator": run.meta["generator"]}, sort_keys=True))


@cli.command("search")
def search_command(
    url: Url = "http://127.0.0.1:8000",
    start: Annotated[float, typer.Option(help="First rate, requests a second.")] = 20.0,
    seconds: Seconds = 10.0,
    warmup: Warmup = 2.0,
    arrivals: Kind = ArrivalKind.poisson,
    slo_ms: SloMs = 50.0,
    slo_share: SloShare = 0.99,
    candidates: Candidates = 0,
    seed: Seed = 0,
    precision: Annotated[float, typer.Option(help="Stop when the rate is known this well, as a share.")] = 0.05,
    out: Out = RESULTS / "search",
) -> None:
    """Find the highest rate at which the objective holds."""
    from loadtest.measure.search import SearchSettings, search_server

    settings = RunSettings(
        start, seconds, warmup, arrivals.value, slo=Slo(slo_ms, slo_share), traffic=_traffic(candidates, seed)
    )
    with _target(url) as target:
        found = search_server(target, settings, SearchSettings(start_rps=start, precision=precision), console.print)
    _write(out, found)
    print(json.dumps({key: found[key] for key in ("capacity_rps", "limited_by_generator", "machine")}, sort_keys=True))


@cli.command("report")
def report_command(
    directory: Annotated[Path, typer.Argument(help="A directory with run.json.")] = RESULTS / "open",
) -> None:
    """Write report.html and the plots of a stored run again."""
    _finish(directory)


@cli.command("compare")
def compare_command(
    a: Annotated[str, typer.Argument(help="A stored run's directory, a commit, or the URL of a server.")],
    b: Annotated[str, typer.Argument(help="The other: of the same sort. `.` is this working tree.")],
    rate: Annotated[float, typer.Option(help="Requests a second, where servers are measured.")] = 100.0,
    blocks: Annotated[int, typer.Option(help="Blocks a side, where servers are measured in turns.")] = 10,
    seconds: Annotated[float, typer.Option(help="Length of a block.")] = 6.0,
    warmup: Annotated[float, typer.Option(help="Traffic before each block that is not measured.")] = 1.0,
    slo_ms: SloMs = 50.0,
    candidates: Candidates = 0,
    smallest_effect: Annotated[float, typer.Option(help="Differences below this share are not judged.")] = 0.03,
    checkpoint: Annotated[Path, typer.Option(help="Checkpoint that both commits serve.")] = ROOT / "weights" / "demo",
    out: Out = RESULTS / "compare",
) -> None:
    """Is B faster or slower than A, beyond noise? Exit code 1 where it is worse.

    Commits and servers are measured in alternated blocks; stored runs as they are, with a warning.
    """
    from loadtest.measure.compare import compare_runs
    from loadtest.measure.sides import compare_sides, stored

    if (Path(a) / "run.json").exists() and (Path(b) / "run.json").exists():
        result = stored(a, b, compare_runs(Run.load(Path(a)), Run.load(Path(b))))
    else:
        settings = RunSettings(rate, seconds, warmup, slo=Slo(slo_ms), traffic=_traffic(candidates, 0))
        try:
            result = compare_sides(a, b, settings, blocks, smallest_effect, checkpoint, console.print)
        except TargetError as error:
            raise _refusal(error) from error
    _write(out, result)
    print("\n".join(result["lines"]))
    print(json.dumps({key: result[key] for key in ("a", "b", "comparison")}, sort_keys=True))
    if result["comparison"]["verdict"] == "worse":
        raise typer.Exit(1)


@cli.command("ceiling")
def ceiling_command(
    seconds: Annotated[float, typer.Option(help="Length of a trial.")] = 3.0, out: Out = RESULTS / "ceiling"
) -> None:
    """How much the generator itself can send on this machine, against a server that does nothing."""
    from loadtest.measure.ceiling import measure_ceiling

    found = measure_ceiling(seconds, console.print)
    out.mkdir(parents=True, exist_ok=True)
    (out / "run.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, sort_keys=True))


@cli.command("peers")
def peers_command(
    seconds: Annotated[float, typer.Option(help="Length of a block of a server.")] = 5.0,
    blocks: Annotated[int, typer.Option(help="Blocks a server; their order is rotated.")] = 3,
    candidates: Annotated[int, typer.Option(help="Candidates a request; 0: the model's mix.")] = 64,
    checkpoint: Annotated[Path, typer.Option(help="Checkpoint behind every server.")] = ROOT / "weights" / "demo",
    dtype: Annotated[str, typer.Option(help="What every trunk computes in: bfloat16 or float32.")] = "bfloat16",
    only: Annotated[list[str] | None, typer.Option(help="Name of a server, may be repeated; all without it.")] = None,
    out: Out = RESULTS / "peers",
) -> None:
    """The same traffic and model behind other serving stacks; run it in the environment that `make peers` creates."""
    from loadtest.peers.run import measure_peers

    try:
        result = measure_peers(checkpoint, seconds, blocks, candidates, only or [], dtype, console.print)
    except (TargetError, ValueError) as error:
        raise _refusal(error) from error
    _write(out, result)
    (out / "peers.md").write_text(result["markdown"])
    print(result["markdown"])
    print(json.dumps({"rows": result["rows"]}, sort_keys=True))


def _traffic(candidates: int, seed: int) -> TrafficSettings:
    settings = TrafficSettings(seed=seed or fresh_seed())
    return settings.with_fixed_candidates(candidates) if candidates else settings


@contextmanager
def _target(url: str) -> Iterator[Target]:
    """The server at an address, or one that is started from this checkout. A TargetError ends the program with its message."""
    try:
        with ExitStack() as stack:
            target = stack.enter_context(ranking_server()).target if url == "start" else Target.parse(url)
            target.info()
            yield target
    except TargetError as error:
        raise _refusal(error) from error


def _refusal(error: Exception) -> typer.Exit:
    console.print(f"[red]{error}")
    return typer.Exit(2)


def _write(out: Path, values: dict[str, object]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "run.json").write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
    _finish(out)


def _finish(directory: Path) -> None:
    from loadtest.report.pages import write_report

    try:
        console.print(f"report: {write_report(directory)}")
    except FileNotFoundError as error:
        raise _refusal(error) from error


if __name__ == "__main__":
    cli()
