"""The example that joins what was served with events by Ray Data, on a local cluster of two nodes.

Ray needs packages of its own: `make test-ray` installs them beside the project and runs this file, which `make test` does not.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from ray.cluster_utils import Cluster

from loadtest.machine import ROOT
from loadtest.server import free_port
from tests.weights.lab.joining_rows import T0, event, ranking, write_events, write_part
from weights.lab.joining.join import JoinSettings, join
from weights.lab.training.log import read_log

pytestmark = pytest.mark.timeout(0)
EXAMPLE = ROOT / "docs/examples/join_with_ray.py"
RANKINGS = 400
ATTEMPTS = 8
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "runtime_env_agent_port")
BUSY = {"worker_niceness": 0, "worker_register_timeout_seconds": 600, "agent_register_timeout_ms": 600_000}
"""By default Ray's workers have a niceness of 15, so that beside other work they hardly run."""
Taken = set[tuple[int, str]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes, as two machines would be: each has processes and an object store of its own."""
    cluster = Cluster()
    start_node(cluster, include_dashboard=False, _system_config=BUSY)
    start_node(cluster)
    yield cluster
    cluster.shutdown()


def start_node(cluster: Cluster, **options: Any) -> None:
    """Start a node. Ray ends a node whose agents, Python processes, have not written their ports to files after 15 seconds. It waits for
    no port that it is told, but the port where the dashboard's agent listens cannot be told. So on a busy machine it takes more than one
    attempt: the next one finds the agents' code in memory."""
    for attempt in range(1, ATTEMPTS + 1):
        ports = {name: free_port() for name in AGENT_PORTS}
        try:
            cluster.add_node(num_cpus=2, object_store_memory=200 * 2**20, **ports, **options)
            return
        except Exception as error:  # Ray raises this class itself
            if attempt == ATTEMPTS:
                raise
            print(f"attempt {attempt} to start a node: {error}")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of what was served in eight parts, and events in two files, some repeated and some of no ranking."""
    path = tmp_path_factory.mktemp("files")
    rows = [ranking(number) for number in range(RANKINGS)]
    for part in range(8):
        write_part(path / "served", f"part-{part}", rows[part::8], f"2026-06-0{part % 2 + 1}")
    events = [event(number, number % 4, "favorite") for number in range(0, RANKINGS, 3)]
    events += [event(number, 1, "reply") for number in range(0, RANKINGS, 5)]
    (path / "events").mkdir()
    write_events(path / "events/a.parquet", events)
    write_events(path / "events/b.parquet", [*events[:20], event(RANKINGS + 7, 0, "favorite")])
    return path


def joined(cluster: Cluster, files: Path, out: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"RAY_ADDRESS": cluster.address, "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, EXAMPLE, files / "served", files / "events", out]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)


def test_ray_joins_what_the_command_joins_on_two_nodes(cluster: Cluster, files: Path, tmp_path: Path) -> None:
    done = joined(cluster, files, tmp_path / "taken")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = pq.read_table(tmp_path / "taken").to_pylist()
    by_ray: Taken = {(row["post_id"], row["action"]) for row in rows}
    join(files / "served", files / "events", tmp_path / "log", JoinSettings(until_ts=T0 + 10**6))
    log = read_log(tmp_path / "log")
    by_command: Taken = {
        (int(post), name)
        for place, name in enumerate(log.action_names)
        for post in log.post_id[log.actions[:, place]].tolist()
    }
    assert by_ray == by_command
    assert len(by_ray) == len({(row["request_id"], row["post_id"], row["action"]) for row in rows}) > RANKINGS // 3
    assert all(row["rank"] == (row["post_id"] - 1) % 100 + 1 for row in rows)
    assert "; 2 nodes" in done.stdout
    assert re.search(r"; 2 nodes used", done.stdout), done.stdout


def test_a_directory_without_parts_is_named(cluster: Cluster, files: Path, tmp_path: Path) -> None:
    (files / "nothing").mkdir()
    command = [sys.executable, EXAMPLE, files / "nothing", files / "events", tmp_path / "taken"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"{files}/nothing holds no parts" in done.stderr
