"""The service on Ray Serve, as a cluster runs it: two replicas, any name in `Host`, and one replica killed under load.

Ray needs packages of its own: `make test-ray` installs them beside the project and runs this file, which `make test` does not.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from loadtest.machine import ROOT
from loadtest.server import DEMO, Server, example, free_port, running, wait_until
from tests.support.clients import callers

pytestmark = pytest.mark.timeout(0)
REPLICAS = 2
REPLACED_SECONDS = 120.0
BODY = json.dumps(example()).encode()
SERVE = """
import sys, time, ray
from ray import serve
from app.ray import service
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(service({"num_replicas": "2"}))
while True:
    time.sleep(1)
"""


@pytest.fixture(scope="module")
def deployed() -> Iterator[Server]:
    environment = {
        "PYTHONPATH": str(ROOT),
        "RANKER_CHECKPOINT": str(DEMO),
        "RANKER_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, "-c", SERVE, "{port}"]
    with running(command, environment, port=free_port(), ready="") as server:
        wait_until(lambda: is_ready(server), 300, server)
        yield server


def is_ready(server: Server) -> bool:
    assert server.process.poll() is None, server.log_text[-4000:]
    with suppress(httpx.TransportError):
        return server.get("/readyz").status_code == 200
    return False


def replicas() -> set[int]:
    """The process ids of the replicas, by the titles that Ray gives them."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if b"ServeReplica:default:ranker" in path.read_bytes():
                found.add(int(path.parent.name))
    return found


def test_any_host_gets_a_ranking(deployed: Server) -> None:
    for host in ("ranker.example.com", "10.0.0.7:8000", "localhost"):
        reply = deployed.post("/rank", BODY, host=host)
        assert reply.status_code == 200, reply.text
        assert len(reply.json()["candidates"]) == len(example()["candidates"])


def test_both_replicas_give_the_same_scores(deployed: Server) -> None:
    replies = [deployed.post("/rank", BODY).json() for _ in range(20)]
    assert len({tuple(each["score"] for each in reply["candidates"]) for reply in replies}) == 1


def test_a_killed_replica_is_replaced_while_the_other_serves(deployed: Server) -> None:
    before = replicas()
    assert len(before) == REPLICAS
    with callers(deployed, lambda turn: BODY, 4, pause=0.05, impatient=True) as replies:
        time.sleep(2)
        os.kill(min(before), signal.SIGKILL)
        wait_until(lambda: len(replicas() - {min(before)}) == REPLICAS, REPLACED_SECONDS)
        time.sleep(15)  # the new one serves, too
    answered = len(replies.of(200))
    lost = len(replies.all) - answered + replies.broken
    print(
        f"{answered} answered, {lost} lost: {[(each.status, each.content[:80]) for each in replies.all if each.status != 200]}"
    )
    assert answered > 100
    assert lost <= 4, "only those that the killed replica was answering"
