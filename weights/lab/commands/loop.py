"""The command that takes the nightly turn. Its libraries are imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weights.commands.console import Seed, app, out_option, progress_bar, refusals, say, show
from weights.errors import CheckpointError
from weights.lab.commands.joining import seconds_of
from weights.lab.commands.options import REFUSED, Set, assigned_values, check_no_architecture, time_of, with_settings

EXIT_REFUSED = 3


def _print_bounds(is_asked: bool) -> None:
    if is_asked:
        from rich.table import Table

        from weights.lab.loop.gate import bounds_table

        table = Table("bound", "default", "check and meaning")
        for name, default, meaning in bounds_table():
            table.add_row(name, f"{default:g}", meaning)
        show(table)
        raise typer.Exit


@app.command()
def refresh(
    checkpoint: Annotated[
        Path, typer.Option(help="The link to the checkpoint that serves; the service watches it. It is switched.")
    ],
    out: Annotated[Path, out_option("The root of the turns: state, joined nights, reports and checkpoints.")],
    served: Annotated[
        Path | None, typer.Option(help="The log of what was served: the service's RANKER_SERVED__DIRECTORY.")
    ] = None,
    events: Annotated[
        str | None, typer.Option(help="What people did: a file, directory or address; see docs/loop.md.")
    ] = None,
    back: Annotated[bool, typer.Option("--back", help="Return to the version before, and train nothing.")] = False,
    window: Annotated[str, typer.Option(help="As join takes it.")] = "24h",
    observed: Annotated[str, typer.Option(help="As join takes it.")] = "",
    until: Annotated[str, typer.Option(help="As join takes it.")] = "",
    memory: Annotated[str, typer.Option(help="As join takes it.")] = "2GB",
    nights: Annotated[int, typer.Option(min=1, max=60, help="Train on so many nights, the newest ones.")] = 7,
    held_out: Annotated[
        float, typer.Option(help="Share of the night's requests, the newest, that both models are judged on.")
    ] = 0.2,
    keep: Annotated[int, typer.Option(min=2, max=60, help="Keep so many versions, the present one among them.")] = 5,
    seed: Seed = 1,
    set_: Set = None,
    bound: Annotated[
        list[str] | None,
        typer.Option(
            "--bound", help="NAME=VALUE of a bound of the checks; can be repeated. `refresh --bounds` lists them."
        ),
    ] = None,
    bounds: Annotated[
        bool,
        typer.Option("--bounds", callback=_print_bounds, is_eager=True, help="Print the table of bounds and exit."),
    ] = False,
) -> None:
    """Take the nightly turn: join what is new, train on from the checkpoint that serves, judge both, and publish or refuse.

    Exit codes: 0 published, or nothing new; 3 refused; 1 an error. In every case the link names a whole checkpoint.
    """
    with refusals(*REFUSED):
        from weights.lab.joining.join import JoinSettings
        from weights.lab.loop.gate import GateSettings
        from weights.lab.loop.turn import Paths, TurnSettings
        from weights.lab.loop.turn import back as go_back
        from weights.lab.loop.turn import refresh as take_turn

        if not back and (served is None or events is None):
            raise CheckpointError("Give --served and --events, or --back.")
        if not 0 < held_out < 1:
            raise CheckpointError(f"--held-out must be a share above 0 and below 1, got {held_out:g}.")
        paths = Paths(served or Path(), events or "", checkpoint, out)
        if back:
            result = go_back(paths, keep)
        else:
            join = JoinSettings(
                window_seconds=seconds_of(window),
                observed=tuple(observed.split(",")) if observed else None,
                until_ts=time_of(until) if until else None,
                memory=memory,
            )
            training = assigned_values(set_)
            check_no_architecture(training, "refresh trains the checkpoint that serves on, with its architecture")
            settings = TurnSettings(join, with_settings(GateSettings(), bound), nights, held_out, keep, seed, training)
            with progress_bar() as bar:
                result = take_turn(paths, settings, say, bar)
    say(f"{result.sentence}.")
    if result.report:
        say(f"{result.report / 'report.md'} says why.")
    if result.decision == "refused":
        raise typer.Exit(EXIT_REFUSED)
