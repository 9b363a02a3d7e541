"""`python -m loadtest`: one command for each measurement. Only the module of the command that is asked for is imported."""

from __future__ import annotations

import signal
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


ENDINGS = (signal.SIGTERM, signal.SIGHUP)


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


def _end(number: int, _frame: object) -> None:
    """End as an exception does, so that every server that was started is stopped. Raises SystemExit with 128 + the signal's number."""
    for other in ENDINGS:
        # `timeout 600 make bench` sends two, and the second would end the stopping
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


if __name__ == "__main__":
    for number in ENDINGS:
        if signal.getsignal(number) is signal.SIG_DFL:  # under nohup, SIGHUP stays ignored
            signal.signal(number, _end)
    main()
