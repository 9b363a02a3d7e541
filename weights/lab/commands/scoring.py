"""The command `score`. It needs the `train` extra, imported when it runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from weights.commands.console import app, out_option, progress_bar, refusals, say
from weights.lab.commands.options import LogFile, naming, time_of


@app.command()
def score(
    checkpoint: Annotated[Path, typer.Option(help="A checkpoint directory.")],
    log: LogFile,
    out: Annotated[Path, out_option("Directory to write. An interrupted run resumes there.")],
    actions: Annotated[
        str | None, typer.Option(help="Actions whose probabilities to write, separated by commas. Default: all.")
    ] = None,
    since: Annotated[
        str, typer.Option(help="A day or Unix seconds: earlier requests are only used as history. Default: score all.")
    ] = "",
    partitions: Annotated[
        int,
        typer.Option(min=0, help="How many files to write, each with whole users; 0: one for every half million rows."),
    ] = 0,
    threads: Annotated[int, typer.Option(min=0, help="Threads of the engine; 0: one per core.")] = 0,
) -> None:
    """Score every impression of a log as /rank would have, with the user's history at that time."""
    started = time.perf_counter()
    with refusals(ValueError, OSError, RuntimeError), naming(log):  # TableError and RunError; EngineError
        import pyarrow.parquet as pq

        from model.create import EngineOptions
        from weights.checkpoint import load_checkpoint
        from weights.lab.scoring.run import score_log
        from weights.lab.scoring.scorer import Scorer
        from weights.lab.training.log import IDS_KEY

        since_ts = time_of(since) if since else 0
        chosen = actions.split(",") if actions else None
        scorer = Scorer(load_checkpoint(checkpoint), EngineOptions(threads=threads), chosen)
        with progress_bar() as update:
            written = score_log(log, out, scorer, since_ts, partitions, update)
        scorer.close()
        are_hashes = IDS_KEY in pq.read_schema(next(out.glob("part-*.parquet"))).metadata
    seconds = time.perf_counter() - started
    say(f"{out} holds {written} scores of {scorer.manifest.name} {scorer.manifest.version}; {seconds:.1f} s")
    if are_hashes:
        say(
            "Its user_id and post_id are the hashes of texts, as in the log: request_id tells which rankings they are of."
        )
