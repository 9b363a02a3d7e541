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
from collections.abc import Callable
from functools import cache, lru_cache, partial
from logging.handlers import QueueHandler, QueueListener
from typing import Any, TextIO

import msgspec
import orjson
import structlog
from structlog.typing import EventDict

from app.settings import Logs

MAX_TEXT = 512  # characters of one value; nothing of ours is longer
MOST_WAITING = 4096  # lines, a few seconds at full load
MOST_SUCCESSES = 3072  # of them: lines about what went well are dropped first
GATHER_SECONDS = 0.05
"""Lines of this time are written at once: each turn of the thread takes the interpreter from the event loop."""
BLOCK_BYTES = 4096  # POSIX' PIPE_BUF on Linux: a pipe takes such a write whole or not at all, whoever else writes to it
PLACEHOLDER = re.compile(r"%(\(\w+\))?[-#0 +]*[\d*]*(\.[\d*]+)?[a-zA-Z]")  # of printf: what stood there is not shown
RETRY_SECONDS = 0.2
DRAIN_SECONDS = 2.0  # at the end, for a reader that is slow or stalled

LEVEL_NAMES = {level: name.lower() for name, level in logging.getLevelNamesMapping().items()}


class Lines(QueueHandler):
    """The queue of lines that wait for the thread that writes. It never blocks: beyond `MOST_WAITING` lines, new ones are dropped.

    `on_drop` is called for each of these. It is the standard library's handler, so records of libraries reach the queue too.
    """

    queue: queue.SimpleQueue[str | bytes | threading.Event]
    on_drop: Callable[[], None] = staticmethod(lambda: None)

    def enqueue(self, record: logging.LogRecord) -> None:
        """Keep a library's record, which `prepare` has formatted."""
        self.put(record.levelno, record.getMessage())

    def put(self, level: int, line: str | bytes) -> None:
        """Keep a line for the thread that writes, if there is room."""
        if self.queue.qsize() < (MOST_SUCCESSES if level <= logging.INFO else MOST_WAITING):
            self.queue.put_nowait(line)
        else:
            self.on_drop()


class Writer:
    """What the listener hands lines to: it writes several at once to a descriptor. Lines that the descriptor does not take are lost, and
    `on_loss` is called with their number. If one was written in part, the next one begins on a line of its own.

    No `logging.Handler`: those are flushed at exit, which would wait for a reader that has stalled.
    """

    on_loss: Callable[[int], object] = staticmethod(lambda lost: None)

    def __init__(self, descriptor: int = 2) -> None:
        self.descriptor = descriptor
        self.gathered = b""
        self._is_cut = False  # whether the last write ended within a line

    def handle(self, line: str | bytes | threading.Event) -> None:
        """Take a line, as text or already encoded; `flush` writes it. An event is set when all lines before it are written."""
        if isinstance(line, threading.Event):
            self.flush()
            line.set()
            return
        data = (line if isinstance(line, bytes) else line.encode(errors="backslashreplace")) + b"\n"
        if len(self.gathered) + len(data) > BLOCK_BYTES:
            self.flush()
        self.gathered += data

    def flush(self) -> None:
        """Write what was taken."""
        data = b"\n" + self.gathered if self._is_cut and self.gathered else self.gathered
        while data:
            try:
                written = os.write(self.descriptor, data)
                self._is_cut = data[written - 1 : written] != b"\n"
                data = data[written:]
            except BlockingIOError:  # another process that shares the descriptor made it non-blocking
                time.sleep(GATHER_SECONDS)
            except OSError:  # no reader or no space: either may come back
                self.on_loss(data.lstrip(b"\n").count(b"\n"))  # a line that lacks its end alone is not lost
                time.sleep(RETRY_SECONDS)
                break
        self.gathered = b""


class Listener(QueueListener):
    """The standard listener, which lets the writer gather."""

    def dequeue(self, block: bool) -> Any:
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
    """What structlog calls with a rendered line. The method's name is its level."""

    def __init__(self, put: Callable[[int, str], None]) -> None:
        self._put = put

    def __getattr__(self, name: str) -> Callable[[str], None]:
        level = logging.getLevelNamesMapping().get(name.upper(), logging.ERROR)

        def write(line: str) -> None:
            self._put(level, line)

        setattr(self, name, write)  # found at once from now on
        return write


class AccessLine(msgspec.Struct, omit_defaults=True, gc=False):
    """The line of one request, in the order of its fields. A field that has its default is left out.

    `duration_ms` and `stages_ms` are milliseconds, to the microsecond. `status` 499: the client disconnected. No text is longer than
    `MAX_TEXT`. `AccessLog` adds `worker`, `level` and `time`.
    """

    request_id: str
    method: str
    route: str
    status: int
    duration_ms: float
    code: str = ""
    key: str | None = None
    version: str = ""
    candidates: int = 0
    history: int = 0
    requests: int = 0
    cache: str = ""
    stages_ms: dict[str, float] = {}
    trace_id: str | None = None
    worker: int | None = None
    event: str = ""
    level: str = ""
    time: str = ""


class AccessLog:
    """Writes a line a request. JSON goes straight to where lines go: structlog's processors took a tenth of a small request.

    `put`: None where lines are for people, which structlog writes. `worker`: the number that is in every line.
    """

    put: Callable[[int, str | bytes], object] | None = None
    level = logging.INFO
    worker: int | None = None

    def write(self, level: int, line: AccessLine) -> None:
        """Write a line, unless lines of this level are not written."""
        if self.put is None:
            fields = msgspec.to_builtins(line)
            structlog.get_logger("app.request").log(level, fields.pop("event"), **fields)
        elif level >= self.level:
            line.worker, line.level, line.time = self.worker, LEVEL_NAMES[level], now()
            data = encode_line(line)
            if data.isascii():
                self.put(level, data.replace(b"\x7f", b"\\u007f"))
            else:
                self.put(level, render(None, "", msgspec.to_builtins(line)))


access = AccessLog()
encode_line = msgspec.json.Encoder().encode


def put_into(stream: TextIO, level: int, line: str | bytes) -> None:
    """Write a line to a stream at once."""
    stream.write(f"{line if isinstance(line, str) else line.decode()}\n")


def configure(settings: Logs, stream: TextIO | None = None, worker: int | None = None) -> None:
    """Set up structlog and the standard library's loggers for this process: JSON lines, or lines for people.

    They go to standard error from a thread of their own, or straight to a stream. `worker`: the number that is in every line.
    """
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    number = {} if worker is None else {"worker": worker}
    shared: list[Any] = [] if worker is None else [lambda logger, name, event: {**event, **number}]
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
    put = lines.put if stream is None else partial(put_into, stream)
    output = Output(put)
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *names: output,
        cache_logger_on_first_use=False,
    )
    access.put = None if renderer is not render else put
    access.level, access.worker = level, worker
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


def render(logger: Any, name: str, event: EventDict) -> str:
    """ASCII only, so that no terminal or log viewer finds a control character. It never raises."""
    try:
        if (line := orjson.dumps(event)).isascii():
            return line.replace(b"\x7f", b"\\u007f").decode()
    except TypeError:  # what orjson does not know, such as half of a surrogate pair
        pass
    try:
        text = json.dumps(event, default=str, ensure_ascii=True, separators=(",", ":"))
    except Exception as error:
        fields = {name: str(event.get(name)) for name in ("level", "time")}
        text = json.dumps({"event": "unprintable", "error": type(error).__name__, **fields})
    return text.replace("\x7f", "\\u007f")


def stamp(logger: Any, name: str, event: EventDict) -> EventDict:
    """Add the time: a processor of structlog."""
    event["time"] = now()
    return event


def now() -> str:
    """The time in UTC (RFC 3339), to the microsecond."""
    seconds, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
    return f"{of_second(seconds)}.{nanoseconds // 1000:06}Z"


@lru_cache(1)
def of_second(seconds: int) -> str:
    """Return Unix seconds as date and time in UTC (RFC 3339), without the zone."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def without_data(logger: Any, name: str, event: EventDict) -> EventDict:
    """Keep of a library's line what stands in the library's code: a processor of structlog. What is put into such a line may be an address
    with a password, or what a caller sent."""
    event["event"] = PLACEHOLDER.sub("…", event["event"].partition("\n")[0])
    event.pop("stack_info", None)
    if exception_info := event.pop("exc_info", None):
        event.update(of_exception(exception_info[1]))
    return event


def of_exception(error: BaseException) -> EventDict:
    """The type of an exception and where it was raised, without the message: that may hold what a caller sent."""
    frames = traceback.extract_tb(error.__traceback__)
    trace = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-12:]]
    return {"error": type(error).__name__, "trace": trace}


def shorten(logger: Any, name: str, event: EventDict) -> EventDict:
    """Cut values that are too long: a processor of structlog."""
    for key, value in event.items():
        if isinstance(value, str) and len(value) > MAX_TEXT and key != "exception":
            event[key] = value[:MAX_TEXT] + "…"
    return event
