"""What the commands share: options, result lines, refusals, progress, files named on the command line."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from weights.actions import SCORE_WEIGHT_SETS
from weights.errors import CheckpointError, reason_of
from weights.progress import Update
from weights.text_ids import IdKind

if TYPE_CHECKING:
    from weights.corpus.manifest import CorpusManifest
    from weights.format.manifest import Manifest

INTERRUPTED = 130  # typer's exit code after Ctrl-C
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]  # ClickException, of click or of the copy in typer


app = typer.Typer(
    help="Checkpoints of the ranking transformer: make, check and describe them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Seed = Annotated[int, typer.Option(min=0, help="The same seed gives the same bytes.")]
Name = Annotated[str, typer.Option(help="Name. Default: the name of the directory.")]
Version = Annotated[str, typer.Option(help="Version. Default: a short digest.")]
Replace = Annotated[bool, typer.Option("--replace", help="Replace a checkpoint or corpus that is already there.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the manifest as one JSON object.")]
Directory = Annotated[Path, typer.Argument(help="A checkpoint directory.")]
Ids = Annotated[IdKind, typer.Option(help="Kind of the ids of users, posts and authors: integers or texts.")]
ScoreWeights = Annotated[
    str,
    typer.Option(
        help="Weights of the score: favorite=1,report=-20, a JSON file with action → weight, or the name of a set: "
        f"{', '.join(SCORE_WEIGHT_SETS)}."
    ),
]


def run(app: typer.Typer, program: str) -> NoReturn:
    """Run a command line and exit. A usage error prints one sentence on standard error and exits with 2; only --help prints the usage.

    A file or a stream that cannot be read or written, or memory that runs out, is also one sentence, and exits with 1.
    """
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    try:
        code = typer.main.get_command(app).main(prog_name=program, standalone_mode=False)
        sys.stdout.flush()  # here, where an output that takes nothing is one sentence
    except USAGE_ERROR as error:
        where = getattr(getattr(error, "ctx", None), "command_path", program)
        sentence = error.format_message().strip().rstrip(".")  # type: ignore[attr-defined]
        if sentence:
            print(f"{where}: {sentence}; see {where} --help", file=sys.stderr, flush=True)
        sys.exit(2)
    except (OSError, MemoryError, RuntimeError) as error:
        is_memory = isinstance(error, MemoryError) or "can't allocate memory" in str(error)  # torch's words
        if not is_memory and getattr(error, "errno", None) is None:
            raise  # not the system's
        reason = ": ".join(["not enough memory"] * is_memory + str(error).splitlines()[:1])
        with suppress(OSError):
            print(f"{program}: {reason}", file=sys.stderr, flush=True)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # else Python flushes the broken one as it ends
        sys.exit(1)
    if code == INTERRUPTED:
        print(f"{program}: interrupted; nothing is left half written", file=sys.stderr, flush=True)
    sys.exit(code if isinstance(code, int) else 0)


def writable(path: Path | None) -> Path | None:
    """Option callback: return the path, or refuse it before any work if nothing can be written there."""
    if path is None:
        return path
    place = path.absolute()
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        with tempfile.TemporaryFile(dir=place):  # without a name: a command that is killed leaves nothing
            return path
    except OSError as error:
        raise typer.BadParameter(f"nothing can be written at {path} ({error.strerror}); try ./{path.name}") from error


def writable_file(path: Path | None) -> Path | None:
    """Option callback for a file, which may be there: return the path, or refuse it before any work if it cannot be written."""
    if path is None:
        return path
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a directory: name a file, in it or elsewhere")
    writable(path.parent)
    if path.exists() and not os.access(path, os.W_OK):
        raise typer.BadParameter(f"{path} is there and cannot be written")
    return path


def out_option(text: str) -> Any:
    """`--out`, or another option that names a directory to write, with its help."""
    return typer.Option(help=text, callback=writable)


def out_file_option(text: str) -> Any:
    """`--out` of a command that writes one file, with its help."""
    return typer.Option(help=text, callback=writable_file)


Out = Annotated[Path, out_option("Directory to write.")]


def say(text: str) -> None:
    """Print one plain line on standard output and flush it, so that results can be piped."""
    print(text, flush=True)


def show(what: RenderableType, width: int = 200) -> None:
    """Print a table on standard output, as wide as the terminal, or `width` in a pipe."""
    Console(width=None if sys.stdout.isatty() else width).print(what)


def show_manifest(manifest: Manifest | CorpusManifest, rows: Mapping[str, str], *, as_json: bool) -> None:
    """Print a manifest as its JSON, or as a table of `rows` and its files."""
    if as_json:
        print(manifest.to_json().decode(), end="")
        return
    table = Table(show_header=False, title=f"{manifest.name} {manifest.version}")
    for key, value in rows.items():
        table.add_row(key, value)
    for name, entry in manifest.files.items():
        table.add_row(name, f"{entry.bytes / 2**20:.2f} MiB, sha256 {entry.sha256}")
    show(table)


@contextmanager
def refusals(*further: type[Exception], extra: str = "train") -> Iterator[None]:
    """Turn CheckpointError and any of `further` into one sentence on standard error and exit code 1; likewise a library that is
    missing because the package's `extra` is not installed."""
    refused: tuple[type[Exception], ...] = (CheckpointError, *further)
    try:
        yield
    except ModuleNotFoundError as error:
        print(
            f"{error.name} is not installed; this needs: pip install 'phoenix-ranking-server[{extra}]'",
            file=sys.stderr,
            flush=True,
        )
        raise typer.Exit(1) from error
    except BrokenPipeError:
        raise  # whoever read standard output has gone, as `head` has: typer ends the command without a word
    except refused as error:
        print(_sentence(error), file=sys.stderr, flush=True)
        raise typer.Exit(1) from error


def _sentence(error: Exception) -> str:
    """What an error says. One of the system's own, which begins with a number, says the file and the reason."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


HALF_MINUTE = 30.0


@contextmanager
def progress_bar(*, in_bytes: bool = False) -> Iterator[Update]:
    """Show how long work goes, and how long it still takes, on standard error: `with progress_bar() as update: …`.

    On a terminal it is a bar, which disappears at the end. In a file or a pipe it is a line every half minute, so that short work writes
    nothing and a log shows that long work is alive: `Training: 1200 of 4800 (25 %), 6 min 10 s left`. `in_bytes`: say MiB, not numbers.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(in_bytes).update
        return
    amount = (DownloadColumn(True), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(),)
    columns = TextColumn("{task.description}"), BarColumn(), *amount, TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None, visible=False)
        yield lambda what, done, total: progress.update(
            task, description=what, completed=done, total=total, visible=True
        )


class _Lines:
    """Progress in a file."""

    def __init__(self, in_bytes: bool) -> None:
        self._in_bytes = in_bytes
        self._printed_at = self._began = time.monotonic()
        self._first, self._last, self._total = 0, -1, -1

    def update(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if total != self._total or done < self._last:
            self._began, self._first, self._total = now, done, total
        self._last = done
        if now - self._printed_at >= HALF_MINUTE:
            self._printed_at = now
            print(self._line(what, done, total, now - self._began), file=sys.stderr, flush=True)

    def _line(self, what: str, done: int, total: int, seconds: float) -> str:
        amount = f"{done / 2**20:.0f} of {total / 2**20:.0f} MiB" if self._in_bytes else f"{done} of {total}"
        line = f"{what}: {amount} ({done / max(total, 1):.0%})"
        if done > self._first:
            line += f", {duration(seconds * (total - done) / (done - self._first))} left"
        return line


def duration(seconds: float) -> str:
    """A length of time as people say it: `42 s`, `6 min 10 s`, `3 h 05 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def label_of(directory: Path) -> str:
    """Derive a checkpoint or corpus name from the name of its directory."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", directory.absolute().name).strip("-._+")[:100] or "checkpoint"


def read_json(path: Path, kind: type) -> Any:
    """The JSON object (`dict`) or list (`list`) in a file. Raises CheckpointError for anything else."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason_of(error)}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}.") from error
    if type(value) is not kind:
        raise CheckpointError(f"{path} must hold a JSON {'list' if kind is list else 'object'}.")
    return value
