"""What is written to standard error: one line for each event, by a separate thread. Never what a caller sent."""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import re
import threading
import time
import traceback
from collections.abc import Callable, MutableMapping
from datetime import UTC, datetime
from functools import cache
from logging.handlers import QueueHandler, QueueListener
from typing import Any, TextIO

import orjson
import structlog

from app.settings import Logs

MAX_TEXT = 512  # characters of one value; nothing of ours is longer
MOST_WAITING = 4096  # lines, a few seconds at full load
MOST_SUCCESSES = 3072  # of them: lines about what went well are dropped first
GATHER_SECONDS = 0.02
"""Lines of this time are written at once: each turn of the thread takes the interpreter from the event loop."""
BLOCK_BYTES = 4096  # POSIX' PIPE_BUF on Linux: a pipe takes such a write whole or not at all, whoever else writes to it
PLACEHOLDER = re.compile(r"%(\(\w+\))?[-#0 +]*[\d*]*(\.[\d*]+)?[a-zA-Z]")  # of printf: what stood there is not shown
RETRY_SECONDS = 0.2
DRAIN_SECONDS = 2.0  # at the end, for a reader that is slow or stalled

Event = MutableMapping[str, Any]


class Lines(QueueHandler):
    """The standard handler, which never blocks: beyond `MOST_WAITING` lines, new ones are dropped. `on_drop` is called for each."""

    queue: queue.SimpleQueue[logging.LogRecord | threading.Event]
    on_drop: Callable[[], None] = staticmethod(lambda: None)

    def enqueue(self, record: logging.LogRecord) -> None:
        """Keep the line for the thread that writes, if there is room."""
        if self.queue.qsize() < (MOST_SUCCESSES if record.levelno <= logging.INFO else MOST_WAITING):
            self.queue.put_nowait(record)
        else:
            self.on_drop()


class Writer:
    """What the listener hands lines to: it writes several at once to a descriptor. Lines that the descriptor does not take are lost.

    No `logging.Handler`: those are flushed at exit, which would wait for a reader that has stalled.
    """

    def __init__(self, descriptor: int = 2) -> None:
        self.descriptor = descriptor
        self.gathered = b""

    def handle(self, record: logging.LogRecord | threading.Event) -> None:
        """Take a line; `flush` writes it. An event is set when all lines before it are written."""
        if isinstance(record, threading.Event):
            self.flush()
            record.set()
            return
        line = f"{record.getMessage()}\n".encode(errors="backslashreplace")
        if len(self.gathered) + len(line) > BLOCK_BYTES:
            self.flush()
        self.gathered += line

    def flush(self) -> None:
        """Write what was taken."""
        data = self.gathered
        while data:
            try:
                data = data[os.write(self.descriptor, data) :]
            except BlockingIOError:  # another process that shares the descriptor made it non-blocking
                time.sleep(GATHER_SECONDS)
            except OSError:  # no reader or no space: either may come back
                time.sleep(RETRY_SECONDS)
                break
        self.gathered = b""


class Listener(QueueListener):
    """The standard listener, which lets the writer gather."""

    def dequeue(self, block: bool) -> logging.LogRecord:
        """The next line. Before it waits, what was gathered is written."""
        try:
            return super().dequeue(False)
        except queue.Empty:
            if writer.gathered:
                time.sleep(GATHER_SECONDS)
        try:
            return super().dequeue(False)
        except queue.Empty:
            writer.flush()
            return super().dequeue(block)


lines = Lines(queue.SimpleQueue())
writer = Writer()
listener = Listener(lines.queue, writer)  # type: ignore[arg-type]  # it only calls `handle`


class Output:
    """What structlog calls with a rendered line, which becomes a record of the standard library. The method's name is its level."""

    def __init__(self, emit: Callable[[logging.LogRecord], None]) -> None:
        self._emit = emit

    def __getattr__(self, name: str) -> Callable[[str], None]:
        level = logging.getLevelNamesMapping().get(name.upper(), logging.ERROR)

        def write(line: str) -> None:
            self._emit(logging.LogRecord("app", level, "", 0, line, None, None))

        setattr(self, name, write)  # found at once from now on
        return write


def configure(settings: Logs, stream: TextIO | None = None, worker: int | None = None) -> None:
    """Set up structlog and the standard library's loggers for this process: JSON lines, or lines for people.

    They go to standard error from a thread of their own, or straight to a stream. `worker`: the number that is in every line.
    """
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    shared: list[Any] = [] if worker is None else [lambda logger, name, event: {**event, "worker": worker}]
    shared += [
        structlog.stdlib.add_log_level,
        stamp,
        structlog.processors.format_exc_info,
        shorten,
    ]
    renderer: Any = render
    if are_for_people(settings, stream):
        renderer = structlog.dev.ConsoleRenderer(
            colors=takes_colours(stream), exception_formatter=structlog.dev.plain_traceback
        )
    handler = lines if stream is None else logging.StreamHandler(stream)
    of_libraries = [structlog.stdlib.add_logger_name, without_data, *shared]
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(renderer, foreign_pre_chain=of_libraries, use_get_message=False)
    )
    output = Output(lines.enqueue if stream is None else logging.StreamHandler(stream).emit)
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *names: output,
        cache_logger_on_first_use=False,
    )
    # Else a line that cannot be formatted is reported on standard error, past the queue.
    logging.raiseExceptions = False
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # no line of ours says them
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(level, logging.WARNING))  # libraries speak only when something is wrong
    if stream is None:
        _listen()


@cache
def _listen() -> None:
    listener.start()
    atexit.register(drain)


def drain() -> None:
    """Wait until all lines are written, for at most `DRAIN_SECONDS`."""
    written = threading.Event()
    lines.queue.put(written)
    written.wait(DRAIN_SECONDS)


def is_terminal(stream: TextIO | None = None) -> bool:
    """Whether lines go to a terminal."""
    return os.isatty(2) if stream is None else stream.isatty()


def are_for_people(settings: Logs, stream: TextIO | None = None) -> bool:
    """Whether lines are for people, else JSON."""
    return settings.format == "console" or (settings.format == "auto" and is_terminal(stream))


def takes_colours(stream: TextIO | None = None) -> bool:
    """Whether lines for people are coloured: on a terminal that knows colours, unless NO_COLOR is set (https://no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def render(logger: Any, name: str, event: Event) -> str:
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


def stamp(logger: Any, name: str, event: Event) -> Event:
    """Add the time: a processor of structlog."""
    event["time"] = datetime.now(UTC).isoformat(timespec="microseconds")[:-6] + "Z"
    return event


def without_data(logger: Any, name: str, event: Event) -> Event:
    """Keep of a library's line what stands in the library's code: a processor of structlog. What is put into such a line may be an address
    with a password, or what a caller sent."""
    event["event"] = PLACEHOLDER.sub("…", event["event"].partition("\n")[0])
    event.pop("stack_info", None)
    if found := event.pop("exc_info", None):
        event.update(of_exception(found[1]))
    return event


def of_exception(error: BaseException) -> Event:
    """The type of an exception and where it was raised, without the message: that may hold what a caller sent."""
    frames = traceback.extract_tb(error.__traceback__)
    trace = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-12:]]
    return {"error": type(error).__name__, "trace": trace}


def shorten(logger: Any, name: str, event: Event) -> Event:
    """Cut values that are too long: a processor of structlog."""
    for key, value in event.items():
        if isinstance(value, str) and len(value) > MAX_TEXT and key != "exception":
            event[key] = value[:MAX_TEXT] + "…"
    return event
