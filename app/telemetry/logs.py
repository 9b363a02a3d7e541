"""What is written to standard error: one line an event, one line a request. Not for metrics, and never for what a caller sent."""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Callable, MutableMapping
from typing import Any, TextIO

import structlog

from app.settings import Logs
from app.telemetry.exchange import Exchange

MAX_TEXT = 512  # characters of one value; nothing of ours is longer
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

Event = MutableMapping[str, Any]


def configure(settings: Logs, stream: TextIO | None = None) -> None:
    """Set up structlog and the standard library's loggers for this process: JSON lines, or colours on a terminal."""
    stream = sys.stderr if stream is None else stream
    for_people = settings.format == "console" or (settings.format == "auto" and stream.isatty())
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.format_exc_info,
        _shorten,
    ]
    renderer: Any = structlog.dev.ConsoleRenderer() if for_people else _render
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[settings.level]),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(renderer, foreign_pre_chain=shared))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(LEVELS[settings.level], logging.WARNING))  # libraries speak only when something is wrong


class RequestLog:
    """Writes the line of a request: all failures, and the given share of the successes."""

    def __init__(self, success_sample: float = 1.0, draw: Callable[[], float] = random.random) -> None:
        self.success_sample = success_sample
        self._draw = draw
        self._log = structlog.get_logger("app.request")

    def write(self, exchange: Exchange, seconds: float, trace_id: str | None = None) -> None:
        """One line for a request that took that long. Server errors are errors, refusals and odd clients are warnings."""
        if exchange.status < 400 and self.success_sample < 1 and self._draw() >= self.success_sample:
            return
        fields: dict[str, Any] = {
            "request_id": exchange.request_id,
            "method": exchange.method,
            "route": exchange.route,
            "status": exchange.status,
            "duration_ms": round(seconds * 1e3, 3),
        }
        for name in ("code", "key", "version", "candidates", "history", "requests", "cache"):
            if value := getattr(exchange, name):
                fields[name] = value
        if exchange.stages:
            fields["stages_ms"] = {stage: round(value * 1e3, 3) for stage, value in exchange.stages.items()}
        if trace_id is not None:
            fields["trace_id"] = trace_id
        level = "error" if exchange.status >= 500 else "warning" if exchange.status >= 400 else "info"
        getattr(self._log, level)("request", **fields)


def _render(logger: Any, name: str, event: Event) -> str:
    """ASCII only, so that no terminal or log viewer finds a control character."""
    return json.dumps(event, default=str, ensure_ascii=True, separators=(",", ":")).replace("\x7f", "\\u007f")


def _shorten(logger: Any, name: str, event: Event) -> Event:
    for key, value in event.items():
        if isinstance(value, str) and len(value) > MAX_TEXT and key != "exception":
            event[key] = value[:MAX_TEXT] + "…"
    return event
