"""The command that joins what was served with what people did. Its libraries are imported when it runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from weights.commands.console import Ids, app, out_option, progress_bar, refusals, say
from weights.errors import CheckpointError
from weights.lab.commands.options import time_of

UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


@app.command()
def join(
    served: Annotated[Path, typer.Argument(help="The log of what was served: the service's RANKER_SERVED__DIRECTORY.")],
    events: Annotated[
        Path,
        typer.Option(
            help="What people did: Parquet, JSON lines or CSV, a file, directory or address; see docs/loop.md."
        ),
    ],
    out: Annotated[Path, out_option("Directory to write: a log to train on, with the contexts as served.")],
    window: Annotated[
        str, typer.Option(help="How long after a post was shown an event still counts: 30m, 24h, 7d or seconds.")
    ] = "24h",
    observed: Annotated[
        str,
        typer.Option(
            help="The actions whose absence means no, separated by commas. Default: those that some event has. Others are unknown."
        ),
    ] = "",
    until: Annotated[
        str,
        typer.Option(
            help="The events are whole up to here: a day or Unix seconds. Default: up to the newest ranking that one of them names."
        ),
    ] = "",
    model: Annotated[
        str,
        typer.Option(help="Only rankings of this model: a version, or the beginning of a digest. Default: all."),
    ] = "",
    memory: Annotated[str, typer.Option(help="How much memory the join may use; the rest goes to the disk.")] = "2GB",
    ids: Ids = "uint64",
) -> None:
    """Join what was served with what people did, into a log to train on. Says what did not join, and why."""
    with refusals(ValueError, OSError):
        from weights.lab.joining.join import JoinSettings
        from weights.lab.joining.join import join as join_logs

        settings = JoinSettings(
            window_seconds=seconds_of(window),
            observed=tuple(observed.split(",")) if observed else None,
            ids=ids,
            until_ts=time_of(until) if until else None,
            model=model,
            memory=memory,
        )
        with progress_bar() as bar:
            counts = join_logs(served, events, out, settings, bar)
    for line in counts.lines():
        say(line)
    say(f"absence means no: {', '.join(counts.observed) or 'of no action'}; of the others it is unknown")
    say(f"{out} holds {counts.impressions:,} impressions with {counts.contexts:,} contexts as served")


def seconds_of(text: str) -> int:
    """A length of time such as 24h, in seconds. Raises CheckpointError."""
    if not (match := re.fullmatch(r"(\d{1,9})([smhd]?)", text)):
        raise CheckpointError(f"--window {text} is not a length of time such as 30m, 24h or 7d.")
    return int(match[1]) * UNITS[match[2] or "s"]
