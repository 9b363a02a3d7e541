"""The compose file: what runs by default, hardened, pinned, without a secret; validated by docker compose where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from app.budgets import most_bytes
from app.environment import names
from app.settings import Drain, Settings
from tests.docker.dockerfile import ROOT
from weights.checkpoint import load_manifest

FILE = ROOT / "docker/compose.yaml"
COMPOSE: dict[str, Any] = yaml.safe_load(FILE.read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = ("ranker-cpu", "ranker-cuda")
DEFAULTS = dict(line.split("=", 1) for line in (ROOT / "docker/.env").read_text().splitlines() if line[:1].isupper())
SECRET = re.compile(r"PASSWORD|SECRET|(?<!automountServiceAccount)TOKEN|API_?KEY|PRIVATE", re.IGNORECASE)


def secrets(text: str) -> list[str]:
    """Names in a file that look as if a secret stood beside them; a reference to one that is kept elsewhere is none."""
    lines = [line.split("#")[0].replace("secretKeyRef", "") for line in text.splitlines()]
    return [line for line in lines if SECRET.search(line)]


def test_the_default_is_the_cpu_with_prometheus_and_grafana() -> None:
    profiles = set(DEFAULTS["COMPOSE_PROFILES"].split(","))
    started = {
        name for name, service in SERVICES.items() if not service.get("profiles") or profiles & set(service["profiles"])
    }
    assert started == {"ranker-cpu", "prometheus", "grafana"}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_hardened(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert "privileged" not in service
    assert service["mem_limit"] == service["memswap_limit"]  # no swap
    assert 0 < service["pids_limit"] <= 512
    assert all(port.startswith("${BIND:-127.0.0.1}:") for port in service["ports"])
    if name not in OURS:  # our image brings its user, health check and tag
        assert service["user"].split(":")[0] not in {"", "0", "root"}
        assert service["healthcheck"]["test"]
        assert re.search(r":v?\d+\.\d+\.\d+@sha256:[0-9a-f]{64}$", service["image"])


@pytest.mark.parametrize(
    "path", [*sorted((ROOT / "docker").rglob("*.y*ml")), ROOT / "docker/.env"], ids=lambda path: path.name
)
def test_no_file_holds_a_secret(path: Any) -> None:
    assert secrets(path.read_text()) == []


def test_a_planted_secret_is_found() -> None:
    assert secrets("  environment:\n    GF_SECURITY_ADMIN_PASSWORD: hunter2")


@pytest.mark.parametrize("name", OURS)
def test_the_service_gets_its_checkpoint_and_time_to_drain(name: str) -> None:
    service = SERVICES[name]
    assert service["volumes"] == ["${WEIGHTS:-../weights}:/weights:ro", "kernels:/home/ranker/.cache"]
    assert service["environment"]["RANKER_CHECKPOINT"] == "/weights/${CHECKPOINT:-demo}"
    assert (ROOT / "docker" / DEFAULTS["WEIGHTS"] / DEFAULTS["CHECKPOINT"] / "manifest.json").exists()
    drain = Drain()
    assert int(service["stop_grace_period"].removesuffix("s")) > drain.delay_seconds + drain.timeout_seconds
    assert {key for key in service.get("environment", {}) if key.startswith("RANKER_")} <= set(names())
    assert service["build"]["target"] == name.removeprefix("ranker-")


def test_the_memory_of_the_service_is_more_than_its_callers_can_take() -> None:
    limit = re.fullmatch(r"\$\{MEMORY:-(\d+)g\}", SERVICES["ranker-cpu"]["mem_limit"])
    assert limit is not None
    config = load_manifest(ROOT / "weights/demo").config
    assert int(limit[1]) * 2**30 >= 3 * most_bytes(Settings(), config)["total"]


def test_every_mounted_file_exists_and_every_volume_is_declared() -> None:
    mounts = [mount.rsplit(":", 2)[0] if mount.endswith(":ro") else mount.split(":")[0]
              for service in SERVICES.values() for mount in service["volumes"]]  # fmt: skip
    local = [mount for mount in mounts if mount.startswith(".")]
    assert local
    assert all((ROOT / "docker" / mount).exists() for mount in local)
    assert {mount for mount in mounts if mount[0] not in ".$"} == set(COMPOSE["volumes"])


def test_docker_compose_accepts_the_file() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        pytest.skip("docker compose is not installed here")
    command = [docker, "compose", "-f", str(FILE), "config", "--quiet"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stderr
