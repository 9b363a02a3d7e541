"""The files of docker/ are right for what reads them: promtool, HAProxy, Kubernetes' schemas, Compose, Grafana."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from app.settings import Drain, Reload
from loadtest.machine import ROOT
from weights.command_line import app as weights_app
from weights.lab.commands.loop import EXIT_REFUSED

DOCKER = ROOT / "docker"
BOARDS = sorted((DOCKER / "grafana/dashboards").glob("*.json"))


def run(*command: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"{command[0]} is not installed; make test installs it on Debian")
    return subprocess.run([*map(str, command)], cwd=ROOT, input=text, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_alerts_fire_when_they_should_and_not_otherwise() -> None:
    done = run("promtool", "test", "rules", "tests/ops/alerts.test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_its_configuration() -> None:
    done = run("promtool", "check", "config", DOCKER / "prometheus/prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_finds_the_pods_of_kubernetes(tmp_path: Path) -> None:
    config = yaml.safe_load((DOCKER / "prometheus/kubernetes.yml").read_text())
    (job,) = config["scrape_configs"]
    (discovery,) = job.pop("kubernetes_sd_configs")  # Debian's promtool is built without it
    config["rule_files"] = [str(DOCKER / "prometheus" / name) for name in config["rule_files"]]
    (tmp_path / "rest.yml").write_text(yaml.safe_dump(config))
    done = run("promtool", "check", "config", tmp_path / "rest.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert job["job_name"] == "ranker", "rules.yml names it"
    pod = next(yaml.safe_load_all((DOCKER / "kubernetes/ranker.yaml").read_text()))["spec"]["template"]
    labels = {f"{name}={value}" for name, value in pod["metadata"]["labels"].items()}
    assert {each["label"] for each in discovery["selectors"]} <= labels
    ports = [port["name"] for each in pod["spec"]["containers"] for port in each["ports"]]
    assert [each["regex"] for each in job["relabel_configs"] if each.get("action") == "keep"] == ports


def test_haproxy_takes_its_configuration() -> None:
    done = run("haproxy", "-c", "-f", DOCKER / "haproxy.cfg")
    assert done.returncode == 0, done.stderr
    broken = (DOCKER / "haproxy.cfg").read_text().replace("balance hdr", "balance nothing")
    assert subprocess.run(["haproxy", "-c", "-f", "-"], input=broken, text=True, capture_output=True).returncode != 0


def test_haproxy_asks_for_every_pod_of_kubernetes() -> None:
    text = (DOCKER / "haproxy.cfg").read_text()
    objects = [*yaml.safe_load_all((DOCKER / "kubernetes/ranker.yaml").read_text())]
    names = set(re.findall(r"# server-template \S+ \d+ (\S+):8000", text))
    (service,) = (each for each in objects if each["spec"].get("clusterIP") == "None")
    assert names == {f"{service['metadata']['name']}.NAMESPACE.svc.cluster.local"}, "HAProxy tries no search domains"
    assert service["spec"]["publishNotReadyAddresses"], "it does its own checks, and asks all pods where none passes"
    (scaler,) = (each for each in objects if each["kind"] == "HorizontalPodAutoscaler")
    places = {int(count) for count in re.findall(r"# server-template \S+ (\d+)", text)}
    assert min(places) > scaler["spec"]["maxReplicas"] + 1, "pods that start or end have addresses too"


def test_kubernetes_takes_every_object() -> None:
    objects = [*yaml.safe_load_all((DOCKER / "kubernetes/ranker.yaml").read_text())]
    kinds = ["Deployment", "Service", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget"]
    assert [each["kind"] for each in objects] == kinds
    for each in objects:
        kubernetes_validate.validate(each, "1.31", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(objects[0] | {"spec": {"replica": 2}}, "1.31", strict=True)


def test_a_busy_pod_stays_and_a_draining_one_goes_in_time() -> None:
    deployment = next(yaml.safe_load_all((DOCKER / "kubernetes/ranker.yaml").read_text()))
    pod = deployment["spec"]["template"]["spec"]
    (ranker,) = pod["containers"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = {"timeoutSeconds": 1, "failureThreshold": 3} | ranker[name]
        assert (probe["timeoutSeconds"] >= 3, probe["failureThreshold"] >= 2) == (True, True), name
    ready, drain = ranker["readinessProbe"], Drain()
    assert ready["periodSeconds"] * ready["failureThreshold"] < drain.delay_seconds, "seen before listeners close"
    assert pod["terminationGracePeriodSeconds"] > drain.delay_seconds + drain.timeout_seconds
    startup = ranker["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > Reload().timeout_seconds


def test_kubernetes_takes_the_nightly_turn() -> None:
    (job,) = yaml.safe_load_all((DOCKER / "kubernetes/refresh.yaml").read_text())
    kubernetes_validate.validate(job, "1.31", strict=True)
    broken = job | {"spec": job["spec"] | {"concurrency": "Forbid"}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.31", strict=True)
    rules = job["spec"]["jobTemplate"]["spec"]["podFailurePolicy"]["rules"]
    assert rules[0]["onExitCodes"]["values"] == [EXIT_REFUSED], "a refused night is not tried again"
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    check_options([*container["command"][1:], *container["args"]])
    served, weights = (
        next(yaml.safe_load_all((DOCKER / "kubernetes/ranker.yaml").read_text()))["spec"]["template"]["spec"], pod
    )  # fmt: skip
    assert served["securityContext"] == weights["securityContext"], "one user reads what the other writes"
    claims = [
        {
            volume["name"]: volume["persistentVolumeClaim"]["claimName"]
            for volume in each["volumes"]
            if volume["name"] == "weights"
        }
        for each in (served, weights)
    ]
    assert claims[0] == claims[1]


def check_options(words: list[str]) -> None:
    """Fail for a command of `phoenix-ranker`, with its options, that there is not."""
    command = typer.main.get_command(weights_app).commands[words[0]]  # type: ignore[attr-defined]
    command.make_context(words[0], words[1:])


def test_a_rollout_on_gpus_is_one_that_kubernetes_takes() -> None:
    """It refuses a Deployment that may neither add a pod nor end one, which its schema does not say."""
    for text in ((ROOT / "docs/deploy.md").read_text(), (DOCKER / "kubernetes/ranker.yaml").read_text()):
        line = next(line for line in text.splitlines() if "maxSurge: 0" in line)
        assert re.search(r"maxUnavailable: [1-9]", line), line


def test_a_pods_kernels_are_in_a_directory_of_its_own(tmp_path: Path) -> None:
    deployment = next(yaml.safe_load_all((DOCKER / "kubernetes/ranker.yaml").read_text()))
    pod = deployment["spec"]["template"]["spec"]
    (first,), (ranker,) = pod["initContainers"], pod["containers"]
    mount = next(each for each in ranker["volumeMounts"] if each["name"] == "kernels")
    whole = next(each for each in first["volumeMounts"] if each["name"] == "kernels")
    assert "subPath" not in whole
    assert mount["subPath"], "an emptyDir itself has mode 0777"
    assert (first["image"], first["securityContext"]) == (ranker["image"], ranker["securityContext"])
    words = [word.replace(whole["mountPath"], str(tmp_path)) for word in first["command"]]
    tmp_path.chmod(0o2777)  # as kubelet makes it for a pod with an fsGroup
    for _ in range(2):  # kubelet may run it again
        subprocess.run(words, check=True, umask=0)
    assert (tmp_path / mount["subPath"]).stat().st_mode & 0o777 == 0o700


def test_every_way_to_deploy_keeps_kernels_in_a_private_home() -> None:
    image = (ROOT / "Dockerfile").read_text()
    volume = re.findall(r"^VOLUME (\S+)$", image, re.MULTILINE)
    assert f"install -d -m 0700 -o ranker -g ranker {volume[0]}\n" in image
    deployment = next(yaml.safe_load_all((DOCKER / "kubernetes/ranker.yaml").read_text()))
    mounts = deployment["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert [each["mountPath"] for each in mounts if each["name"] == "kernels"] == volume
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    assert f"kernels:{volume[0]}" in compose["services"]["ranker-cpu"]["volumes"], (
        "a named volume starts as the image's"
    )


def test_compose_takes_its_file() -> None:
    lines = (DOCKER / "compose.yaml").read_text().splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith("name:"))  # Debian's Compose is older than this field
    profiles = ["--profile", "cpu", "--profile", "cuda"]
    command = ["docker-compose", "--project-directory", DOCKER, "-f", "-", *profiles, "config"]
    done = run(*command, text=text)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["services"].keys() == {"ranker-cpu", "ranker-cuda", "prometheus", "grafana"}
    assert run(*command, text=text.replace("mem_limit: 1g", "mem_limt: 1g")).returncode != 0


def test_compose_mounts_what_there_is_and_waits_for_a_drain() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    for name in ("prometheus", "grafana"):
        for mount in services[name]["volumes"]:
            source = mount.split(":")[0]
            assert not source.startswith(".") or (DOCKER / source).is_dir(), mount
    provider = yaml.safe_load((DOCKER / "grafana/provisioning/dashboards/ranker.yml").read_text())["providers"][0]
    assert provider["options"]["path"] == "/etc/grafana/dashboards"
    assert int(services["ranker-cpu"]["stop_grace_period"].rstrip("s")) > 5 + 30  # the drain's delay and timeout


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_a_dashboard_has_sources_units_and_no_overlap(path: Path) -> None:
    board = json.loads(path.read_text())
    assert list(faults(board)) == []
    board["panels"][1]["gridPos"] = board["panels"][0]["gridPos"]
    board["panels"][2]["targets"][0]["datasource"] = {"uid": "P18"}
    board["panels"][3]["targets"][0]["expr"] = 'sum(ranker_ready{job=~"$job"})'
    assert len(list(faults(board))) == 3


def faults(board: dict[str, Any]) -> Any:
    """What Grafana would stumble over, or a reader."""
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        if cells & taken or place["x"] + place["w"] > 24:
            yield f"{panel['title']}: overlaps another panel or the edge"
        taken |= cells
        if not panel["description"] or not panel["fieldConfig"]["defaults"]["unit"]:
            yield f"{panel['title']}: no description or no unit"
        if any(target["datasource"].get("uid") != "${datasource}" for target in panel["targets"]):
            yield f"{panel['title']}: a dangling data source"
        selectors = [part for target in panel["targets"] for part in re.findall(r"{(job.*?)}", target["expr"])]
        if not selectors or not all('instance=~"$instance"' in part for part in selectors):
            yield f"{panel['title']}: not of the chosen instances alone"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("", "http://127.0.0.1:8000"),
        ("*", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),  # noqa: S104
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("[fd00::5]", "http://[fd00::5]:8000"),
        ("10.0.0.5,fd00::5", "http://10.0.0.5:8000"),
        ("ranker.example.com", "http://ranker.example.com:8000"),
    ],
)
def test_make_load_asks_where_the_service_listens(host: str, url: str) -> None:
    outside = {name: value for name, value in os.environ.items() if name not in ("HOST", "PORT", "URL", "RANKER_PORT")}
    for variables, words in (({"RANKER_HOST": host}, []), ({}, [f"HOST={host}"] if host else [])):
        command = ["make", "--dry-run", "--old-file=.venv/.installed", "load", *words]
        done = subprocess.run(command, cwd=ROOT, env=outside | variables, capture_output=True, text=True, timeout=60)
        assert f"--url {url} " in done.stdout.replace('"', ""), done.stdout + done.stderr


@pytest.mark.parametrize("checkpoint", ["weights/demo", "weights/demo/"])
@pytest.mark.parametrize("by", ["CHECKPOINT", "RANKER_CHECKPOINT"])
def test_make_serve_adds_towers_and_posts_to_the_demo(checkpoint: str, by: str) -> None:
    """Also where a shell has completed its name, which ends it with a slash."""
    command = ["make", "--dry-run", "--old-file=.venv/.serving", "serve"]
    outside = {
        name: value for name, value in os.environ.items() if not name.endswith(("CHECKPOINT", "RETRIEVAL", "CORPUS"))
    }
    done = subprocess.run(
        command, cwd=ROOT, env=outside | {by: checkpoint}, capture_output=True, text=True, timeout=60, check=True
    )
    assert 'RETRIEVAL__CHECKPOINT="weights/demo-towers" RANKER_RETRIEVAL__CORPUS="weights/demo-posts"' in done.stdout
