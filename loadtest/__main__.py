"""`python -m loadtest`: every measurement there is, one command each. Parses and prints; the work is done elsewhere."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from loadtest import load
from loadtest.load import DEMO, RESULTS, Checkpoint, console, refusal, refused_politely

HISTORY = RESULTS / "history.csv"
BENCH, SOAK = "Benchmarks, sides in turns", "The reliability matrix"

cli = typer.Typer(no_args_is_help=True, add_completion=False, help="Everything that measures the ranking server.")
cli.add_typer(load.cli)

Vectors = Literal["auto", "avx2", "neon"]
Rounds = Annotated[int, typer.Option(help="Readings of each side.")]
Threads = Annotated[int, typer.Option(help="Of the engine; 0: torch's own choice.")]


@cli.command("bench", rich_help_panel=BENCH)
def bench_command(
    rounds: Rounds = 15,
    seconds: Annotated[float, typer.Option(help="Length of one throughput reading.")] = 4.0,
    compositions: Annotated[int, typer.Option(help="Random compositions for the row on bits.")] = 2000,
    dtype: Literal["auto", "bfloat16", "float32"] = "auto",
    vectors: Vectors = "auto",
    engine_only: Annotated[bool, typer.Option("--engine-only", help="No HTTP rows, as with --vectors.")] = False,
    history: Annotated[Path, typer.Option(help="File that the rows are appended to.")] = HISTORY,
) -> None:
    """The targets table: engines against the dense definition, the service around them. Exit code 0 whatever is missed."""
    if vectors == "avx2" and not os.environ.get("ATEN_CPU_CAPABILITY"):  # torch reads it as it is imported
        os.environ["ATEN_CPU_CAPABILITY"] = "avx2"
        os.execv(sys.executable, [sys.executable, "-m", "loadtest", *sys.argv[1:]])  # noqa: S606
    import torch

    from loadtest.bench.engines import computed_in, engine_rows
    from loadtest.bench.service import service_rows
    from loadtest.matrix import publish

    chosen = computed_in(vectors) if dtype == "auto" else dtype
    rows = []
    for row in engine_rows(getattr(torch, chosen), rounds, compositions, vectors):
        console.print(f"{row.what}: {row.figure:.3g} {row.unit} ({'met' if row.ok else 'missed'})")
        rows.append(row)
    if not engine_only and vectors == "auto":
        rows += service_rows(chosen, seconds)
    run = {"torch": torch.__version__, "dtype": chosen, "threads": torch.get_num_threads(), "vectors": vectors}
    publish(rows, run, history=history)


@cli.command("front", rich_help_panel=BENCH)
def front_command(
    rounds: Rounds = 5,
    seconds: Annotated[float, typer.Option(help="Length of one reading.")] = 2.0,
    fronts: Annotated[int, typer.Option(help="So many, beside one process.")] = 2,
    before: Annotated[Path | None, typer.Option(help="A checkout of another commit, which must not be faster.")] = None,
    history: Annotated[Path, typer.Option(help="File that the rows are appended to.")] = HISTORY,
) -> None:
    """The thin path: rates beside a bare function, one caller, impatient ones, refusals, fronts, replies. Needs wrk."""
    from loadtest.bench.front import measure

    measure(rounds, seconds, fronts, before, history)


@cli.command("retrieve", rich_help_panel=BENCH)
def retrieve_command(
    posts: int = 537_000,
    width: int = 128,
    threads: Threads = 0,
    rounds: Rounds = 15,
    queries: Annotated[int, typer.Option(help="For the row on recall; 0 leaves it out.")] = 10_000,
) -> None:
    """The exact search beside faiss and the memory's bandwidth."""
    from loadtest.bench.retrieve import measure

    measure(posts, width, threads, rounds, queries)


@cli.command("replicas", rich_help_panel=BENCH)
def replicas_command(
    seconds: Annotated[float, typer.Option(help="Of changes under load; the kills may take as long again.")] = 120.0,
    kills: Annotated[int, typer.Option(help="Of replicas at random moments; Redis is killed once.")] = 100,
    per_second: Annotated[float, typer.Option(help="Changes that are written.")] = 2000.0,
) -> None:
    """Three replicas of one Redis stream behind HAProxy: lag, searches beside changes, kills, equal posts. Exit code 1 for a red row."""
    from loadtest.matrix import table
    from loadtest.soak import replicas

    rows = replicas.under_load(seconds, per_second) + replicas.kills(kills, float("inf"), per_second)
    print(table(rows))
    raise typer.Exit(not all(row.ok for row in rows))


@cli.command("offline", rich_help_panel=BENCH)
def offline_command(
    rounds: Rounds = 7,
    threads: Threads = 0,
    rows: Annotated[int, typer.Option(help="Impressions of the larger log; 0 leaves memory out.")] = 1_000_000,
) -> None:
    """Offline scoring beside the engine alone, and the memory of a job as its log grows tenfold."""
    from loadtest.bench.offline import measure

    measure(rounds, threads, rows)


@cli.command("train", rich_help_panel=BENCH)
def train_command(
    rounds: Rounds = 7,
    times: Annotated[int, typer.Option(help="The demo's log so many times over; 0 leaves memory out.")] = 10,
) -> None:
    """The trainer beside a bare loop, and the memory of training from a log on disk."""
    from loadtest.bench.train import measure

    measure(rounds, times)


@cli.command("profile", rich_help_panel=BENCH)
def profile_command(
    rounds: Rounds = 30,
    requests: Annotated[int, typer.Option(help="Of one client through HTTP.")] = 400,
) -> None:
    """Where each microsecond of a request goes, as Markdown. Needs wrk, and builds a kernel with timers."""
    from loadtest.profile import tables

    for table in tables(rounds, requests):
        print(table)


@cli.command("gpu", rich_help_panel=BENCH, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def gpu_command(context: typer.Context) -> None:
    """The first half hour on one card, in guarded phases; `compare A B` sets two of its files side by side."""
    from loadtest.gpu import __main__ as gpu
    from loadtest.gpu import compare

    arguments = list(context.args)
    raise typer.Exit(compare.main(arguments[1:]) if arguments[:1] == ["compare"] else gpu.main(arguments))


@cli.command("bits", rich_help_panel=SOAK)
def bits_command(
    compositions: Annotated[int, typer.Option(help="Random batches, shared by all trunks and dtypes.")] = 100_000,
    seed: int = 0,
    backend: Literal["native", "torch", "auto"] = "native",
    vectors: Vectors = "auto",
    device: Literal["cpu", "cuda"] = "cpu",
    preset: Annotated[str, typer.Option(help="A trunk by name, or all.")] = "grok",
) -> None:
    """Random batches against the same candidates scored alone: how many bits differ. Exit code 1 where one does."""
    from loadtest.bits import check

    failed = False
    for figures in check(compositions, seed, preset, device=device, backend=backend, vectors=vectors):
        print(json.dumps(figures), flush=True)
        failed |= figures["different"] > 0
    raise typer.Exit(failed)


@cli.command("capacity", rich_help_panel=BENCH)
def capacity_command(
    figures: Annotated[
        list[str] | None, typer.Argument(help="Your own figures, such as requests=1e8 cores=32.")
    ] = None,
) -> None:
    """How many machines a day of requests takes, on paper."""
    from loadtest.capacity import Day, plans

    try:
        day = Day.of(dict(each.split("=", 1) for each in figures or []))
    except (TypeError, ValueError) as error:
        raise refusal(error) from error
    print(plans(day))


@cli.command("soak", rich_help_panel=SOAK)
def soak_command(
    seconds: Annotated[float, typer.Option(help="Time for all parts together.")] = 1800.0,
    only: Annotated[list[str] | None, typer.Option(help="Name of a part, may be repeated; all without it.")] = None,
) -> None:
    """Every long form in a bounded time: one JSON line a row, then a table. Exit code 1 where a row is red."""
    from loadtest.soak.parts import soak

    with refused_politely():
        raise typer.Exit(not soak(seconds, only or []))


@cli.command("fuzz", rich_help_panel=SOAK)
def fuzz_command(
    requests: Annotated[int, typer.Option(help="Stop after this many.")] = 1_000_000,
    seconds: Annotated[float, typer.Option(help="Stop after this time, whatever was sent.")] = 3600.0,
    checkpoint: Checkpoint = DEMO,
    seed: Annotated[int, typer.Option(help="Another seed, other requests.")] = 0,
    sockets: Annotated[bool, typer.Option("--sockets", help="A server of its own, over sockets.")] = False,
    only_paths: Annotated[
        bool, typer.Option("--only-paths", help="Paths that nobody serves, and nothing else.")
    ] = False,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Damaged checkpoints in place of requests.")
    ] = False,
    slowest: Annotated[bool, typer.Option("--slowest", help="Search for the bodies that are slowest to read.")] = False,
) -> None:
    """Odd requests, or damaged checkpoints: one JSON line a row. Exit code 1 where a promise was broken."""
    if slowest:
        from loadtest.fuzz.slowest import SIZES, search, shown

        for size in SIZES:
            for found, recipe in search(size, seconds / len(SIZES), seed)[:10]:
                print(json.dumps(shown(found, recipe, size), ensure_ascii=False), flush=True)
        return
    if checkpoints:
        from loadtest.fuzz.checkpoints import damaged

        rows = [damaged(seconds)]
    else:
        from loadtest.fuzz.session import session

        rows = session(checkpoint, requests, seconds, seed, sockets=sockets, only_paths=only_paths)
    for row in rows:
        print(row.to_json(), flush=True)
    raise typer.Exit(not all(row.ok for row in rows))


if __name__ == "__main__":
    cli()
