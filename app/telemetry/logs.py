"""What is written to standard error: one line an event, one line a request. Never what a caller sent."""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TextIO

import orjson
import structlog

from app.settings import Logs
from app.telemetry.exchange import Exchange
from app.telemetry.sink import Sink

MAX_TEXT = 512  # characters of one value; nothing of ours is longer
LONG_LINE = 2048  # of a request: one value may be too long
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

Event = MutableMapping[str, Any]

_stamp = structlog.processors.TimeStamper(fmt="iso", utc=True, key="time")


@dataclass(frozen=True, slots=True)
class Output:
    """Where lines go, and how: structlog's factory of loggers, found again by `RequestLog`, which goes round structlog."""

    stream: TextIO | Sink
    render: Callable[[Any, str, Event], str]
    level: int
    process: Mapping[str, Any] = field(default_factory=dict)  # what every line says of its process

    def __call__(self, *names: str) -> structlog.WriteLogger:
        """A logger that writes there."""
        return structlog.WriteLogger(self.stream)  # type: ignore[arg-type]  # it needs `write` and `flush`


@functools.cache
def process_sink() -> Sink:
    """The one over standard error, drained when the process ends; without a standard error its lines go nowhere."""
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
    shared += [structlog.stdlib.add_log_level, _stamp, structlog.processors.format_exc_info, _shorten]
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
    logging.raiseExceptions = False  # else a line that cannot be formatted is told to standard error, past the sink
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(output.level, logging.WARNING))  # libraries speak only when something is wrong


def are_for_people(settings: Logs, stream: TextIO | None = None) -> bool:
    """Whether lines are for a terminal, else JSON."""
    is_terminal = os.isatty(2) if stream is None else stream.isatty()
    return settings.format == "console" or (settings.format == "auto" and is_terminal)


class RequestLog:
    """Writes the line of a request: all failures, and the given share of the successes."""

    def __init__(self, success_sample: float = 1.0, draw: Callable[[], float] = random.random) -> None:
        self.success_sample = success_sample
        self._draw = draw
        self._log = structlog.get_logger("app.request")

    def write(self, exchange: Exchange, seconds: float, trace_id: str | None = None) -> None:
        """One line for a request that took that long. Server errors are errors, refusals and odd clients are warnings."""
        succeeded = exchange.status < 400
        if succeeded and self.success_sample < 1 and self._draw() >= self.success_sample:
            return
        level = "info" if succeeded else "warning" if exchange.status < 500 else "error"
        output = structlog.get_config()["logger_factory"]
        is_ours = isinstance(output, Output)
        if is_ours and LEVELS[level] < output.level:
            return
        fields: Event = {
            "request_id": exchange.request_id,
            "method": exchange.method,
            "route": exchange.route,
            "status": exchange.status,
            "duration_ms": round(seconds * 1e6) / 1e3,
        }
        for name in ("code", "key", "version", "candidates", "history", "requests", "cache"):
            if value := getattr(exchange, name):
                fields[name] = value
        if exchange.stages:
            fields["stages_ms"] = {stage: round(value * 1e6) / 1e3 for stage, value in exchange.stages.items()}
        if trace_id is not None:
            fields["trace_id"] = trace_id
        if not is_ours:
            getattr(self._log, level)("request", **fields)
            return
        fields["event"], fields["level"], fields["time"] = "request", level, _now()
        fields.update(output.process)
        line = output.render(None, level, fields) + "\n"
        if len(line) > LONG_LINE:
            line = output.render(None, level, _shorten(None, level, fields)) + "\n"
        if succeeded and isinstance(output.stream, Sink):
            output.stream.write_droppable(line)
        else:
            output.stream.write(line)


class _Clock:
    """The time as structlog's stamp has it. The date and the second are written once a second."""

    def __init__(self) -> None:
        self._second = -1
        self._text = ""

    def __call__(self) -> str:
        second, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
        if second != self._second:
            self._second, self._text = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._text}.{nanoseconds // 1000:06d}Z"


_now = _Clock()


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


def _shorten(logger: Any, name: str, event: Event) -> Event:
    for key, value in event.items():
        if isinstance(value, str) and len(value) > MAX_TEXT and key != "exception":
            event[key] = value[:MAX_TEXT] + "…"
    return event
