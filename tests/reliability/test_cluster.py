"""G1 to G4: several processes behind Debian's HAProxy, and its nginx, with the shipped configurations."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from phoenix_ranker_client import RankerError, call
from phoenix_ranker_client.messages import error_from

from loadtest.machine import ROOT
from loadtest.servers.balancer import HAPROXY, NGINX, Balancer
from loadtest.servers.launch import HOST, free_port, start_process
from loadtest.soak import cluster
from loadtest.soak.servers import real
from tests.reliability.live import all_ok, wait_until
from weights.checkpoint import load_checkpoint
from weights.format.writer import replace_manifest

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def few_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "CLIENTS", 3)
    monkeypatch.setattr(cluster, "Callers", partial(cluster.Callers, pause_seconds=(0.02, 0.05)))


@pytest.fixture(scope="module")
def processes() -> Iterator[cluster.Processes]:
    with cluster.two_processes() as processes:
        yield processes


def kinds(*wanted: Balancer, long: tuple[Balancer, ...] = ()) -> pytest.MarkDecorator:
    each = [
        pytest.param(
            kind,
            id=kind.name,
            marks=[pytest.mark.skipif(not kind.program, reason=f"apt-get install {kind.name}")]
            + [pytest.mark.long] * (kind in long),
        )
        for kind in (*wanted, *long)
    ]
    return pytest.mark.parametrize("kind", each)


@kinds(HAPROXY, long=(NGINX,))
def test_g1_few_users_move_when_a_process_comes_and_no_score_changes(
    processes: cluster.Processes, kind: Balancer
) -> None:
    all_ok(cluster.one_more(processes, 150, kind))


@kinds(HAPROXY)
def test_g1_is_red_when_requests_go_anywhere(processes: cluster.Processes, kind: Balancer) -> None:
    moved, hits, *_ = cluster.one_more(processes, 60, kind, kind.at_random)
    assert not moved.ok
    assert not hits.ok


@kinds(HAPROXY, NGINX)
def test_g2_a_killed_process_loses_no_request(processes: cluster.Processes, kind: Balancer) -> None:
    row = cluster.deaths(processes, 1, kind)
    assert row.ok, row


@kinds(HAPROXY)
def test_g2_a_killed_process_loses_no_request_that_the_balancer_cannot_send_again(
    processes: cluster.Processes, kind: Balancer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HAProxy answers what was in flight with 502, which the client library repeats."""
    refused: list[int] = []

    def counted(status: int, *rest: Any) -> RankerError:
        refused.append(status)
        return error_from(status, *rest)

    monkeypatch.setattr(call, "error_from", counted)
    for _ in range(4):  # a kill may come when nothing is half way through the balancer
        row = cluster.deaths(processes, 1, kind, large=True)
        assert row.ok, row
        if 502 in refused:
            break
    assert 502 in refused


@kinds(HAPROXY)
def test_prometheus_can_ask_the_balancer(processes: cluster.Processes, kind: Balancer) -> None:
    port = free_port()
    with cluster.behind(processes, 2, kind, ("bind unix@metrics.sock", f"    bind {HOST}:{port}")):
        scraped = httpx.get(f"http://{HOST}:{port}/metrics")
        assert 'haproxy_server_status{proxy="rankers",server="ranker-1",state="UP"} 1' in scraped.text
        assert httpx.get(f"http://{HOST}:{port}/").status_code == 404


@kinds(HAPROXY, NGINX)
def test_g4_a_frozen_process_holds_nobody_up(processes: cluster.Processes, kind: Balancer) -> None:
    row = cluster.frozen(processes, kind)
    assert row.ok, row


@pytest.mark.long
@kinds(HAPROXY, NGINX)
def test_g4_holds_for_large_requests(processes: cluster.Processes, kind: Balancer) -> None:
    row = cluster.frozen(processes, kind, large=True)
    assert row.ok, row


@pytest.mark.long
@kinds(HAPROXY, NGINX)
def test_g4_is_red_where_the_balancer_waits(processes: cluster.Processes, kind: Balancer) -> None:
    row = cluster.frozen(processes, kind, kind.waits)
    assert not row.ok
    assert row.figure > 5


@kinds(HAPROXY)
def test_g2_is_red_when_a_request_is_sent_once_but_no_more_is_lost_than_was_in_flight(
    processes: cluster.Processes, kind: Balancer
) -> None:
    row = cluster.deaths(processes, 1, kind, kind.sent_once)
    assert 0 < row.figure <= 2 * cluster.CLIENTS, row  # a lost one's next may still meet the dying socket's queue


@kinds(HAPROXY)
def test_g3_a_rolling_update_loses_no_request(processes: cluster.Processes, kind: Balancer) -> None:
    row = cluster.rolling(processes, (0, 1), kind)
    assert row.ok, row


@pytest.mark.long  # half a minute of a core; that a lost request is seen is the control of G2
@kinds(HAPROXY)
def test_g3_is_red_when_a_process_does_not_drain(processes: cluster.Processes, kind: Balancer) -> None:
    assert not cluster.rolling(processes, (0,), kind, kind.sent_once, by=signal.SIGKILL).ok


@pytest.mark.skipif(not HAPROXY.program, reason="apt-get install haproxy")
def test_a_path_names_the_group_of_processes_that_ranks(tmp_path: Path) -> None:
    """docker/haproxy/models.cfg, with one real process in each group."""
    other = Path(shutil.copytree(ROOT / "weights/demo", tmp_path / "other"))
    replace_manifest(other, replace(load_checkpoint(other).manifest, version="other"))
    body = (ROOT / "weights/demo/example.json").read_bytes()
    with real(threads=1) as feed, real(threads=1, checkpoint=other) as search:
        text, port = (ROOT / "docker/haproxy/models.cfg").read_text(), free_port()
        for name, server in (("feed", feed), ("search", search)):
            text = text.replace(f"{name}-1:8000", f"{HOST}:{server.port}").replace(f"    server {name}-2", "    # ")
        (tmp_path / "models.cfg").write_text(text.replace("bind :8000", f"bind {HOST}:{port}"))
        command = [str(HAPROXY.program), "-db", "-f", str(tmp_path / "models.cfg")]
        process = start_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with httpx.Client(base_url=f"http://{HOST}:{port}", headers={"content-type": "application/json"}) as client:
                wait_until(lambda: connects(port) and client.get("/readyz").status_code == 200, 20)
                direct = httpx.post(f"{feed.url}/rank", content=body, headers=client.headers)
                answered = {path: client.post(path, content=body) for path in ("/rank", "/rank/feed", "/rank/search")}
                versions = [reply.headers["x-model-version"] for reply in answered.values()]
                assert versions == [direct.headers["x-model-version"]] * 2 + ["other"]
                assert all(reply.json()["candidates"] == direct.json()["candidates"] for reply in answered.values())
                assert client.post("/rank/batch", content=b'{"requests": [%b]}' % body).status_code == 200
                unknown = client.post("/rank/nobody", content=body)
                assert (unknown.status_code, unknown.json()["code"]) == (404, "not_found")
                assert client.post("/rank/feed/more", content=body).status_code == 404
        finally:
            process.terminate()
            process.wait(10)


def connects(port: int) -> bool:
    with suppress(OSError), socket.create_connection((HOST, port), 1):
        return True
    return False
