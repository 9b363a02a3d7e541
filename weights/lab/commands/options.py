"""What the lab's commands share: options, a log that is read, times, settings, progress of training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from model.bounds import LARGEST
from model.config import ModelConfig
from weights.commands.console import progress_bar, writable
from weights.errors import CheckpointError
from weights.format.manifest import Manifest
from weights.progress import Update
from weights.text_ids import IdKind
from weights.values import time_problem

if TYPE_CHECKING:
    from weights.lab.training.log import Log
    from weights.lab.training.trainer import Status

T = TypeVar("T")

REFUSED = (ValueError, OSError)  # TableError, StateError and ConfigError are ValueErrors
TABLES = ("user_rows", "post_rows", "author_rows")
YEARS = range(1970, 2100)
PLAIN = {"int": int, "float": float, "bool": bool}

Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="NAME=VALUE of a setting; can be given more than once. `train --settings` lists them."),
]
WorldSet = Annotated[
    list[str] | None,
    typer.Option("--set", help="NAME=VALUE of a setting of the world; can be given more than once."),
]
LogFile = Annotated[
    Path,
    typer.Option(
        "--log",
        help="Log of impressions: Parquet, JSON lines or CSV, a file, directory or address; see docs/training.md.",
    ),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        help="Directory that keeps the log, sorted, for the next time. Default: memory for at most five million impressions, "
        "else phoenix-ranking-server/logs in ~/.cache.",
        callback=writable,
    ),
]
Kept = Annotated[
    float | None,
    typer.Option(
        help="The share of the impressions without any action that was kept in the log, such as 0.2. Probabilities are then calibrated for "
        "all impressions."
    ),
]
Until = Annotated[
    str,
    typer.Option(
        help="Train only on requests before this: a day (1998-03-05), Unix seconds, or all. Default: hold out the newest fifth."
    ),
]


def read_with_bar(
    log: Path, ids: IdKind, surfaces: int = LARGEST["product_surfaces"], cache: Path | None = None
) -> Log:
    """Read a log, showing how far that is. Raises TableError, as `read_log`."""
    from weights.lab.training.log import read_log

    with progress_bar() as bar:
        return read_log(log, ids, surfaces, cache, bar)


def log_for(manifest: Manifest, log: Path, cache: Path | None) -> Log:
    """Read a log for a checkpoint, its actions in the checkpoint's order, showing how far that is. Raises TableError."""
    from weights.lab.training.log import aligned

    return aligned(read_with_bar(log, manifest.ids, manifest.config.product_surfaces, cache), manifest.action_names)


@contextmanager
def naming(log: Path | str | None) -> Iterator[None]:
    """Put the name of the log that a command reads in front of a TableError that does not hold it."""
    from weights.tables import TableError

    try:
        yield
    except TableError as error:
        if log is None or str(log) in str(error):
            raise
        raise TableError(f"{log}: {error}") from error


def time_of(text: str) -> int:
    """A time given as Unix seconds or as a day in UTC. Digits alone are a day where they are one of these YEARS, as in 19980305, and else
    seconds. Raises CheckpointError."""
    if text.isdecimal() and not _is_day(text):
        if problem := time_problem(seconds := int(text)):
            raise CheckpointError(f"The time {text[:32]} {problem}.")
        return seconds
    try:
        time = datetime.fromisoformat(text)
        return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp())
    except ValueError as error:
        raise CheckpointError(f"{text!r} is neither a day such as 1998-03-05 nor Unix seconds.") from error


def _is_day(digits: str) -> bool:
    try:
        return len(digits) == 8 and datetime.fromisoformat(digits).year in YEARS
    except ValueError:
        return False


def since_of(since: str, manifest: Manifest, log: Log) -> int:
    """The time from which on a checkpoint is measured on a log: `--since`, or where its training ended. Raises CheckpointError.

    Warns on standard error if rows from there on are of the time that it was trained on.
    """
    from weights.lab.training.log import time_words

    until = manifest.trained_until_ts
    if since:
        start = time_of(since)
        if until is not None and max(start, log.impression_ts[0]) < until:
            seen = f"{manifest.name} was trained until {time_words(until)}: it may have learned from what is measured here."
            print(f"Warning: {seen}", file=sys.stderr, flush=True)
        return start
    if until is None:
        raise CheckpointError(
            "The checkpoint does not say where its training ended: give --since, a time after which it saw nothing."
        )
    if until > log.impression_ts[-1]:
        raise CheckpointError(
            f"The checkpoint was trained until {time_words(until)}, and the log covers {log.span}: give a newer log."
        )
    return until


def since_of_both(since: str, pair: tuple[Manifest, Manifest], log: Log) -> int:
    """The time from which on two checkpoints are compared on a log: `since_of` the one that was trained until later.

    Without `--since`, warns on standard error of one that does not say until when it was trained. Raises CheckpointError.
    """
    known = [manifest for manifest in pair if manifest.trained_until_ts is not None]
    for manifest in pair:
        if not since and manifest not in known:
            unknown = f"{manifest.name} does not say until when it was trained"
            print(
                f"Warning: {unknown}: it may have learned from what is measured here. Give --since if it did.",
                file=sys.stderr,
                flush=True,
            )
    if not since and not known:
        return 0
    return since_of(since, max(known or pair, key=lambda manifest: manifest.trained_until_ts or 0), log)


def kept_share(kept: float | None) -> float:
    """Raises CheckpointError for what is no share."""
    if kept is None:
        return 1.0
    if not 0 < kept <= 1:
        raise CheckpointError(f"--kept must be a share above 0 and at most 1, got {kept:g}.")
    return kept


def assigned_values(assignments: list[str] | None) -> dict[str, Any]:
    """`NAME=VALUE` of settings of a run and of the architecture, parsed. Raises CheckpointError for an unknown name or a value of another
    type, ValueError for a value that a setting of a run or a number of rows may not have."""
    from weights.lab.training.settings import ROWS, TrainSettings, check, replaced

    kinds: dict[str, type] = {name: type(getattr(TrainSettings(), name)) for name in names_of(TrainSettings)}
    kinds |= {
        field.name: PLAIN[str(field.type)]
        for field in fields(ModelConfig)
        if str(field.type) in PLAIN and field.name != "actions"
    }
    values = _parsed(assignments, kinds | dict.fromkeys(TABLES, int))
    replaced(TrainSettings(), values)
    for name in set(TABLES) & set(values):
        check(name, values[name], ROWS)
    return values


def check_no_architecture(assigned: Mapping[str, Any], reason: str) -> None:
    """Raises CheckpointError, which begins with the reason, if one of the values of `assigned_values` is of the architecture."""
    if shape := assigned.keys() & {*names_of(ModelConfig), *TABLES}:
        raise CheckpointError(f"{reason}: leave {', '.join(sorted(shape))} out of --set.")


def with_settings(settings: T, assignments: list[str] | None) -> T:
    """Settings with each `NAME=VALUE` applied, parsed as the field's type. Raises CheckpointError for an unknown name or a bad value."""
    kinds = {name: type(getattr(settings, name)) for name in names_of(type(settings))}
    return replace(settings, **_parsed(assignments, kinds))  # type: ignore[type-var]


def names_of(settings: type) -> list[str]:
    return [field.name for field in fields(settings)]


def _parsed(assignments: list[str] | None, kinds: Mapping[str, type]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for assignment in assignments or ():
        name, _, text = assignment.partition("=")
        if name not in kinds:
            near = get_close_matches(name, kinds, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(kinds))}."
            raise CheckpointError(f"There is no setting {name!r}; {hint}")
        try:
            values[name] = {"true": True, "false": False}[text.lower()] if kinds[name] is bool else kinds[name](text)
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"Setting {name} must be of type {kinds[name].__name__}, got {text!r}.") from error
    return values


def training_report(update: Update) -> Callable[[Status], None]:
    """The function that training calls after every step: it says how far it is and what validation gave."""

    def report(status: Status) -> None:
        is_validated = isfinite(status.validation)
        words = (
            f"training, validation loss {status.validation:.4f}, best {status.best:.4f}" if is_validated else "training"
        )
        update(words, status.step, status.steps)

    return report
