"""The commands that load a running server, and the comparison with other stacks: parsed here, measured in `measure` and `peers`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from loadtest.machine import ROOT

RESULTS = ROOT / "loadtest" / "results"
DEMO = ROOT / "weights" / "demo"
LOAD = "Load on a running server"

cli = typer.Typer()
console = Console(stderr=True, soft_wrap=True)

Arrivals = Literal["poisson", "constant"]
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
    int, typer.Option(help="Of traffic and arrivals; 0: a fresh one, so that a running server knows none of its users.")
]
Kind = Annotated[Arrivals, typer.Option("--arrivals", help="Independent users (poisson) or a metronome.")]
Checkpoint = Annotated[Path, typer.Option(help="What is served.")]


@cli.command("open", rich_help_panel=LOAD)
def open_command(
    url: Url = "http://127.0.0.1:8000",
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 100.0,
    seconds: Seconds = 30.0,
    warmup: Warmup = 5.0,
    arrivals: Kind = "poisson",
    slo_ms: SloMs = 50.0,
    slo_share: SloShare = 0.99,
    candidates: Candidates = 0,
    seed: Seed = 0,
    timeout: Annotated[float, typer.Option(help="Seconds until a request counts as failed.")] = 10.0,
    deadline_ms: Annotated[int, typer.Option(help="X-Request-Timeout-Ms of every request; 0: none.")] = 0,
    out: Out = RESULTS / "open",
) -> None:
    """Load at a fixed rate, whatever the server does, and write a report."""
    from loadtest.measure.figures import Slo
    from loadtest.measure.runs import LoadRun, RunSettings

    slo, traffic = Slo(slo_ms, slo_share), _traffic(candidates, seed)
    settings = RunSettings(
        rate, seconds, warmup, arrivals, slo, timeout, deadline_ms=deadline_ms or None, traffic=traffic
    )
    with _target(url) as target:
        run = LoadRun(target, settings).run(seed=traffic.seed)
    run.save(out)
    _finish(out)
    print(json.dumps({"summary": run.summary, "generator": run.meta["generator"]}, sort_keys=True))


@cli.command("search", rich_help_panel=LOAD)
def search_command(
    url: Url = "http://127.0.0.1:8000",
    start: Annotated[float, typer.Option(help="First rate, requests a second.")] = 20.0,
    seconds: Seconds = 10.0,
    warmup: Warmup = 2.0,
    arrivals: Kind = "poisson",
    slo_ms: SloMs = 50.0,
    slo_share: SloShare = 0.99,
    candidates: Candidates = 0,
    seed: Seed = 0,
    precision: Annotated[float, typer.Option(help="Stop when the rate is known this well, as a share.")] = 0.05,
    out: Out = RESULTS / "search",
) -> None:
    """Find the highest rate at which the objective holds."""
    from loadtest.measure.figures import Slo
    from loadtest.measure.runs import RunSettings
    from loadtest.measure.search import SearchSettings, search_server

    slo, traffic = Slo(slo_ms, slo_share), _traffic(candidates, seed)
    settings = RunSettings(start, seconds, warmup, arrivals, slo, traffic=traffic)
    with _target(url) as target:
        found = search_server(target, settings, SearchSettings(start_rps=start, precision=precision), console.print)
    _write(out, found)
    print(json.dumps({key: found[key] for key in ("capacity_rps", "limited_by_generator", "machine")}, sort_keys=True))


@cli.command("compare", rich_help_panel=LOAD)
def compare_command(
    a: Annotated[str, typer.Argument(help="A commit, or the URL of a server.")],
    b: Annotated[str, typer.Argument(help="Another. `.` is this working tree.")],
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 100.0,
    blocks: Annotated[int, typer.Option(help="Blocks a side.")] = 10,
    seconds: Annotated[float, typer.Option(help="Length of a block.")] = 6.0,
    warmup: Annotated[float, typer.Option(help="Traffic before each block that is not measured.")] = 1.0,
    slo_ms: SloMs = 50.0,
    candidates: Candidates = 0,
    smallest_effect: Annotated[float, typer.Option(help="Differences below this share are not judged.")] = 0.03,
    checkpoint: Checkpoint = DEMO,
    out: Out = RESULTS / "compare",
) -> None:
    """Is B faster or slower than A, beyond noise? Measured in alternated blocks. Exit code 1 where it is worse."""
    from loadtest.measure.compare import compare_sides
    from loadtest.measure.figures import Slo
    from loadtest.measure.runs import RunSettings

    settings = RunSettings(rate, seconds, warmup, slo=Slo(slo_ms), traffic=_traffic(candidates, 0))
    with refused_politely():
        result = compare_sides(a, b, settings, blocks, smallest_effect, checkpoint, console.print)
    _write(out, result)
    print("\n".join(result["lines"]))
    print(json.dumps({key: result[key] for key in ("a", "b", "comparison")}, sort_keys=True))
    raise typer.Exit(result["comparison"]["verdict"] == "worse")


@cli.command("report", rich_help_panel=LOAD)
def report_command(
    directory: Annotated[Path, typer.Argument(help="A directory with run.json.")] = RESULTS / "open",
) -> None:
    """Write report.html and the plots of a stored run again."""
    _finish(directory)


@cli.command("peers", rich_help_panel=LOAD)
def peers_command(
    seconds: Annotated[float, typer.Option(help="Length of a block of a server.")] = 5.0,
    blocks: Annotated[int, typer.Option(help="Blocks a server; their order is rotated.")] = 3,
    candidates: Annotated[int, typer.Option(help="Candidates a request; 0: the model's mix.")] = 64,
    checkpoint: Checkpoint = DEMO,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="What every trunk computes in.")] = "bfloat16",
    only: Annotated[list[str] | None, typer.Option(help="Name of a server, may be repeated; all without it.")] = None,
    out: Out = RESULTS / "peers",
) -> None:
    """The same traffic and model behind other serving stacks; run it in the environment that `make peers` creates."""
    from loadtest.peers.run import measure_peers

    with refused_politely():
        result = measure_peers(checkpoint, seconds, blocks, candidates, only or [], dtype, console.print)
    _write(out, result)
    (out / "peers.md").write_text(result["markdown"])
    print(result["markdown"])
    print(json.dumps({"rows": result["rows"]}, sort_keys=True))


def _traffic(candidates: int, seed: int) -> Any:
    from loadtest.generate.traffic import TrafficSettings, fresh_seed

    settings = TrafficSettings(seed=seed or fresh_seed())
    return settings.with_fixed_candidates(candidates) if candidates else settings


@contextmanager
def _target(url: str) -> Iterator[Any]:
    """The server at an address, or one that is started from this checkout."""
    from loadtest.servers.launch import ranking_server
    from loadtest.servers.target import Target

    with refused_politely(), ExitStack() as stack:
        target = stack.enter_context(ranking_server()).target if url == "start" else Target.parse(url)
        target.info()
        yield target


@contextmanager
def refused_politely() -> Iterator[None]:
    """What cannot be measured ends the program with its message."""
    from loadtest.servers.target import TargetError

    try:
        yield
    except (TargetError, ValueError) as error:
        raise refusal(error) from error


def refusal(error: Exception) -> typer.Exit:
    console.print(f"[red]{error}")
    return typer.Exit(2)


def _write(out: Path, values: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "run.json").write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
    _finish(out)


def _finish(directory: Path) -> None:
    from loadtest.report.pages import write_report

    try:
        console.print(f"report: {write_report(directory)}")
    except FileNotFoundError as error:
        raise refusal(error) from error
