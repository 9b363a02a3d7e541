"""The files for Envoy, Envoy Gateway and Istio: of the published form, and in agreement with the service and its Kubernetes objects.

No Envoy has run them: none is to be had from Debian, PyPI or npm.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.settings import Settings
from loadtest.servers.balancer import HAPROXY
from tests.docker.dockerfile import ROOT

DOCKER = ROOT / "docker"
ENVOY, GATEWAY, ISTIO = DOCKER / "envoy/envoy.yaml", DOCKER / "envoy/gateway.yaml", DOCKER / "istio/istio.yaml"
MESSAGES = ROOT / ".cache/envoy"
TYPES = ROOT / ".cache/istio"
PACKAGES = {
    "networking.istio.io/v1": "@kubernetes-models/istio",
    "gateway.networking.k8s.io/v1": "@kubernetes-models/gateway-api",
    "gateway.envoyproxy.io/v1alpha1": "@kubernetes-models/envoy-gateway",
}


def documents(path: Path) -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(path.read_text())}


def refusal(text: str) -> str:
    """What Envoy's messages say of a configuration; empty if they take it."""
    command = [sys.executable, str(ROOT / "tests/docker/envoy_form.py")]
    environment = {**os.environ, "PYTHONPATH": str(MESSAGES)}
    return subprocess.run(command, input=text, env=environment, capture_output=True, text=True, check=False).stderr


@pytest.mark.skipif(not (MESSAGES / ".fetched").exists(), reason="Envoy's messages are not here: .ci/fetch-types envoy")
def test_envoys_messages_take_the_file_and_refuse_a_field_a_type_and_a_value_that_do_not_exist() -> None:
    text = ENVOY.read_text()
    assert refusal(text) == ""
    for right, wrong, said in (
        ("num_retries: 1", "num_retrys: 1", 'no field named "num_retrys"'),
        ("hash_balance_factor", "balance_factor", 'no field named "balance_factor"'),
        ("http.router.v3.Router", "http.router.v3.Ruter", "router.v3.Ruter"),
        ("lb_policy: RING_HASH", "lb_policy: RINGHASH", "RINGHASH"),
    ):
        assert right in text
        assert said in refusal(text.replace(right, wrong))


@pytest.mark.skipif(not (TYPES / ".fetched").exists(), reason="the types are not here: .ci/fetch-types istio")
def test_published_types_take_the_objects_and_refuse_fields_that_do_not_exist(tmp_path: Path) -> None:
    """The types are made of the schemas that Istio, the Gateway API and Envoy Gateway publish."""

    def program(objects: list[Any]) -> str:
        lines = []
        for number, each in enumerate(objects):
            package = f"{PACKAGES[each['apiVersion']]}/{each['apiVersion']}"
            lines.append(f'import type {{ I{each["kind"]} as T{number} }} from "{package}";')
            lines.append(f"export const value{number}: T{number} = {json.dumps(each)};")
        return "\n".join(lines)

    def misspelt(each: Any, right: str, wrong: str) -> Any:
        text = json.dumps(each)
        assert right in text
        return json.loads(text.replace(right, wrong))

    (tmp_path / "node_modules").symlink_to(TYPES / "node_modules")
    right = [*documents(GATEWAY).values(), *documents(ISTIO).values()]
    (tmp_path / "right.ts").write_text(program(right))
    wrong = [
        misspelt(documents(ISTIO)["DestinationRule"], "httpHeaderName", "httpHeader"),
        misspelt(documents(ISTIO)["VirtualService"], "attempts", "attemts"),
        misspelt(documents(GATEWAY)["BackendTrafficPolicy"], "numRetries", "retries"),
        misspelt(documents(GATEWAY)["HTTPRoute"], "backendRefs", "backends"),
    ]
    (tmp_path / "wrong.ts").write_text(program(wrong))
    flags = ["--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext"]
    command = [str(TYPES / "node_modules/.bin/tsc"), *flags, "right.ts", "wrong.ts"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    assert re.findall(r"(?m)^(\w+\.ts)\((\d+),.*error", said) == [("wrong.ts", str(2 * n)) for n in range(1, 5)], said


def test_a_proxy_waits_longer_than_any_request_may() -> None:
    route = yaml.safe_load(ENVOY.read_text())["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]
    route = route["typed_config"]["route_config"]["virtual_hosts"][0]["routes"][0]["route"]
    waits = [
        route["timeout"],
        documents(GATEWAY)["BackendTrafficPolicy"]["spec"]["timeout"]["http"]["requestTimeout"],
        documents(ISTIO)["VirtualService"]["spec"]["http"][0]["timeout"],
        *re.findall(r"timeout server (\w+)", (ROOT / "docker/haproxy/haproxy.cfg").read_text()),
        *re.findall(r"proxy_read_timeout (\w+)", (ROOT / "docker/nginx/nginx.conf").read_text()),
    ]
    waits = [wait for wait in waits if wait != "1500ms"]  # for what is asked again elsewhere
    assert len(waits) == 5
    assert all(float(wait.removesuffix("s")) > Settings.model_fields["deadline"].default.max_seconds for wait in waits)


def test_objects_name_the_service_and_its_port() -> None:
    services = yaml.safe_load_all((ROOT / "docker/kubernetes/base/service.yaml").read_text())
    ports = {each["metadata"]["name"]: each["spec"]["ports"][0]["port"] for each in services}
    [backend] = documents(GATEWAY)["HTTPRoute"]["spec"]["rules"][0]["backendRefs"]
    [route] = documents(ISTIO)["VirtualService"]["spec"]["http"][0]["route"]
    assert ports[backend["name"]] == backend["port"]
    assert ports[route["destination"]["host"]] == route["destination"]["port"]["number"]
    assert documents(ISTIO)["DestinationRule"]["spec"]["host"] == route["destination"]["host"]
    [target] = documents(GATEWAY)["BackendTrafficPolicy"]["spec"]["targetRefs"]
    assert target["name"] == documents(GATEWAY)["HTTPRoute"]["metadata"]["name"]


def test_the_example_for_ray_says_how_many_cpus_it_needs() -> None:
    text = (ROOT / "docker/ray/serve.yaml").read_text()
    [application] = yaml.safe_load(text)["applications"]
    least = most = 0
    for each in application["deployments"]:
        cpus, scaling = each["ray_actor_options"]["num_cpus"], each.get("autoscaling_config", {})
        least += cpus * each.get("num_replicas", scaling.get("min_replicas"))
        most += cpus * each.get("num_replicas", scaling.get("max_replicas"))
    said = rf"{least} CPUs free, and up to {most}"
    assert said in text
    assert f"**{least} CPUs" in (ROOT / "docs/scaling.md").read_text()


@pytest.mark.parametrize("name", ["haproxy.cfg", "models.cfg"])
def test_haproxy_looks_again_for_a_process_whose_name_it_does_not_know_yet(name: str) -> None:
    """With `init-addr none` it starts without the address; without `resolvers` it never asks for it again."""
    text = (ROOT / "docker/haproxy" / name).read_text()
    [line] = re.findall(r"^ +default-server (.*)$", text, re.MULTILINE)
    assert "init-addr last,libc,none" in line
    assert re.findall(r"resolvers (\w+)", line) == re.findall(r"^resolvers (\w+)$", text, re.MULTILINE) == ["system"]


@pytest.mark.skipif(not HAPROXY.program, reason="apt-get install haproxy")
def test_haproxy_takes_the_line_for_kubernetes(tmp_path: Path) -> None:
    text, found = re.subn(r"(?m)^( +)# (server-template .*)$", r"\1\2", HAPROXY.config.read_text())
    assert found == 1
    (tmp_path / "haproxy.cfg").write_text(re.sub(r"(?m)^ +server ranker-.*$", "", text))
    command = [str(HAPROXY.program), "-c", "-f", str(tmp_path / "haproxy.cfg")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
