"""The real Prometheus scrapes the real service with two workers under load: each expression of each panel and rule parses and has data."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import httpx
import pytest
import yaml

from loadtest.machine import ROOT
from loadtest.server import Server, example, running, serving
from tests.app.api.live import head
from tests.support.redis import RedisServer

RULES = yaml.safe_load((ROOT / "docker/prometheus/rules.yml").read_text())["groups"][0]["rules"]
BOARDS = [json.loads(path.read_text()) for path in sorted((ROOT / "docker/grafana/dashboards").glob("*.json"))]
VARIABLES = {"$__rate_interval": "15s", "$job": ".*", "$instance": ".*"}
MOST_SECONDS = 60.0  # until all has data; a few seconds where the machine is quiet


def expressions() -> list[str]:
    """Of panels and recording rules, and the series that alerts read."""
    asked = [target["expr"] for board in BOARDS for panel in board["panels"] for target in panel["targets"]]
    asked += [rule["record"] for rule in RULES if "record" in rule]
    asked += [
        name
        for rule in RULES
        if "alert" in rule
        for name in re.findall(r"(?<![\w:])ranker_\w+(?![\w:(])", rule["expr"])
    ]
    for name, value in VARIABLES.items():
        asked = [expression.replace(name, value) for expression in asked]
    return sorted(set(asked))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not RedisServer.is_installed():
        pytest.skip("redis-server is not installed; make test installs it on Debian")
    root = tmp_path_factory.mktemp("service")
    with RedisServer(root / "redis") as redis:
        settings = {"retrieval__feed": redis.address(), "reload__watch_seconds": 1, "workers": 2}
        with serving(retrieval=True, **settings) as server:
            yield server


@pytest.fixture(scope="module")
def prometheus(service: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed; make test installs it on Debian")
    folder: Path = tmp_path_factory.mktemp("prometheus")
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ROOT / "docker/prometheus/rules.yml")],
        "scrape_configs": [{"job_name": "ranker", "static_configs": [{"targets": [f"127.0.0.1:{service.port}"]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        "--web.listen-address=127.0.0.1:{port}",
    ]
    stop = threading.Event()
    load = threading.Thread(target=offer, args=(service, stop))
    with running(command, {}, ready="/-/ready") as server:
        load.start()
        yield server
        stop.set()
        load.join()


def offer(service: Server, stop: threading.Event) -> None:
    """Rankings, searches, refusals, a caller that goes away, until told to stop."""
    body = example()
    search = {name: value for name, value in body.items() if name != "candidates"}
    paths = {"/rank/batch": {"requests": [body]}, "/retrieve": search, "/recommend": search}
    with httpx.Client(base_url=service.url, timeout=60) as client:
        while not stop.is_set():
            for path, asked in paths.items():
                client.post(path, json=asked)
            for asked, headers in ((body, {}), (body, {"x-request-timeout-ms": "0"}), ({}, {})):
                client.post("/rank", json=asked, headers=headers)
            with service.connect() as leaver:
                leaver.sendall(head(length=9) + b"{")
            stop.wait(0.1)


@pytest.mark.slow
def test_every_panel_rule_and_alert_has_data(prometheus: Server) -> None:
    until, lacking = time.monotonic() + MOST_SECONDS, expressions()
    while lacking and time.monotonic() < until:
        time.sleep(1)
        lacking = [expression for expression in lacking if not has_numbers(prometheus, expression)]
    assert lacking == []
    assert not has_numbers(prometheus, "sum(rate(ranker_candidates_ranked_total[15s]))")  # would be seen


def has_numbers(prometheus: Server, expression: str) -> bool:
    """Whether a query gives at least one number; NaN is none."""
    reply = prometheus.get(f"/api/v1/query?{urlencode({'query': expression})}").json()
    assert reply["status"] == "success", f"{expression}: {reply}"
    return any(float(sample["value"][1]) == float(sample["value"][1]) for sample in reply["data"]["result"])
