"""The real Prometheus and promtool for tests. Skips with the reason where they cannot be had."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from loadtest.servers.launch import free_port, process

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "docker/prometheus"
FETCHED = ROOT / ".cache/prometheus/usr/bin"


def tool(name: str) -> str:
    """Path of `prometheus` or `promtool`: on PATH, or where `make test` unpacks Debian's package."""
    found = shutil.which(name) or shutil.which(name, path=str(FETCHED))
    if found is None:
        pytest.skip(
            f"{name} is neither on PATH nor in .cache/prometheus; .ci/fetch-prometheus gets it on Debian and Ubuntu"
        )
    return found


def promtool(*arguments: str | Path, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run promtool; its two outputs come as one."""
    command = [tool("promtool"), *map(str, arguments)]
    return subprocess.run(
        command, input=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, check=False
    )


def load_rules(name: str) -> list[dict[str, Any]]:
    """The rules of one committed file, in order."""
    document = yaml.safe_load((CONFIG / "rules" / name).read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


class Server:
    """A running Prometheus: what it answers to queries."""

    def __init__(self, address: str) -> None:
        self.http = httpx.Client(base_url=address, timeout=10)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The instant vector (or scalar, as one sample). Raises ValueError with Prometheus's words where it does not parse."""
        reply = self.http.get("/api/v1/query", params={"query": expression}).json()
        if reply["status"] != "success":
            raise ValueError(f"{expression}: {reply['error']}")
        result = reply["data"]["result"]
        return [{"metric": {}, "value": result}] if reply["data"]["resultType"] == "scalar" else result

    def label_values(self, label: str) -> set[str]:
        """Every value that the label has had."""
        return set(self.http.get(f"/api/v1/label/{label}/values").json()["data"])


@contextmanager
def running_prometheus(directory: Path, config: dict[str, Any]) -> Iterator[Server]:
    """Prometheus with this configuration on a free port, its data in `directory`."""
    file, port = directory / "prometheus.yml", free_port()
    file.write_text(yaml.safe_dump(config))
    command = [
        tool("prometheus"), f"--config.file={file}", f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    with process(command, {}, port=port, ready_path="/-/ready") as running:
        yield Server(running.url)
