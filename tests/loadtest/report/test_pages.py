"""From a run against a server to its files and report, and a comparison of two servers."""

import json
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from loadtest.__main__ import cli
from loadtest.measure.runs import Run
from loadtest.measure.search import judge
from loadtest.report.pages import write_report
from tests.loadtest.toy_server import ToyServer

HEADERS = ["X-Context-Cache: miss", "Server-Timing: parse;dur=0.1, queue;dur=0.2, forward;dur=1, serialize;dur=0.1"]


@pytest.fixture(scope="module")
def url():
    """A server that has neither /info nor /metrics."""
    with ToyServer(delay_seconds=0.003, headers=HEADERS).in_thread() as url:
        yield url


def command(*arguments):
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def stored(url, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "first"
    options = [
        "--rate",
        "150",
        "--seconds",
        "2",
        "--warmup",
        "0.3",
        "--seed",
        "1",
        "--slo-ms",
        "1000",
    ]  # of a busy machine, too
    done = command("open", "--url", url, *options, "--out", directory)
    assert done.exit_code == 0, done.output
    return directory


def test_a_run_is_stored_with_everything_needed_to_read_it(stored):
    run = Run.load(stored)
    assert run.meta["settings"]["rate_rps"] == 150
    assert run.meta["settings"]["traffic"]["seed"] == 1
    assert {"commit", "cpu", "cores", "load_average_1m"} <= run.meta["machine"].keys()
    assert run.summary["requests"] == len(run.samples) > 200
    assert run.summary["statuses"] == {"200": len(run.samples)}
    assert run.summary["stages_ms"]["forward"]["p50"] == 1
    assert run.samples.due.max() < 2  # the warm-up is not among them
    assert judge(run) == "holds"


def test_the_report_says_what_was_found_and_shows_its_pictures(stored):
    page = (stored / "report.md").read_text()
    for words in (
        "the objective of 99 %",
        "## Where the time goes",
        "| p99.9, ms |",
        "commit",
        "| first visit |",
        "| 200 |",
    ):
        assert words in page
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", page)
    assert pictures == ["over_time.png", "distribution.png", "stages.png"]
    for name in pictures:
        assert (stored / name).read_bytes().startswith(b"\x89PNG")


COMPARED = ["--warmup", "0.1", "--rate", "100", "--seconds", "0.3", "--blocks", "8", "--smallest-effect", "0.5"]


def test_servers_are_compared_in_turns_and_the_page_is_written(url, tmp_path):
    done = command("compare", url, url, *COMPARED, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "run.json").read_text())
    assert result["comparison"]["verdict"] == "no difference shown"
    assert len(result["blocks"]["a"]) == len(result["blocks"]["b"]) == 8
    assert "Verdict: no difference shown" in (tmp_path / "report.md").read_text()


def test_a_slower_server_turns_the_comparison_red(url, tmp_path):
    """Negative control of the exit code."""
    with ToyServer(delay_seconds=0.03, headers=HEADERS).in_thread() as slower:
        done = command("compare", url, slower, *COMPARED, "--out", tmp_path)
    assert done.exit_code == 1, done.output
    assert "Verdict: B is worse" in done.output


def test_a_run_that_nobody_answered_is_a_failure(tmp_path):
    with ToyServer(status=429, headers=HEADERS).in_thread() as refusing:
        done = command("open", "--url", refusing, "--rate", 50, "--seconds", 0.4, "--warmup", 0, "--out", tmp_path)
    assert (done.exit_code, '"429": ' in done.output) == (1, True), done.output


def test_a_report_that_cannot_be_written_is_one_sentence(url, tmp_path):
    (tmp_path / "file").touch()
    done = command("open", "--url", url, "--seconds", 1, "--warmup", 0, "--out", tmp_path / "file")
    assert (done.exit_code, "File exists" in done.stderr.splitlines()[-1]) == (2, True), done.output


def test_another_server_is_told_from_ours(tmp_path):
    (tmp_path / "info").write_text("<html>")
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        other = f"http://127.0.0.1:{server.server_port}"
        done = command("open", "--url", other, "--out", tmp_path)
        server.shutdown()
    assert done.exit_code == 2
    assert done.stderr.endswith(f"{other} is no ranking server: its /info is no JSON\n")


@pytest.mark.parametrize("option", ["--rate", "--seconds", "--warmup"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_numbers_that_no_run_can_have_are_refused(url, tmp_path, option, value):
    done = command("open", "--url", url, f"{option}={value}", "--out", tmp_path)
    assert (done.exit_code, "finite" in done.stderr) == (2, True), done.output


def test_what_cannot_be_measured_is_refused_politely(tmp_path):
    assert command("open", "--url", "http://127.0.0.1:1", "--out", tmp_path).exit_code == 2
    assert command("report", tmp_path).exit_code == 2
    (tmp_path / "run.json").write_text('{"kind": "poem"}')
    with pytest.raises(ValueError, match="poem"):
        write_report(tmp_path)
