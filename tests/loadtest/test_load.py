"""The load commands against a real server: each ends in order, with its report and figures."""

from __future__ import annotations

import csv
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from loadtest.__main__ import main
from loadtest.generate.generator import schedule
from loadtest.machine import ROOT
from loadtest.measure.search import SearchSettings, search
from loadtest.server import Server, free_port, serving, wait_until


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(retrieval=True, root_path="/ranker") as server:
        yield server


def ended(command: str, url: str, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "loadtest", command, "--url", url, "--out", str(out), *options]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
def test_locust_runs_once_and_leaves_its_report(server: Server, tmp_path: Path) -> None:
    done = ended("load", server.url, tmp_path, "--seconds", "3", "--users", "8", "--slo-ms", "10000")
    assert done.returncode == 0, done.stderr
    assert "<html" in (tmp_path / "report.html").read_text()
    rows = [*csv.DictReader((tmp_path / "run_stats.csv").open())]
    assert int(rows[-1]["Request Count"]) > 0
    assert rows[-1]["Failure Count"] == "0", done.stdout


@pytest.mark.slow
def test_the_open_loop_counts_from_when_a_request_was_due(server: Server, tmp_path: Path) -> None:
    done = ended("open", server.url, tmp_path, "--rate", "20", "--seconds", "2", "--warmup", "0.5")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["answered_rps"] > 0


@pytest.mark.parametrize("command", ["open", "capacity"])
def test_without_a_server_it_is_one_sentence(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(sys, "argv", ["loadtest", command, "--url", url, "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    said = capsys.readouterr()
    assert f"{url} does not answer (ConnectError)" in said.out + said.err
    assert (said.out + said.err).count("\n") == 1


@pytest.mark.parametrize(
    "mistake",
    [
        "bits --compositions 1",
        "bits --compositions -5",
        "bits --compositions 9 --preset all --backend auto",
        "bits --compositions 4 --preset foo",
        "bits --compositions 4 --preset vanilla",
        "bits --compositions 4 --backend native --device cuda",
        "bits --seed -1",
        "served --candidates 0",
        "served --candidates 3",
        "served --seed -1",
        *(f"open --rate {rate}" for rate in ("0", "nan")),
        *(f"open --{name}" for name in ("seconds 0", "warmup -1", "candidates -1", "seed -1", "out pyproject.toml")),
        *(f"capacity --{name}" for name in ("start 0", "candidates -1", "out pyproject.toml")),
        "peers --checkpoint nowhere",
    ],
)
def test_a_value_that_cannot_be_is_refused_before_the_run(
    mistake: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["loadtest", *mistake.split()])
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr()
    assert left.value.code == 2
    assert "Traceback" not in said.err
    assert "does not answer" not in said.err


def test_locust_is_not_asked_for_a_part_of_a_second(tmp_path: Path) -> None:
    done = ended("load", "http://127.0.0.1:1", tmp_path, "--seconds", "0.5")
    assert done.returncode == 2
    assert "--seconds" in done.stderr
    assert "--run-time" not in done.stderr


def test_more_candidates_than_the_server_takes_are_refused(server: Server, tmp_path: Path) -> None:
    done = ended("open", server.url, tmp_path, "--candidates", "5000")
    assert done.returncode == 2
    assert "at most 4096 candidates a request" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_measurement_and_its_server(number: signal.Signals) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("the signal is ignored here, as below nohup, and so it is by the command")
    with subprocess.Popen([sys.executable, "-m", "loadtest", "served"], cwd=ROOT, stdout=subprocess.DEVNULL) as command:
        try:
            wait_until(lambda: servers_of(command.pid), 60)
            [server] = servers_of(command.pid)
            for _ in range(2):  # as `timeout 600 make` sends it
                command.send_signal(number)
                time.sleep(0.2)
            assert command.wait(60) == 128 + number
        finally:
            command.kill()
    assert not Path(f"/proc/{server}").exists()


def servers_of(pid: int) -> list[int]:
    """The children of a process that run the service and take connections."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        port = re.search(rb"\0RANKER_PORT=(\d+)", Path(f"/proc/{child}/environ").read_bytes())
        with socket.socket() as connection:
            if port and not connection.connect_ex(("127.0.0.1", int(port[1]))):
                found.append(int(child))
    return found


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """The address of a server that gives each ranking this answer, and has no `/info`."""

    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(status, body)

        def do_GET(self) -> None:
            self.answer(404, b"")

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(10)


@pytest.mark.slow
def test_a_search_in_which_no_rate_holds_has_its_report(tmp_path: Path) -> None:
    with answering(503, b"") as url:
        done = ended("capacity", url, tmp_path, "--start", "1", "--seconds", "0.1")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["capacity_rps"] == 0
    assert "p50       – ms  p99       – ms" in done.stderr
    assert 'failures {"status 503": ' in done.stderr
    assert "nan" not in done.stderr
    assert "At no rate did" in (tmp_path / "report.md").read_text()


def test_a_capacity_below_one_request_a_second_is_found() -> None:
    outcome = search(lambda rate: "holds" if rate <= 0.9 else "breaks", SearchSettings())
    assert 0.9 / 1.05 <= outcome.capacity_rps <= 0.9


def test_a_poisson_schedule_of_a_low_rate_is_never_empty() -> None:
    for seed in range(100):
        due = schedule("poisson", 0.5, 0.5, seed)
        assert len(due) >= 1
        assert 0 <= due[0] <= due[-1] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "body", [b"<html>oops</html>", b'{"candidates": []}', b"[]", b"", b'{"candidates": [{}], "visible": 9}']
)
def test_a_200_that_is_no_ranking_counts_as_none(body: bytes, tmp_path: Path) -> None:
    with answering(200, body) as url:
        done = ended("open", url, tmp_path, "--rate", "40", "--seconds", "0.2", "--warmup", "0", "--candidates", "8")
    assert done.returncode == 1, done.stderr
    said = json.loads(done.stdout)
    assert said["good_share"] == said["answered_rps"] == 0
    assert said["failures"] == {"wrong_reply": said["requests"]}
    assert "no ranking: wrong_reply" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_refusals_are_printed_as_failures(tmp_path: Path) -> None:
    with answering(404, b"") as url:
        done = ended("open", url, tmp_path, "--rate", "40", "--seconds", "1.5", "--warmup", "0")
    assert done.returncode == 1, done.stderr
    said = json.loads(done.stdout)
    assert said["failures"] == {"status 404": said["requests"]}
    assert "failed" in done.stderr
    assert "nan" not in done.stderr
    assert "| no ranking: status 404" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/rank", "/retrieve", "/recommend", "/ranker", "/ranker/", "/ranker/recommend"])
def test_every_right_reply_counts(server: Server, path: str, tmp_path: Path) -> None:
    done = ended("open", server.url + path, tmp_path, "--rate", "10", "--seconds", "1", "--warmup", "0")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert set(said["failures"]) <= {"status 429"}
    assert set(said["statuses"]) <= {"200", "429"}
