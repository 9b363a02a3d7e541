"""Lines come out whole and in order; where nobody takes them, callers go on, memory is bounded, and what is dropped is counted."""

from __future__ import annotations

import fcntl
import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import structlog

from app.settings import Logs
from app.telemetry import logs
from app.telemetry.sink import LINE_OVERHEAD_BYTES, STALL_SECONDS, Sink
from tests.reliability.live import wait_until

MAX_BYTES = 65536
LINE = "x" * 199 + "\n"


class Pipe:
    """A pipe, and a reader that can be started, or be closed."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, 4096)
        self.sink = Sink(self.writer, MAX_BYTES)
        self.received = bytearray()

    def stall(self) -> None:
        """Fill the pipe, and the hands of the thread that writes: it has taken all, which the pipe does not hold."""
        for _ in range(8192 // len(LINE)):
            self.sink.write(LINE)
        wait_until(lambda: not self.sink._lines)

    def read(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while data := os.read(self.reader, 65536):
            self.received += data

    def lines(self) -> list[str]:
        """All that was written before this call."""
        wait_until(lambda: not self.sink.waiting_bytes)
        ends = self.received.count(b"end\n")
        self.sink.write("end\n")
        wait_until(lambda: self.received.count(b"end\n") > ends)
        return self.received.decode().replace("end\n", "").splitlines()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    before = structlog.get_config()
    structlog.configure(logger_factory=logs.Output(pipe.sink, logs._render, 0), processors=[logs._render])  # type: ignore[list-item]
    yield pipe
    structlog.configure(**before)


def test_lines_of_all_threads_come_out_whole_and_in_order(pipe: Pipe) -> None:
    pipe.sink.max_bytes = 2**30
    pipe.read()
    long = "y" * 10_000  # no block takes it at once

    def write(name: int) -> None:
        for number in range(1000):
            pipe.sink.write(f"{name} {number} {long if number % 100 == 0 else ''}\n")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    found = [line.split(" ") for line in pipe.lines()]
    assert all(rest == (long if int(number) % 100 == 0 else "") for _, number, rest in found)
    for name in "0123":
        assert [int(number) for of, number, _ in found if of == name] == list(range(1000))


class Line(str):
    """A line during whose counting another thread does something, or waits until it may."""

    def meanwhile(self, counting: str, other: Callable[[], object]) -> Line:
        self.counting, self.other = counting, other  # counted by the thread of this name
        self.threads: list[threading.Thread] = []
        return self

    def __len__(self) -> int:
        if threading.current_thread().name == self.counting and len(self.threads) < 8:
            thread = threading.Thread(target=self.other)
            thread.start()
            self.threads.append(thread)
            thread.join(0.05)
        return super().__len__()


@pytest.mark.parametrize("counting", ["MainThread", "log"])
def test_a_line_that_comes_while_others_are_counted_is_counted_too(pipe: Pipe, counting: str) -> None:
    pipe.read()
    line = Line("counted\n").meanwhile(counting, lambda: pipe.sink.write("other\n"))
    pipe.sink.write(line)
    wait_until(lambda: b"counted\n" in pipe.received and pipe.sink.waiting_bytes == 0)
    wait_until(lambda: pipe.received.count(b"other\n") == len(line.threads) > 0 and pipe.sink.waiting_bytes == 0)


def test_lines_that_are_given_up_are_taken_by_nobody_else(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end, while the thread of the sink counts, and while lines come."""
    monkeypatch.setattr("app.telemetry.sink.STALL_SECONDS", 0.0)
    pipe.read()
    line = Line("taken\n").meanwhile("log", pipe.sink.drain)
    with pipe.sink._lock:  # so that both are in a block
        pipe.sink.write("first\n")
        pipe.sink.write(line)
    wait_until(lambda: bool(line.threads))
    for thread in line.threads:
        thread.join(10)
    assert pipe.lines() == ["first", "taken"], "and the sink still writes"


def test_a_line_that_comes_while_others_are_given_up_is_neither_lost_nor_counted_wrong(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.telemetry.sink.STALL_SECONDS", 0.0)
    pipe.stall()
    line = Line("given up\n").meanwhile("", lambda: pipe.sink.write("other\n"))
    pipe.sink.write(line)
    line.counting = "MainThread"
    pipe.sink.drain()
    assert line.threads
    for thread in line.threads:
        thread.join(10)
    pipe.read()
    lines = pipe.lines()
    assert lines.count("other") == len(line.threads)
    assert "given up" not in lines
    wait_until(lambda: pipe.sink.waiting_bytes == 0)


def test_where_nobody_reads_memory_is_bounded_and_each_lost_line_is_counted(pipe: Pipe) -> None:
    for _ in range(10_000):
        pipe.sink.write(LINE)
        assert pipe.sink.waiting_bytes <= MAX_BYTES
    dropped = pipe.sink.dropped["reader_slow"]
    assert dropped > 9_000
    pipe.read()
    lines = pipe.lines()
    told = [json.loads(line) for line in pipe.lines() if line.startswith("{")]
    assert [line["lines"] for line in told] == [dropped]
    assert len([line for line in lines if line.startswith("x")]) + dropped == 10_000
    control = Pipe()
    control.sink.max_bytes = 2**30
    for _ in range(10_000):
        control.sink.write(LINE)
    assert control.sink.waiting_bytes > 9_000 * len(LINE) > MAX_BYTES, "without the bound all of it waits"
    control.read()


@pytest.mark.parametrize("has_priority", [True, False])
def test_lines_of_successes_are_dropped_first(pipe: Pipe, has_priority: bool) -> None:
    """The negative control writes successes as if they mattered as much: then failures are lost."""
    pipe.stall()
    for _ in range(1000):
        (pipe.sink.write_droppable if has_priority else pipe.sink.write)("success" + LINE)
    room = MAX_BYTES // 4 // (LINE_OVERHEAD_BYTES + len("failure" + LINE))
    for _ in range(room):
        pipe.sink.write("failure" + LINE)
    pipe.read()
    failures = [line for line in pipe.lines() if line.startswith("failure")]
    assert (len(failures) == room) is has_priority


def test_a_dead_reader_and_a_full_disk_are_counted_and_the_end_comes() -> None:
    dead = Pipe()
    os.close(dead.reader)
    for sink in (dead.sink, Sink(os.open("/dev/full", os.O_WRONLY), MAX_BYTES)):
        sink.write(LINE)
        wait_until(lambda sink=sink: sink._obstacle == "write_failed")
        for _ in range(1000):
            sink.write(LINE)
        assert sink.dropped["write_failed"] > 0
        began = time.monotonic()
        sink.drain()
        assert time.monotonic() - began < STALL_SECONDS + 10
        assert sum(sink.dropped.values()) >= 1001 - 4096 // len(LINE)  # a block is in the writer's hands
        assert sink.dropped["stopped"] > 0


def test_a_reader_that_comes_back_finds_every_line(tmp_path: Path) -> None:
    """A named pipe: its first reader goes, another comes."""
    os.mkfifo(tmp_path / "log")
    first = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    sink = Sink(os.open(tmp_path / "log", os.O_WRONLY), MAX_BYTES)
    os.close(first)
    for number in range(100):
        sink.write(f"{number}\n")
    wait_until(lambda: sink._obstacle == "write_failed")
    with open(tmp_path / "log") as second:
        assert [second.readline() for _ in range(100)] == [f"{number}\n" for number in range(100)]


def test_a_descriptor_that_does_not_block_loses_nothing(pipe: Pipe) -> None:
    """Another process that shares it may have made it so."""
    pipe.sink.max_bytes = 2**30
    os.set_blocking(pipe.writer, False)
    for _ in range(1000):
        pipe.sink.write(LINE)
    wait_until(lambda: not select.select([], [pipe.writer], [], 0)[1])
    pipe.read()
    assert pipe.lines() == [LINE[:-1]] * 1000


def test_drain_waits_for_a_slow_reader_as_long_as_it_makes_progress(pipe: Pipe) -> None:
    pipe.sink.max_bytes = 2**30
    for _ in range(600):
        pipe.sink.write(LINE)

    def read_slowly() -> None:
        while True:
            pipe.received += os.read(pipe.reader, 4096)
            time.sleep(0.06)  # 1.8 s for all

    threading.Thread(target=read_slowly, daemon=True).start()
    pipe.sink.drain()
    assert sum(pipe.sink.dropped.values()) == 0
    assert not pipe.sink.waiting_bytes


def test_a_line_may_be_written_while_a_line_is_written(pipe: Pipe) -> None:
    """A finalizer or a signal's handler runs at any moment, in a thread that may hold the lock."""
    pipe.read()
    with pipe.sink._lock:
        pipe.sink.write("within\n")
    assert pipe.lines() == ["within"]


def test_without_a_standard_error_lines_go_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    sink = logs.process_sink.__wrapped__()
    logs.configure(Logs())
    sink.write(LINE)
    sink.drain()
    assert sum(sink.dropped.values()) == 0
    structlog.reset_defaults()
