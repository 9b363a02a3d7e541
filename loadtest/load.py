"""Load on a running server: locust's users, an open loop at a fixed rate, and the search for the highest rate that holds."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from loadtest.generate.traffic import TrafficSettings, fresh_seed
from loadtest.machine import ROOT
from loadtest.measure.figures import Slo
from loadtest.measure.runs import LoadRun, RunSettings
from loadtest.measure.search import SearchSettings, search_server
from loadtest.report import capacity_report, run_report
from loadtest.target import Target, TargetError

REPORTS = ROOT / "build" / "load"

Url = Annotated[str, typer.Option(help="The server, with the path below which it is.")]
EndpointUrl = Annotated[
    str,
    typer.Option(
        help="The server, with the path below which it is. Requests go to /rank there, or to the /rank, /rank/NAME, /retrieve, "
        "/recommend or /explain in which it ends."
    ),
]
Seconds = Annotated[float, typer.Option(help="Length of the measured part.")]
SloMs = Annotated[
    float, typer.Option(help="Objective: latency in milliseconds, from the time at which the request was due.")
]
SloShare = Annotated[float, typer.Option(help="Objective: share of all offered requests that must meet it.")]
Candidates = Annotated[
    int, typer.Option(min=0, help="Exactly this many candidates a request; 0: the traffic model's mix.")
]
Production = Annotated[bool, typer.Option("--production", help="1,022 events and 2,800 candidates a request.")]
Out = Annotated[Path, typer.Option(file_okay=False, help="Folder of the report.")]


def locust(
    url: Url = "http://127.0.0.1:8000",
    users: Annotated[int, typer.Option(min=1)] = 24,
    seconds: Annotated[int, typer.Option(min=1, help="Length of the run.")] = 60,
    shape: Literal["steady", "ramp", "spike", "soak"] = "steady",
    payload: Literal["mix", "production"] = "mix",
    web: Annotated[bool, typer.Option("--web", help="Locust's own page on port 8089 in place of a report.")] = False,
    slo_ms: SloMs = 50.0,
    out: Out = REPORTS / "locust",
) -> None:
    """Users that scroll, arrive, prefetch and err, with locust. Without --web: runs once and writes report.html and CSV files."""
    out.mkdir(parents=True, exist_ok=True)
    options = {"host": url, "users": users, "spawn-rate": 4, "shape": shape, "payload": payload, "slo-ms": slo_ms}
    flags = []
    if not web:
        flags = ["--headless", "--only-summary"]
        options |= {"run-time": f"{seconds}s", "html": out / "report.html", "csv": out / "run"}
    chosen = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest" / "locustfile.py"), *chosen, *flags]
    sys.stdout.flush()
    os.execv(sys.executable, command)  # noqa: S606  # locust handles the terminal and its signals itself


def open_loop(
    url: EndpointUrl = "http://127.0.0.1:8000",
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 100.0,
    seconds: Seconds = 30.0,
    warmup: Annotated[float, typer.Option(help="Seconds of traffic before it, not measured.")] = 5.0,
    arrivals: Annotated[
        Literal["poisson", "constant"], typer.Option(help="Independent users, or a metronome.")
    ] = "poisson",
    slo_ms: SloMs = 50.0,
    slo_share: SloShare = 0.99,
    candidates: Candidates = 0,
    production: Production = False,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of traffic and arrivals; 0: a new one, so that no user is in the cache.")
    ] = 0,
    out: Out = REPORTS / "open",
) -> None:
    """Load at a fixed rate, whatever the server does, and write a report of one page. Exit code 1 if nothing was answered.

    A request counts as answered if its reply has status 200 and is JSON with a result for each candidate."""
    traffic, slo = _traffic(candidates, production, seed), Slo(slo_ms, slo_share)
    settings = _politely(lambda: RunSettings(rate, seconds, warmup, arrivals, slo, traffic))
    run = _politely(lambda: LoadRun(Target.parse(url), settings).run())
    run.save(out)
    _say(run_report(run, out))
    print(json.dumps(run.summary, sort_keys=True))
    raise typer.Exit(not run.summary["answered_rps"])


def capacity(
    url: EndpointUrl = "http://127.0.0.1:8000",
    start: Annotated[float, typer.Option(help="First rate, requests a second.")] = 20.0,
    seconds: Seconds = 10.0,
    slo_ms: SloMs = 50.0,
    slo_share: SloShare = 0.99,
    candidates: Candidates = 0,
    production: Production = False,
    precision: Annotated[float, typer.Option(help="Stop when the rate is known this well, as a share.")] = 0.05,
    out: Out = REPORTS / "capacity",
) -> None:
    """Find the highest rate at which the objective holds, with Poisson arrivals, and write a report. Exit code 1 if none holds."""
    traffic, slo = _traffic(candidates, production, 0), Slo(slo_ms, slo_share)
    settings = _politely(lambda: RunSettings(start, seconds, 2.0, "poisson", slo, traffic))
    plan = SearchSettings(start_rps=start, precision=precision)
    report = _politely(lambda: search_server(Target.parse(url), settings, plan, _say))
    _say(capacity_report(report, out))
    print(
        json.dumps({name: report[name] for name in ("capacity_rps", "limited_by_generator", "machine")}, sort_keys=True)
    )
    raise typer.Exit(not report["capacity_rps"])


def _traffic(candidates: int, production: bool, seed: int) -> TrafficSettings:
    seed = seed or fresh_seed()
    if production:
        return TrafficSettings.production(seed)
    settings = TrafficSettings(seed=seed)
    return settings.with_fixed_candidates(candidates) if candidates else settings


def _say(line: object) -> None:
    print(line, file=sys.stderr, flush=True)


def _politely(measure: Any) -> Any:
    """What it returns; a sentence and exit code 2 where a value cannot be used or the server cannot be measured."""
    try:
        return measure()
    except (TargetError, ValueError) as error:
        _say(error)
        raise typer.Exit(2) from error
