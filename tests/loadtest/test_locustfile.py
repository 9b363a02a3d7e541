"""Locust's scenarios, shapes and bad requests, against the real server, as is the open loop."""

import csv
import json
import subprocess
import sys

import httpx
import numpy as np
import pytest

from loadtest.generate import wrk
from loadtest.generate.bad_requests import bad_requests
from loadtest.generate.traffic import KINDS, Traffic, TrafficSettings
from loadtest.machine import ROOT
from loadtest.measure.figures import Slo
from loadtest.measure.runs import LoadRun, RunSettings
from loadtest.servers.launch import ranking_server
from loadtest.servers.target import Target
from tests.loadtest.toy_server import ToyServer


def test_shapes(monkeypatch):
    monkeypatch.setenv("LOCUST_SKIP_MONKEY_PATCH", "1")
    from loadtest.locustfile import users_at

    ramp = [users_at("ramp", share / 100, 50) for share in range(100)]
    assert (ramp[0], ramp[-1]) == (5, 50)
    assert ramp == sorted(ramp)
    assert [users_at("spike", share, 10) for share in (0.39, 0.4, 0.59, 0.6)] == [10, 50, 50, 10]
    assert [users_at("soak", share, 40) for share in (0.0, 0.025, 0.05, 0.99)] == [1, 20, 40, 40]
    assert users_at("steady", 1.0, 7) == 7


@pytest.fixture(scope="module")
def target():
    posts = {"retrieval__checkpoint": "weights/demo-towers", "retrieval__corpus": "weights/demo-posts"}
    with ranking_server(threads=1, **posts) as running:
        yield running.target


def test_bad_requests_are_refused_as_promised_and_the_good_one_is_not(target):
    good = Traffic(TrafficSettings()).first_visit().body
    url, headers = f"{target.origin}/rank", {"Content-Type": "application/json"}
    assert httpx.post(url, content=good, headers=headers).status_code == 200
    for bad in bad_requests(good):
        reply = httpx.post(url, content=bad.body, headers={"Content-Type": bad.media_type})
        assert (reply.status_code, reply.json()["code"]) == (bad.status, bad.code), bad.name


def test_an_open_loop_run_sees_what_the_server_sees(target):
    def counted():
        return target.total("ranker_http_requests_total", route="/rank")

    settings = RunSettings(40.0, 3.0, 0.0, slo=Slo(latency_ms=1_000), traffic=TrafficSettings(seed=3))
    before = counted()
    run = LoadRun(target, settings, say=lambda line: None).run()
    assert run.summary["statuses"] == {"200": len(run.samples)}
    assert counted() - before == len(run.samples)
    assert not np.isnan(run.samples.stages_ms).any()
    hit = run.samples.cache == 1
    assert hit[run.samples.kind == KINDS.index("page")].mean() > 0.6
    assert hit[run.samples.kind == KINDS.index("first_visit")].mean() < 0.2


@pytest.mark.parametrize("path", ["/retrieve", "/recommend"])
def test_an_open_loop_run_retrieves(target, path):
    settings = RunSettings(30.0, 1.5, 0.5, slo=Slo(latency_ms=1_000), traffic=TrafficSettings(seed=3))
    before = target.total("ranker_http_requests_total", route=path)
    run = LoadRun(Target.parse(target.origin + path), settings, say=lambda line: None).run()
    assert run.summary["statuses"] == {"200": len(run.samples)}
    assert target.total("ranker_http_requests_total", route=path) - before > len(run.samples)  # and the warm-up


@pytest.mark.skipif(not wrk.IS_INSTALLED, reason="wrk is not installed (.ci/debian wrk)")
def test_wrk_reads_the_stages_that_replies_name(target):
    request = json.loads(Traffic(TrafficSettings()).first_visit().body)
    del request["candidates"]
    reading = wrk.read(f"{target.origin}/recommend", [json.dumps(request).encode()], 1, 1, says_stages=True)
    assert reading.bad_per_s == 0
    assert set(reading.stages_ms) == {"parse", "queue", "encode", "search", "forward", "serialize"}
    assert min(reading.stages_ms.values()) > 0


FEW = ("--users", "3", "--run-time", "3s")  # where each reply shows the same


def run_locust(target, prefix, *options):
    """Exit code, the statistics by name, and the failures that locust wrote."""
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest/locustfile.py"), "--host", target.origin]
    command += ["--headless", "--users", "11", "--spawn-rate", "11", "--run-time", "5s", "--shape", "soak"]
    ended = subprocess.run([*command, "--csv", prefix, *options], capture_output=True, text=True, timeout=60)
    with open(f"{prefix}_stats.csv") as stats, open(f"{prefix}_failures.csv") as failures:
        rows = {row["Name"]: row for row in csv.DictReader(stats)}
        return ended, rows, [row["Error"] for row in csv.DictReader(failures)]


def test_locust_runs_every_scenario_and_tells_hits_from_misses(target, tmp_path):
    ended, rows, failures = run_locust(target, tmp_path / "run", "--traffic-seed", "7", "--slo-ms", "60000")
    assert ended.returncode == 0, ended.stderr
    assert not failures
    assert set(rows) >= {f"{name}, context hit" for name in ("feed page", "burst")}
    assert {"first visit, context miss", "bad client"} <= set(rows)
    assert {"/retrieve", "/recommend"} <= set(rows)
    assert any(name.startswith("mixed sizes") for name in rows)
    assert "first visit, context hit" not in rows


def test_goodput_is_what_locust_does_not_count_as_a_failure(target, tmp_path):
    options = ("--slo-ms", "0.001", "--payload", "production", *FEW, "FeedPage")
    ended, rows, failures = run_locust(target, tmp_path / "run", *options)
    missed = {f"CatchResponseError('objective missed: {why}')" for why in ("slower than 0.001 ms", "rejected (429)")}
    assert set(failures) <= missed
    assert rows["Aggregated"]["Failure Count"] == rows["Aggregated"]["Request Count"] != "0"
    assert ended.returncode == 0, ended.stderr  # a slow server is no broken contract


def test_a_broken_contract_fails_the_run(tmp_path):
    """Negative control: a server that answers 200 with no candidates."""
    with ToyServer(body=b'{"candidates": []}').in_thread() as url:
        ended, _, failures = run_locust(Target.parse(url), tmp_path / "run", *FEW, "FeedPage")
    assert ended.returncode == 1
    assert set(failures) == {"CatchResponseError('not every candidate was ranked')"}


def test_posts_that_are_not_the_best_are_seen(monkeypatch):
    monkeypatch.setenv("LOCUST_SKIP_MONKEY_PATCH", "1")
    from loadtest.locustfile import is_complete

    rows = [{"post_id": str(post), "score": 1.0 - post / 10} for post in range(3)]
    assert is_complete({"posts": rows, "visible": 9}, 3)
    assert is_complete({"candidates": rows, "visible": 3}, 5)
    for wrong in (rows[:2], rows[::-1], [rows[0], rows[0], rows[2]]):
        assert not is_complete({"posts": wrong, "visible": 9}, 3)
