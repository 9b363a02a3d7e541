"""`phoenix-ranker`: one command to serve checkpoints and to make them. What a part needs is imported when it runs."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from app import DISTRIBUTION

PROGRAM = "phoenix-ranker"
ROOT = Path(__file__).parents[1]
DEMO = ROOT / "weights/demo"
OF_WEIGHTS = {
    "fetch": "Copy a checkpoint or a corpus from a path or a URL, and check it.",
    "import": "Convert a published checkpoint.",
    "verify": "Check every byte of a checkpoint.",
    "inspect": "Describe a checkpoint.",
    "relabel": "Change the names, version or score weights of a checkpoint.",
    "log": "Show what a log of impressions holds, and what training would decide from it.",
    "train": "Train a checkpoint from a log of impressions.",
    "calibrate": "Correct a checkpoint's probabilities on a log, so that they are frequencies.",
    "eval": "Evaluate a checkpoint on a test period.",
    "train-towers": "Train the two towers of retrieval from a log.",
    "eval-retrieval": "Measure how many liked posts retrieval finds.",
    "posts": "Write the posts of a log, for `corpus build`.",
    "join": "Join what was served with what people did, to a log to train on.",
    "refresh": "Take the nightly turn: join, train on, judge, and publish or refuse.",
    "off-policy": "Estimate what a checkpoint would have earned on a log with exploration.",
    "score": "Score every impression of a log as /rank would have.",
    "example": "Write the example request and the names that the page of a running server shows.",
    "world": "Draw a synthetic log of impressions whose best ranking is known.",
    "compare": "Compare two checkpoints on the requests of a log.",
    "corpus": "Make, check and describe the posts that retrieval searches.",
    "served": "Remove a user from the log of what was served.",
}
"""Commands of `python -m weights`, which has more, each with its line in `--help`."""


class Commands(TyperGroup):
    """Loads a command of `weights` only when it runs. `--help` lists it by its line in OF_WEIGHTS."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that was asked for."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in OF_WEIGHTS:
            from weights.command_line import app as weights

            command = typer.main.get_command(weights).get_command(ctx, name)  # type: ignore[attr-defined]
        return name, command, rest


cli = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="More commands for checkpoints: python -P -m weights --help",
)


@cli.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve() -> None:
    """Serve a checkpoint, or the demo if you name none. `phoenix-ranker serve --help` lists the settings."""


def _listed() -> None:
    """List a command of `weights`; `Commands` loads the real one when it runs."""


for _name, _line in OF_WEIGHTS.items():
    cli.command(_name, help=_line)(_listed)


def main() -> NoReturn:
    """The console command."""
    if sys.argv[1:2] == ["serve"]:  # its options are the settings, which the server reads itself
        from app.__main__ import main as start

        sys.exit(start(with_checkpoint(sys.argv[2:]), f"{PROGRAM} serve"))
    from weights.commands.console import run

    run(cli, PROGRAM)


def with_checkpoint(arguments: Sequence[str]) -> list[str]:
    """The settings on the command line. A first word that is no flag is the checkpoint."""
    words = list(arguments)
    if words and not words[0].startswith("-"):
        words[:1] = ["--checkpoint", words[0]]
    return words


def show_version(is_asked: bool) -> None:
    """Print the version and end, if `--version` is there."""
    if is_asked:
        print(f"{PROGRAM} {importlib.metadata.version(DISTRIBUTION)}")
        raise typer.Exit


@cli.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Ranks posts with the Grok transformer: make checkpoints, and serve them."""


@cli.command()
def info(
    directory: Annotated[
        Path | None, typer.Argument(help="A checkpoint or corpus. Without one: this installation.")
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
        "demo": str(DEMO) if DEMO.is_dir() else "not there",
        **{
            f"{name} kernel": library.name if library else "compiled at the first start"
            for name, library in kernels.items()
        },
    }
    if as_json:
        import json

        print(json.dumps(rows))
    else:
        for name, value in rows.items():
            print(f"{name:14} {value}")
