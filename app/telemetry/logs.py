"""What is written to standard error, one line an event: where it goes and in which form. Never what a caller sent."""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TextIO

import orjson
import structlog

from app.settings import Logs
from app.telemetry.sink import Sink

MAX_TEXT = 512  # characters of one value; nothing of ours is longer
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

Event = MutableMapping[str, Any]

_stamp = structlog.processors.TimeStamper(fmt="iso", utc=True, key="time")


@dataclass(frozen=True, slots=True)
class Output:
    """Where lines go, and how: structlog's factory of loggers, found again by `observe.RequestLog`, which goes round structlog."""

    stream: TextIO | Sink
    render: Callable[[Any, str, Event], str]
    level: int
    process: Mapping[str, Any] = field(default_factory=dict)  # fields about the process, added to every line

    def __call__(self, *names: str) -> structlog.WriteLogger:
        """A logger that writes there."""
        return structlog.WriteLogger(self.stream)  # type: ignore[arg-type]  # it needs `write` and `flush`


@functools.cache
def process_sink() -> Sink:
    """The process's one sink to standard error, drained at exit; without a standard error its lines go to /dev/null."""
    sink = Sink(2 if sys.stderr is not None else os.open(os.devnull, os.O_WRONLY))
    atexit.register(sink.drain)
    return sink


def configure(settings: Logs, stream: TextIO | None = None, front: int | None = None) -> None:
    """Set up structlog and the standard library's loggers for this process: JSON lines, or colours on a terminal.

    They go to the process's sink, or straight to a stream. `front`: the number that is in every line.
    """
    for_people = are_for_people(settings, stream)
    process: Event = {} if front is None else {"front": front}
    shared: list[Any] = [lambda logger, name, event: {**event, **process}] if process else []
    shared += [structlog.stdlib.add_log_level, _stamp, structlog.processors.format_exc_info, shorten]
    renderer: Any = structlog.dev.ConsoleRenderer() if for_people else _render
    output = Output(stream or process_sink(), renderer, LEVELS[settings.level], process)
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(output.level),
        logger_factory=output,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(output.stream)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(renderer, foreign_pre_chain=shared))
    logging.raiseExceptions = False  # else a line that cannot be formatted is reported on standard error, past the sink
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(output.level, logging.WARNING))  # libraries speak only when something is wrong


def are_for_people(settings: Logs, stream: TextIO | None = None) -> bool:
    """Whether lines are for a terminal, else JSON."""
    is_terminal = os.isatty(2) if stream is None else stream.isatty()
    return settings.format == "console" or (settings.format == "auto" and is_terminal)


def _render(logger: Any, name: str, event: Event) -> str:
    """ASCII only, so that no terminal or log viewer finds a control character. It never raises."""
    try:
        if (line := orjson.dumps(event)).isascii():
            return line.replace(b"\x7f", b"\\u007f").decode()
    except TypeError:  # what orjson does not know, such as half of a surrogate pair
        pass
    try:
        text = json.dumps(event, default=str, ensure_ascii=True, separators=(",", ":"))
    except Exception as error:
        known = {name: str(event.get(name)) for name in ("level", "time")}
        text = json.dumps({"event": "unprintable", "error": type(error).__name__, **known})
    return text.replace("\x7f", "\\u007f")


def shorten(logger: Any, name: str, event: Event) -> Event:
    """Cut values that are too long: a processor of structlog."""
    for key, value in event.items():
        if isinstance(value, str) and len(value) > MAX_TEXT and key != "exception":
            event[key] = value[:MAX_TEXT] + "…"
    return event
