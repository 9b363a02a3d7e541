"""Log lines: one an event, safe to print, from a thread of their own that nobody waits for."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest
import structlog

from app.settings import Logs
from app.telemetry.logs import MOST_SUCCESSES, MOST_WAITING, AccessLine, access, configure
from tests.support.asgi import served

pytestmark = pytest.mark.one_process("it is about the log of one process")

LOG = """
import structlog
from app.settings import Logs
from app.telemetry import logs

logs.configure(Logs())
log = structlog.get_logger("x")
"""


@pytest.fixture
def lines() -> io.StringIO:
    stream = io.StringIO()
    configure(Logs(format="json"), stream)
    return stream


def said(lines: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in lines.getvalue().splitlines()]


@pytest.mark.parametrize("worker", [None, 3])
def test_a_line_is_one_json_object_with_utc_time_and_worker(lines: io.StringIO, worker: int | None) -> None:
    configure(Logs(format="json"), lines, worker=worker)
    structlog.get_logger("app").info("planted", number=5)
    logging.getLogger("library").warning("a warning")
    ours, theirs = said(lines)
    assert (ours["event"], ours["level"], ours["number"], ours.get("worker")) == ("planted", "info", 5, worker)
    assert (theirs["event"], theirs["level"], theirs.get("worker")) == ("a warning", "warning", worker)
    for line in (ours, theirs):
        assert str(line["time"])[19] == "."
        assert str(line["time"])[-1] == "Z"


@pytest.mark.parametrize("worker", [None, 0, 3])
def test_the_line_of_a_request_has_its_fields_in_order(lines: io.StringIO, worker: int | None) -> None:
    configure(Logs(format="json"), lines, worker=worker)
    line = AccessLine("r1", "POST", "/rank", 200, 1.25, stages_ms={"parse": 0.5}, candidates=7, event="request")
    access.write(logging.INFO, line)
    start = '{"request_id":"r1","method":"POST","route":"/rank","status":200,"duration_ms":1.25,"candidates":7,'
    number = "" if worker is None else f'"worker":{worker},'
    end = f'"stages_ms":{{"parse":0.5}},{number}"event":"request","level":"info","time":"'
    assert lines.getvalue().startswith(start + end)
    assert lines.getvalue().endswith('Z"}\n')


@pytest.mark.parametrize("odd", ["\x7f", "é", "\u2028", "\x1b[31m", "\n", '"'])
def test_a_checkpoint_with_an_odd_version_has_a_safe_line(lines: io.StringIO, odd: str) -> None:
    access.write(logging.INFO, AccessLine("r1", "POST", "/rank", 200, 1.25, version=f"v{odd}", event="request"))
    assert lines.getvalue().isascii()
    assert lines.getvalue()[:-1].isprintable()
    assert said(lines)[0]["version"] == f"v{odd}"


def test_what_a_library_puts_into_its_line_is_left_out(lines: io.StringIO) -> None:
    """It may be an address with its password, or what a caller sent."""
    library = logging.getLogger("library.part")
    library.error("cannot reach %s", "redis://:secret@host")
    try:
        raise ValueError("redis://:secret@host")
    except ValueError:
        library.exception("it ends\nwith secret")
    first, second = said(lines)
    assert "secret" not in lines.getvalue()
    assert (first["logger"], first["event"], first["level"]) == ("library.part", "cannot reach …", "error")
    assert (second["event"], second["error"]) == ("it ends", "ValueError")
    assert "test_logs.py" in str(second["trace"])


def test_a_long_value_is_cut(lines: io.StringIO) -> None:
    structlog.get_logger("app").info("planted", value="x" * 65536)
    assert len(lines.getvalue()) < 1000


def test_a_value_that_cannot_be_printed_costs_only_its_line(lines: io.StringIO) -> None:
    class Odd:
        def __str__(self) -> str:
            raise ValueError

    structlog.get_logger("app").info("said", value=Odd())
    [line] = said(lines)
    assert (line["event"], line["error"], line["level"]) == ("unprintable", "ValueError", "info")


@pytest.mark.parametrize(("level", "count"), [("debug", 3), ("info", 3), ("warning", 2), ("error", 1)])
def test_lines_below_the_level_are_not_written(lines: io.StringIO, level: str, count: int) -> None:
    configure(Logs(format="json", level=level), lines)  # type: ignore[arg-type]
    log = structlog.get_logger("app")
    for write in (log.info, log.warning, log.error):
        write("planted")
    assert len(said(lines)) == count


def test_lines_come_in_order_and_whole_to_the_end_of_the_process() -> None:
    code = LOG + "for n in range(2000): log.info('planted', number=n, padding='x' * 300)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert [json.loads(line)["number"] for line in ended.stderr.splitlines()] == list(range(2000))
    assert ended.returncode == 0


@pytest.mark.slow
def test_a_stalled_reader_stops_nobody_and_drops_are_counted() -> None:
    code = """if True:
        import time
        dropped = []
        logs.lines.on_drop = lambda: dropped.append(1)
        began = time.monotonic()
        for n in range(20_000):
            log.info('planted', padding='x' * 100)
        errors = len(dropped)
        log.error('still taken')
        print(time.monotonic() - began < 20, errors > 10_000, len(dropped) == errors, flush=True)
    """
    reader, writer = os.pipe()
    with subprocess.Popen([sys.executable, "-c", LOG + code], stderr=writer, stdout=subprocess.PIPE) as process:
        os.close(writer)
        assert process.stdout is not None
        assert process.stdout.read().split() == [b"True"] * 3
        began = time.monotonic()
        assert process.wait(30) == 0  # though nobody reads what is left
        assert time.monotonic() - began < 10
    os.close(reader)
    assert MOST_SUCCESSES < MOST_WAITING, "there is room for what goes wrong"


@pytest.mark.slow
def test_lines_that_a_full_disk_does_not_take_are_counted(tmp_path: Path) -> None:
    code = """if True:
        from tests.support.full_disk import full_disk
        lost = []
        logs.writer.on_loss = lost.append
        for first, size in ((0, 1_000_000), (100, 20_000), (200, 20_000_000), (300, 20_000_000)):
            with full_disk(size):
                for n in range(first, first + 100):
                    log.error('planted', number=n, padding='x' * 60)
                logs.drain()
        print(sum(lost))
    """
    with (tmp_path / "log").open("wb") as file:
        ended = subprocess.run([sys.executable, "-c", LOG + code], stderr=file, stdout=subprocess.PIPE, timeout=60)
    written = (tmp_path / "log").read_text().splitlines()
    whole = [json.loads(line)["number"] for line in written if line.endswith("}")]
    assert len(written) == len(whole) + 1, "one line is there in part, on a line of its own"
    assert 0 < int(ended.stdout) == 400 - len(whole) < 100
    assert {*range(100), *range(200, 400)} <= {*whole}


def test_without_a_reader_the_process_goes_on() -> None:
    ended = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", LOG + "log.info('a'); print('on')"],
        capture_output=True, timeout=60,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (0, b"on\n")


@pytest.mark.parametrize(
    ("environment", "has_colours"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_terminals_get_colours_and_files_do_not(
    lines: io.StringIO, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], has_colours: bool
) -> None:
    for name, value in ({"TERM": "xterm", "NO_COLOR": ""} | environment).items():
        monkeypatch.setenv(name, value)
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        for stream in (terminal, lines):
            configure(Logs(format="console"), stream)
            structlog.get_logger("app").info("planted")
        written = os.read(ours, 65536).decode()
    os.close(ours)
    assert ("planted" in written, "\x1b[" in written) == (True, has_colours)
    assert ("planted" in lines.getvalue(), "\x1b[" in lines.getvalue()) == (True, False)


def test_processes_that_share_a_pipe_do_not_mix_their_lines() -> None:
    code = LOG + "input('')\nfor _ in range(1000): log.info('planted', padding='x' * 700)"
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)  # a longer write would be taken in pieces
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, stderr=writer, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in "ab"]
    os.close(writer)
    time.sleep(1)
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
    with os.fdopen(reader, "rb") as file:
        assert [json.loads(line)["event"] for line in file] == ["planted"] * 2000
    assert [process.wait(30) for process in processes] == [0, 0]


def test_probes_are_told_from_requests() -> None:
    stream = io.StringIO()
    for level, events in (("info", ["request"]), ("debug", ["probe", "probe", "request"])):
        configure(Logs(level=level, format="json"), stream)
        stream.truncate(0)
        stream.seek(0)
        with served() as (client, _):
            for path in ("/livez", "/metrics", "/info"):
                assert client.get(path).status_code == 200
        lines = [json.loads(line) for line in stream.getvalue().splitlines()]
        assert [line["event"] for line in lines if line["event"] in ("probe", "request")] == events


def test_lines_of_libraries_show_no_placeholder() -> None:
    stream = io.StringIO()
    configure(Logs(format="json"), stream)
    logging.getLogger("library").warning("%s of %d bytes at %-5.2f%%", "secret", 3, 1.0)
    assert json.loads(stream.getvalue())["event"] == "… of … bytes at …%%"
