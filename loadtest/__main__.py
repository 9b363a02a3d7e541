"""`python -m loadtest`: one command for each measurement. A command's options are defined where it measures."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module

import typer

LOAD, BENCH, SOAK = "Load on a running server", "Benchmarks, sides in turns", "The reliability matrix"
COMMANDS = {  # name: its function, and the panel of the help that lists it
    "open": ("loadtest.load:open_loop", LOAD),
    "search": ("loadtest.load:search", LOAD),
    "compare": ("loadtest.load:compare", LOAD),
    "report": ("loadtest.load:report", LOAD),
    "peers": ("loadtest.load:peers", LOAD),
    "bench": ("loadtest.bench.service:measure", BENCH),
    "front": ("loadtest.bench.front:measure", BENCH),
    "retrieve": ("loadtest.bench.retrieve:measure", BENCH),
    "replicas": ("loadtest.soak.replicas:measure", BENCH),
    "offline": ("loadtest.bench.offline:measure", BENCH),
    "profile": ("loadtest.profile:measure", BENCH),
    "gpu": ("loadtest.__main__:gpu", BENCH),
    "bits": ("loadtest.bits:measure", SOAK),
    "soak": ("loadtest.soak.parts:soak", SOAK),
    "fuzz": ("loadtest.fuzz.session:measure", SOAK),
}
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@contextmanager
def refused_politely() -> Iterator[None]:
    """Print the message of a failure to measure, and exit with code 2."""
    from loadtest.servers.target import TargetError

    try:
        yield
    except (TargetError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from error


def gpu(context: typer.Context) -> None:
    """The first half hour on one card, in guarded phases; `compare A B` sets two of its files side by side."""
    from loadtest.gpu.__main__ import main

    raise typer.Exit(main(context.args))


def cli_of(names: Iterable[str]) -> typer.Typer:
    """The command line with these commands. Only their modules are imported."""
    cli = typer.Typer(no_args_is_help=True, add_completion=False, help="Everything that measures the ranking server.")
    cli.callback()(lambda: None)  # keeps the command's name where there is only one
    for name in names:
        place, panel = COMMANDS[name]
        module, _, function = place.partition(":")
        run = gpu if name == "gpu" else getattr(import_module(module), function)
        settings = PASSED_ON if name == "gpu" else None
        cli.command(name, rich_help_panel=panel, context_settings=settings)(refused_politely()(run))
    return cli


cli = cli_of(sys.argv[1:2] if set(sys.argv[1:2]) & COMMANDS.keys() else COMMANDS)

if __name__ == "__main__":
    cli()
