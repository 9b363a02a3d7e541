"""`phoenix-ranker`: one command to serve, to make checkpoints and to load a server. What a part needs is imported when it runs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from loadtest.measure.runs import Run

PROGRAM, DISTRIBUTION = "phoenix-ranker", "phoenix-ranking-server"
ROOT = Path(__file__).parents[1]
DEMO = {
    "checkpoint": ROOT / "weights/demo",
    "retrieval.checkpoint": ROOT / "weights/demo-towers",
    "retrieval.corpus": ROOT / "weights/demo-posts",
}
OF_WEIGHTS = {
    "fetch": "Copy a checkpoint or a corpus from a path or a URL, checked.",
    "import": "Convert a published checkpoint.",
    "train": "Train a checkpoint from a log of impressions.",
    "eval": "Evaluate a checkpoint on a test period.",
    "score": "Score every impression of a log as /rank would have.",
    "explain": "Draw why a checkpoint ranks a request as it does.",
    "compare": "Compare two checkpoints on the requests of a log.",
    "corpus": "Make, check and describe the posts that retrieval searches.",
}
"""Commands of `python -m weights`, which has more; they need torch, so `--help` shows these lines without importing them."""


class Commands(TyperGroup):
    """Loads a command of `weights` when it runs; what is listed until then is its line in OF_WEIGHTS."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that was asked for."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in OF_WEIGHTS:
            from weights.commands.checkpoints import app as weights

            command = typer.main.get_command(weights).get_command(ctx, name)  # type: ignore[attr-defined]
        return name, command, rest


cli = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Ranks a feed with the Grok transformer: serve a checkpoint, make one, load a server.",
    epilog="More about checkpoints: python -P -m weights --help",
)


@cli.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve() -> None:
    """Serve a checkpoint, or without one the demo: `phoenix-ranker serve --help` lists the settings."""


def _listed() -> None:
    """List a command of `weights`; `Commands` loads the real one when it runs."""


for _name, _line in OF_WEIGHTS.items():
    cli.command(_name, help=_line)(_listed)


def main() -> NoReturn:
    """The console command."""
    if sys.argv[1:2] == ["serve"]:  # its options are the settings, which the server reads itself
        from app.__main__ import main as start

        sys.exit(start(with_demo(sys.argv[2:], os.environ), f"{PROGRAM} serve"))
    from weights.commands.console import run

    run(cli, PROGRAM)


def with_demo(arguments: Sequence[str], environ: Any) -> list[str]:
    """The settings on the command line; a first word is the checkpoint, and without any the demo and its posts are served."""
    given = list(arguments)
    if given and not given[0].startswith("-"):
        given[:1] = ["--checkpoint", given[0]]
    flags = {word.split("=")[0].removeprefix("--") for word in given if word.startswith("--")}
    named = {name for name in DEMO if name in flags or environ.get(f"RANKER_{name.upper().replace('.', '__')}")}
    if "checkpoint" in named:
        return given
    chosen = DEMO if not named else {"checkpoint": DEMO["checkpoint"]}
    return [*given, *(word for name, path in chosen.items() for word in (f"--{name}", str(path)))]


@cli.command()
def bench(
    url: Annotated[str, typer.Argument(help="The server's address.")] = "http://127.0.0.1:8000",
    rate: Annotated[float, typer.Option(min=0.1, max=1e5, help="Requests a second, whatever the server does.")] = 100.0,
    seconds: Annotated[float, typer.Option(min=1, help="Length of the measured part.")] = 10.0,
    warmup: Annotated[float, typer.Option(min=0, help="Seconds of traffic before it, not measured.")] = 2.0,
    candidates: Annotated[int, typer.Option(min=0, help="Of each request; 0: as a feed would have them.")] = 0,
    slo_ms: Annotated[float, typer.Option(help="Objective: milliseconds from the due time.")] = 50.0,
) -> None:
    """Load a running server at a fixed rate and print what it answered, and how fast."""
    from loadtest.generate.traffic import TrafficSettings, fresh_seed
    from loadtest.measure.figures import Slo
    from loadtest.measure.runs import LoadRun, RunSettings
    from loadtest.servers.target import Target, TargetError
    from weights.commands.console import progress_bar

    traffic = TrafficSettings(seed=fresh_seed())
    traffic = traffic.with_fixed_candidates(candidates) if candidates else traffic
    settings = RunSettings(rate, seconds, warmup, slo=Slo(slo_ms), traffic=traffic)
    try:
        with progress_bar() as bar:
            told = iter(range(1, 1 << 30))
            run = LoadRun(Target.parse(url), settings, lambda line: bar(line, next(told), round(warmup + seconds))).run(
                seed=traffic.seed
            )
    except (TargetError, ValueError) as error:
        print(f"{PROGRAM} bench: {error}", file=sys.stderr, flush=True)
        raise typer.Exit(1) from error
    _show(run)


def _show(run: Run) -> None:
    from rich.table import Table

    from weights.commands.console import say, show

    figures, generator = run.summary, run.meta["generator"]
    if not sys.stdout.isatty():
        import json

        say(json.dumps({"summary": figures, "generator": generator}, sort_keys=True))
        return
    latency = figures["latency_ms"]
    rows = {
        "offered, requests/s": f"{figures['offered_rps']:.1f}",
        "answered with 200, requests/s": f"{figures['answered_rps']:.1f}",
        "within the objective": f"{figures['good_share']:.2%}",
        "latency, ms": ", ".join(
            f"{name} {latency[name]:.2f}" for name in ("p50", "p95", "p99", "max") if name in latency
        ),
        "other replies": ", ".join(f"{code}: {n}" for code, n in figures["statuses"].items() if code != "200")
        or "none",
        "without a reply": str(sum(figures["failures"].values())),
    }
    table = Table(show_header=False, title=f"{figures['requests']} requests in {figures['seconds']:.0f} s")
    for name, value in rows.items():
        table.add_row(name, value)
    show(table)
    if generator["is_bottleneck"]:
        say("The load generator itself was late: these figures say more about it than about the server.")


@cli.command()
def info(
    directory: Annotated[
        Path | None, typer.Argument(help="A checkpoint or corpus; without one: this installation.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Describe a checkpoint or a corpus, or what is installed here and which kernels it would use."""
    if directory is not None:
        from weights.commands import checkpoints, corpus

        is_corpus = any(directory.glob("posts*.safetensors"))
        (corpus.inspect if is_corpus else checkpoints.inspect)(directory, as_json=as_json)
        return
    from model.native.build import HERE, find_prebuilt

    sources = {"ranker": HERE / "kernel.cpp", "search": HERE / "search.cpp"}
    kernels = {name: find_prebuilt(source) for name, source in sources.items()}
    rows = {
        "version": importlib.metadata.version(DISTRIBUTION),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "from": str(ROOT),
        "demo": str(DEMO["checkpoint"]) if DEMO["checkpoint"].is_dir() else "not there",
        **{f"{name} kernel": found.name if found else "compiled at the first start" for name, found in kernels.items()},
    }
    if as_json:
        import json

        print(json.dumps(rows))
    else:
        for name, value in rows.items():
            print(f"{name:14} {value}")
