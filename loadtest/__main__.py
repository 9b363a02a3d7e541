"""`python -m loadtest`: one command for each measurement. Only the module of the command that is asked for is imported."""

from __future__ import annotations

import sys
from importlib import import_module

import typer

COMMANDS = {  # name: the function that measures, whose parameters are the options
    "load": "loadtest.load:locust",
    "open": "loadtest.load:open_loop",
    "capacity": "loadtest.load:capacity",
    "bench": "loadtest.bench:measure",
    "peers": "loadtest.peers.run:measure",
    "bits": "loadtest.bits:measure",
    "served": "loadtest.served:measure",
    "demo-loop": "loadtest.loop.run:measure",
    "log-bias": "loadtest.loop.bias:measure",
}


def main() -> None:
    """Run the command line."""
    cli = typer.Typer(
        no_args_is_help=True, add_completion=False, help="Measures the ranking server. One card: python -m loadtest.gpu"
    )
    cli.callback()(lambda: None)
    for name in [name for name in COMMANDS if name in sys.argv[1:2]] or COMMANDS:
        module, _, function = COMMANDS[name].partition(":")
        cli.command(name)(getattr(import_module(module), function))
    cli()


if __name__ == "__main__":
    main()
