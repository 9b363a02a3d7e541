"""`--help` of the server: every setting as an option, printed by the library that prints the help of the other commands."""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel, SecretStr

GENERAL = "Options"
LEAST_COLUMNS = 100  # in less, the longest names of settings would be cut off


def print_help(settings: type[BaseModel], program: str) -> None:
    """Print the help of a command whose options are these settings. A nested group has a panel of its own."""
    parameters = [_checkpoint(), _config(), *_options(settings)]

    def serve(**values: object) -> None:
        """Serve a checkpoint, or the demo if none is named."""

    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    serve.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    commands = typer.Typer(add_completion=False)
    epilog = (
        "Each option is also a variable: --queue.max-requests is RANKER_QUEUE__MAX_REQUESTS. Options win over variables, and variables "
        "over the file."
    )
    commands.command(epilog=epilog)(serve)
    os.environ["COLUMNS"] = str(max(LEAST_COLUMNS, shutil.get_terminal_size().columns))
    commands(["--help"], prog_name=program, standalone_mode=False)


def _checkpoint() -> inspect.Parameter:
    default = typer.Argument(
        None, metavar="[CHECKPOINT]", help="The same as --checkpoint; only of phoenix-ranker serve."
    )
    return _parameter("first_word", str, default)


def _config() -> inspect.Parameter:
    text = (
        "TOML file with settings: max_requests in the table queue is --queue.max-requests. The same as RANKER_CONFIG."
    )
    return _parameter("config", Path, typer.Option(None, "--config", help=text, rich_help_panel=GENERAL))


def _options(model: type[BaseModel], prefix: str = "", panel: str = GENERAL) -> Iterator[inspect.Parameter]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _options(kind, f"{prefix}{name}.", name.capitalize())
            continue
        flag = f"--{prefix}{name}".replace("_", "-")
        shown = "" if field.default in (None, "", {}) else str(field.default)
        option = typer.Option(
            shown or None,
            flag,
            help=" ".join((field.description or "").split()),
            metavar=_metavar(kind),
            rich_help_panel=panel,
            show_default=bool(shown),
        )
        yield _parameter(f"{prefix}{name}".replace(".", "__"), str, option)


def _parameter(name: str, kind: type, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _metavar(kind: Any) -> str:
    """What a value looks like, such as `<int>` or `[auto|cpu|cuda]`, as the other commands show it."""
    if get_origin(kind) is Literal:
        return f"[{'|'.join(map(str, get_args(kind)))}]"
    options = [argument for argument in get_args(kind) if argument is not type(None)]
    if get_origin(kind) is dict:
        return "<json>"
    if options:
        return _metavar(options[0])
    words = {bool: "<true or false>", SecretStr: "<str>", Path: "<path>"}
    return words.get(kind, f"<{getattr(kind, '__name__', 'str')}>")
