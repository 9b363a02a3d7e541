"""The commands on the log of what was served: `served forget`. They need the `served` extra, imported when they run."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from weights.commands.console import Ids, progress_bar, refusals, say
from weights.text_ids import IdKind, text_id
from weights.values import id_problem

app = typer.Typer(help="The log of what was served.", no_args_is_help=True)


@app.callback()
def served() -> None:
    """The log of what was served."""


@app.command()
def forget(
    directory: Annotated[Path, typer.Argument(help="The log: the service's RANKER_SERVED__DIRECTORY.")],
    user: Annotated[list[str], typer.Option(help="The id of a user, as requests have it. May be given several times.")],
    ids: Ids = "uint64",
    loop: Annotated[
        Path | None,
        typer.Option(help="The --out of refresh: remove the user from the nights that it has joined, too."),
    ] = None,
) -> None:
    """Remove all rankings of a user from the log: the parts that hold any are written again without them. Checkpoints that were trained on
    them keep what they have learned."""
    started = time.perf_counter()
    user_ids = [_user_id(text, ids) for text in user]
    with refusals(OSError, extra="served"), progress_bar() as bar:
        from weights.forget import check_root, forget_joined, forget_users

        if loop:
            check_root(loop)
        result = forget_users(
            directory,
            user_ids,
            lambda done, total: bar("Reading parts", done, total),
            lambda: say(f"{directory} is in use by a join or another `served forget`: this begins when that ends"),
        )
    say(
        f"{directory}: {result.rankings} rankings removed; of {result.parts} parts {result.rewritten} were written again and "
        f"{result.removed} removed; {time.perf_counter() - started:.1f} s"
    )
    if result.open_parts:
        say(f"{result.open_parts} parts are being written and were not looked at: run this again when they are closed")
    problems = result.problems
    if loop:
        started = time.perf_counter()
        with refusals(OSError, extra="served"), progress_bar() as bar:
            joined = forget_joined(
                loop,
                user_ids,
                lambda done, total: bar("Reading nights", done, total),
                lambda: say(f"{loop} is in use by a turn: its nights are read when that ends"),
            )
        say(
            f"{loop}: {joined.impressions} impressions and {joined.contexts} contexts removed from {joined.nights} joined nights; "
            f"{time.perf_counter() - started:.1f} s"
        )
        for turn in joined.begun_again:
            say(f"turn {turn} was not finished: it begins again by joining")
        problems = [*problems, *joined.problems]
    for problem in problems:
        print(problem, file=sys.stderr, flush=True)
    if problems:
        raise typer.Exit(1)


def _user_id(sent: str, ids: IdKind) -> int:
    """The id as the model reads it. Raises BadParameter."""
    if (problem := id_problem(sent, ids)) is not None:
        hint = "; where ids are texts, add --ids text" if ids == "uint64" else ""
        raise typer.BadParameter(f"--user {problem}{hint}")
    return int(sent) if ids == "uint64" else text_id(sent)
