"""Locust's additions: shapes, figures, bad requests; and the whole of it against the real server, as is the open loop."""

import csv
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest

from loadtest.generate.bad_requests import bad_requests
from loadtest.generate.traffic import KINDS, Traffic, TrafficSettings
from loadtest.locust_figures import KEY, Figures, columns, to_csv, to_text
from loadtest.locust_shapes import Plan
from loadtest.machine import ROOT
from loadtest.measure.figures import Slo
from loadtest.measure.runs import LoadRun, RunSettings
from loadtest.servers.launch import free_port, ranking_server


def test_shapes():
    ramp = [Plan("ramp", 50, 5, 100).at(second)[0] for second in range(100)]
    assert ramp[0] == 5
    assert ramp[-1] == 50
    assert ramp == sorted(ramp)
    spike = [Plan("spike", 10, 5, 100).at(second) for second in range(100)]
    assert (spike[39], spike[40], spike[59], spike[60]) == ((10, 5), (50, 25), (50, 25), (10, 5))
    assert (
        Plan("soak", 40, 5, 100).at(1)[0]
        < Plan("soak", 40, 5, 100).at(5)[0]
        == Plan("soak", 40, 5, 100).at(99)[0]
        == 40
    )
    assert Plan("ramp", 50, 5, 100).at(100) is None
    assert Plan("steady", 7, 2, 0).at(1e9) == (7, 2)


def replies(figures, count, headers=None):
    for _ in range(count):
        figures.record("feed page", 200, 10.0, {"X-Context-Cache": "hit", "Server-Timing": "forward;dur=2"}, 50)
    figures.record("feed page", 200, 60.0, {"X-Context-Cache": "miss"}, 50)
    figures.record("feed page", 429, 1.0, {}, 50)


def test_figures_count_goodput_rejections_and_hits():
    figures = Figures()
    replies(figures, 8)
    (row,) = figures.rows(seconds=2.0)
    assert (row["requests"], row["goodput_rps"], row["good_percent"]) == (10, 4.0, 80.0)
    assert row["rejected_percent"] == 10.0
    assert row["cache_hit_percent"] == pytest.approx(88.89)
    assert row["forward_p50_ms"] == 2.0
    assert {column["key"] for column in columns()} <= row.keys()
    assert "feed page,10,4.0" in to_csv([row])
    assert "feed page" in to_text([row])


def test_figures_of_workers_add_up():
    master = Figures()
    for _ in range(2):
        worker = Figures()
        replies(worker, 8)
        master.merge(worker.drain())
        assert worker.rows(1.0) == []
    assert master.rows(1.0)[0]["requests"] == 20
    assert master.rows(1.0)[0]["forward_p99_ms"] == 2.0


@pytest.fixture(scope="module")
def target():
    with ranking_server(threads=1) as running:
        yield running.target


def test_bad_requests_are_refused_as_promised_and_the_good_one_is_not(target):
    good = Traffic(TrafficSettings()).first_visit().body
    url, headers = f"{target.origin}/rank", {"Content-Type": "application/json"}
    assert httpx.post(url, content=good, headers=headers).status_code == 200
    for bad in bad_requests(good):
        reply = httpx.post(url, content=bad.body, headers={"Content-Type": bad.media_type})
        assert (reply.status_code, reply.json()["code"]) == (bad.status, bad.code), bad.name


def test_an_open_loop_run_sees_what_the_server_sees(target):
    settings = RunSettings(40.0, 3.0, 1.0, slo=Slo(latency_ms=1_000), traffic=TrafficSettings(seed=3))
    run = LoadRun(target, settings, say=lambda line: None).run()
    assert run.summary["statuses"] == {"200": len(run.samples)}
    server = run.meta["server"]
    assert server["requests"] == len(run.samples)
    assert set(server["request_ms"]) == {"p50", "p90", "p95", "p99"}
    assert sum(server["cache_lookups"].values()) == len(run.samples)
    assert not np.isnan(run.samples.stages_ms).any()
    hit = run.samples.cache == 1
    assert hit[run.samples.kind == KINDS.index("page")].mean() > 0.6
    assert hit[run.samples.kind == KINDS.index("first_visit")].mean() < 0.2


def test_locust_runs_every_scenario_and_shows_the_figures(target, tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest/locustfile.py"), "--host", target.origin]
    command += ["--web-host", "127.0.0.1", "--web-port", str(port), "--autostart", "--autoquit", "1", "--users", "11"]
    command += [
        "--spawn-rate",
        "11",
        "--run-time",
        "5s",
        "--traffic-seed",
        "7",
        "--shape",
        "soak",
        "--csv",
        str(tmp_path / "run"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as locust:
        try:
            shown = page_figures(port)
            output, _ = locust.communicate(timeout=60)
        finally:
            locust.kill()
    assert locust.returncode == 0, output
    assert shown
    with open(tmp_path / "run_ranking.csv") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"feed page", "first visit", "burst", "mixed sizes"}
    assert float(rows["feed page"]["cache_hit_percent"]) > 20
    assert float(rows["first visit"]["cache_hit_percent"]) == 0
    assert float(rows["feed page"]["forward_p50_ms"]) > 0


def page_figures(port):
    """What locust's web page is given for its extra tab, once there is something."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            extended = httpx.get(f"http://127.0.0.1:{port}/stats/requests", timeout=2).json().get("extended_stats", [])
            rows = [row for table in extended if table["key"] == KEY for row in table["data"]]
            if rows:
                assert httpx.get(f"http://127.0.0.1:{port}/{KEY}/csv", timeout=2).text.startswith("name,requests")
                return rows
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    return []
