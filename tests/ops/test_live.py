"""The real Prometheus scrapes the real service under load: every expression of every panel and rule parses and has data."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import yaml

from loadtest.generate.traffic import Traffic, TrafficSettings
from loadtest.servers.stream import RedisServer
from tests.e2e.process import Server as Service
from tests.e2e.process import serving
from tests.ops.boards import boards, concrete, expressions
from tests.ops.prometheus import CONFIG, ROOT, Server, load_rules, promtool, running_prometheus

JSON = {"content-type": "application/json"}
MOST_SECONDS = 60.0  # until all has data; a few seconds suffice where the machine is quiet
NAMES = re.compile(r"(?<![\w:])(?:\w+:ranker_\w+:\w+|ranker_\w+|process_\w+|up)(?![\w:(])")
ENUMERATED = ("route", "stage", "reason", "result", "method", "budget", "source")


def offer_load(url: str, stop: threading.Event) -> None:
    """Pages of users as the load tests draw them, a batch, mistakes and unknown paths, until told to stop."""
    traffic = Traffic(TrafficSettings(seed=3).with_fixed_candidates(16))
    with suppress(httpx.TransportError), httpx.Client(base_url=url) as client:  # the service may end first
        while not stop.is_set():
            body = next(traffic).body
            assert client.post("/rank", content=body, headers=JSON).status_code == 200
            client.post("/rank/batch", content=b'{"requests": [%b]}' % body, headers=JSON)
            client.post("/rank", content=b"{", headers=JSON)
            client.get("/nowhere")
            search = {key: value for key, value in json.loads(body).items() if key != "candidates"}
            for path in ("/retrieve", "/recommend"):
                assert client.post(path, json=search).status_code == 200
            stop.wait(0.1)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    if not RedisServer.is_installed():
        pytest.skip("Debian's redis-server is not installed: figures of a feed need one")
    towers, corpus = ROOT / "weights/demo-towers", ROOT / "weights/demo-posts"
    demo = ROOT / "weights/demo"
    second = {"shadow__checkpoint": demo, "shadow__share": 1.0}
    with RedisServer(tmp_path_factory.mktemp("redis")) as redis:
        posts = {"retrieval__checkpoint": towers, "retrieval__corpus": corpus, "retrieval__feed": redis.url("posts")}
        with serving(demo, **posts, **second) as running:
            yield running


def awaited() -> list[str]:
    """The expressions of panels and recording rules, and the series that alerts read."""
    asked = [expression for board in boards().values() for _, expression in expressions(board)]
    asked += [rule["record"] for rule in load_rules("recording.yml")]
    return asked + [name for rule in load_rules("alerts.yml") for name in NAMES.findall(rule["expr"])]


@pytest.fixture(scope="module")
def prometheus(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Prometheus with the committed rules, hurried: it has scraped and judged the service under load until there was something to see."""
    directory = tmp_path_factory.mktemp("prometheus")
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(CONFIG / "rules/*.yml")],
        "scrape_configs": [{"job_name": "ranker", "static_configs": [{"targets": [f"127.0.0.1:{service.port}"]}]}],
    }
    stop = threading.Event()
    load = threading.Thread(target=offer_load, args=(service.url, stop), daemon=True)
    with running_prometheus(directory, config) as server:
        load.start()
        until, lacking = time.monotonic() + MOST_SECONDS, awaited()
        while lacking and time.monotonic() < until:
            time.sleep(0.5)
            lacking = [each for each in lacking if not has_numbers(server, each)]
        yield server
        stop.set()
        load.join(60)  # its server is stopped afterwards


@pytest.mark.parametrize("name", ["service", "engine", "model", "capacity", "retrieval", "second"])
def test_every_panel_has_data(prometheus: Server, name: str) -> None:
    queries = list(expressions(boards()[name]))
    assert len(queries) >= 6
    assert [title for title, expression in queries if not has_numbers(prometheus, expression)] == []


def has_numbers(prometheus: Server, expression: str) -> bool:
    """Whether a query gives at least one number; NaN is none."""
    return any(float(sample["value"][1]) == float(sample["value"][1]) for sample in prometheus.query(expression))


def test_a_panel_without_data_would_be_seen(prometheus: Server) -> None:
    assert not has_numbers(prometheus, "sum(rate(ranker_candidates_ranked_total[15s]))")
    assert not has_numbers(prometheus, 'ranker_rejected_total{reason="queue_ful"}')
    with pytest.raises(ValueError, match="parse error"):
        prometheus.query("sum(rate(ranker_ready)")


def test_every_recording_rule_has_data(prometheus: Server) -> None:
    rules = [rule["record"] for rule in load_rules("recording.yml")]
    assert [name for name in rules if not has_numbers(prometheus, name)] == []


def test_every_alert_parses_and_reads_series_that_exist(prometheus: Server) -> None:
    annotations = [concrete(note["expr"]) for board in boards().values() for note in board["annotations"]["list"]]
    for expression in [rule["expr"] for rule in load_rules("alerts.yml")] + annotations:
        prometheus.query(expression)
        names = set(NAMES.findall(expression))
        assert names, expression
        assert [name for name in names if not prometheus.query(name)] == [], expression


def test_every_label_value_that_is_asked_for_exists(prometheus: Server) -> None:
    asked = [rule["expr"] for name in ("alerts.yml", "recording.yml") for rule in load_rules(name)]
    asked += [expression for board in boards().values() for _, expression in expressions(board)]
    for label in ENUMERATED:
        known = prometheus.label_values(label)
        for expression in asked:
            for operator, wanted in re.findall(rf'{label}(=~?)"([^"]+)"', expression):
                fits = (lambda value, rule=wanted: re.fullmatch(rule, value)) if operator == "=~" else wanted.__eq__
                assert any(map(fits, known)), f"{label}={wanted} is never exported: {expression}"


def test_a_healthy_service_raises_no_alert(prometheus: Server) -> None:
    firing = {alert["metric"]["alertname"] for alert in prometheus.query('ALERTS{alertstate="firing"}')}
    assert firing - {"RankerLatencyBurnFast"} == set()  # a busy test machine may well be slow


def test_the_exposition_passes_the_linter(service: Service) -> None:
    exposition = httpx.get(f"{service.url}/metrics").content
    verdict = promtool("check", "metrics", stdin=exposition)
    assert (verdict.returncode, verdict.stdout.decode()) == (0, "")
    assert promtool("check", "metrics", stdin=exposition.replace(b"_total", b"")).returncode != 0


def test_the_committed_configuration_scrapes_where_compose_serves(tmp_path: Path) -> None:
    config = yaml.safe_load((CONFIG / "prometheus.yml").read_text())
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
    job = next(job for job in config["scrape_configs"] if job["job_name"] == "ranker")["dns_sd_configs"][0]
    for variant in ("ranker-cpu", "ranker-cuda"):
        service = compose["services"][variant]
        assert service["networks"]["default"]["aliases"] == job["names"]
        assert service["ports"][0].endswith(f":{job['port']}")
