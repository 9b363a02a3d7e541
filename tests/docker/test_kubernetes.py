"""The Kubernetes objects: valid by the published schemas, in both overlays, and in agreement with the service and with each other."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import jsonpatch
import kubernetes_validate
import pytest
import yaml

from app.environment import names
from app.settings import Settings
from tests.docker.dockerfile import ROOT

HERE = ROOT / "docker/kubernetes"
OVERLAYS = ("cpu", "gpu")
CUSTOM = {"ServiceMonitor"}  # has no schema among Kubernetes' own
VERSION = "1.31"

Objects = dict[str, dict[str, Any]]


def read(path: Path) -> list[dict[str, Any]]:
    # anchors are shared objects, which a patch would change in both places
    return [copy.deepcopy(each) for each in map(unshared, yaml.safe_load_all(path.read_text()))]


def unshared(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: unshared(inner) for name, inner in value.items()}
    return [unshared(inner) for inner in value] if isinstance(value, list) else value


def built(overlay: str, *components: str) -> Objects:
    """What `kubectl kustomize` makes of an overlay, as far as these use it: resources, tags of images, patches, components, ConfigMaps."""
    [above] = read(HERE / "overlays" / overlay / "kustomization.yaml")
    [base] = read(HERE / "base/kustomization.yaml")
    objects = {
        f"{each['kind']}/{each['metadata']['name']}": each
        for file in base["resources"]
        for each in read(HERE / "base" / file)
    }
    added = [read(HERE / "components" / name / "kustomization.yaml")[0] for name in components]
    for patch in [patch for each in (above, *added) for patch in each.get("patches", [])]:
        place = f"{patch['target']['kind']}/{patch['target']['name']}"
        objects[place] = jsonpatch.apply_patch(objects[place], yaml.safe_load(patch["patch"]))
    for made in [made for each in added for made in each.get("configMapGenerator", [])]:
        data = dict(literal.split("=", 1) for literal in made["literals"])
        named = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": made["name"]}}
        objects[f"ConfigMap/{made['name']}"] = named | {"data": data}
    [image] = above["images"]
    pod = objects["Deployment/ranker"]["spec"]["template"]["spec"]
    for container in pod["initContainers"] + pod["containers"]:
        assert container["image"].partition(":")[0] == image["name"]
        container["image"] = f"{image['name']}:{image['newTag']}"
    return objects


@pytest.fixture(params=[*OVERLAYS, "cpu fetch", "cpu retrieval"])
def objects(request: pytest.FixtureRequest) -> Objects:
    return built(*request.param.split())


def pod_of(objects: Objects) -> dict[str, Any]:
    spec: dict[str, Any] = objects["Deployment/ranker"]["spec"]["template"]["spec"]
    return spec


def test_every_file_is_listed() -> None:
    [base] = read(HERE / "base/kustomization.yaml")
    assert sorted(base["resources"]) == sorted(p.name for p in (HERE / "base").iterdir() if p.stem != "kustomization")


def test_objects_are_valid_by_the_published_schemas_and_a_field_that_does_not_exist_is_found(objects: Objects) -> None:
    for each in objects.values():
        if each["kind"] not in CUSTOM:
            kubernetes_validate.validate(each, VERSION, strict=True)
    pod_of(objects)["terminationGracePeriod"] = 45
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(objects["Deployment/ranker"], VERSION, strict=True)


def test_settings_exist_and_the_grace_period_is_longer_than_a_drain(objects: Objects) -> None:
    pod = pod_of(objects)
    chosen = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    assert set(chosen) <= set(names())
    drain = float(chosen["RANKER_DRAIN__DELAY_SECONDS"]) + float(chosen["RANKER_DRAIN__TIMEOUT_SECONDS"])
    assert pod["terminationGracePeriodSeconds"] > drain
    ready = pod["containers"][0]["readinessProbe"]
    assert ready["periodSeconds"] * ready["failureThreshold"] < float(chosen["RANKER_DRAIN__DELAY_SECONDS"])


def test_probes_ask_what_the_service_has(objects: Objects) -> None:
    container = pod_of(objects)["containers"][0]
    paths = {kind: container[kind]["httpGet"]["path"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {"startupProbe": "/startupz", "readinessProbe": "/readyz", "livenessProbe": "/livez"}
    assert container["ports"][0]["containerPort"] == 8000
    start = container["startupProbe"]
    longest_load = Settings.model_fields["reload"].default.timeout_seconds
    assert start["periodSeconds"] * start["failureThreshold"] > longest_load


def test_the_engine_takes_the_threads_that_the_pod_asks_for(objects: Objects) -> None:
    """Without a limit of CPUs a process sees all cores of its node."""
    [container] = pod_of(objects)["containers"]
    [threads] = [entry for entry in container["env"] if entry["name"] == "RANKER_THREADS"]
    field = threads["valueFrom"]["resourceFieldRef"]
    assert (field["containerName"], field["resource"]) == (container["name"], "requests.cpu")
    assert int(container["resources"]["requests"]["cpu"]) >= 1


def test_gateways_of_other_namespaces_may_call_and_names_traces_and_istiod_are_reached(objects: Objects) -> None:
    policy = objects["NetworkPolicy/ranker"]["spec"]
    [ingress] = policy["ingress"]
    callers = [peer["namespaceSelector"]["matchLabels"] for peer in ingress["from"] if "namespaceSelector" in peer]
    assert {"ranker-client": "true"} in callers
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} - {443, 6379} == {
        53,
        4317,
        4318,
        15012,
    }
    assert "kubectl label namespace" in (ROOT / "docs/scaling.md").read_text()


def test_pods_are_hardened_as_the_image_expects(objects: Objects) -> None:
    pod = pod_of(objects)
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["automountServiceAccountToken"] is False
    for container in pod["initContainers"] + pod["containers"]:
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        written = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        own = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        pods_own = {each["name"] for each in pod["volumes"] if "persistentVolumeClaim" not in each}
        assert written <= {path for name, path in own.items() if name in pods_own}, "nothing that pods share"


def test_the_service_finds_what_the_init_containers_leave(objects: Objects) -> None:
    pod = pod_of(objects)
    mounted = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    image = dict(re.findall(r"(RANKER_[A-Z_]+)=(\S+)", (ROOT / "Dockerfile").read_text()))
    chosen = image | {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    places = [
        chosen.get(name) for name in ("RANKER_CHECKPOINT", "RANKER_RETRIEVAL__CHECKPOINT", "RANKER_RETRIEVAL__CORPUS")
    ]
    for place in filter(None, places):
        assert str(Path(place).parent) in mounted, "the parent of the link, or a link that is turned is not seen"
    for container in pod["initContainers"]:
        words = container["command"]
        assert words[:3] == ["python", "-m", "weights"]
        if "fetch" in words:
            link = words[words.index("--link") + 1] if "--link" in words else "current"
            assert f"{words[words.index('--out') + 1]}/{link}" in places
        else:
            assert words[-1] == chosen["RANKER_CHECKPOINT"]


def test_a_pod_with_posts_may_reach_its_feed_and_keeps_the_password_in_a_secret() -> None:
    objects = built("cpu", "retrieval")
    env = {entry["name"]: entry for entry in pod_of(objects)["containers"][0]["env"]}
    assert env["RANKER_RETRIEVAL__FEED"]["valueFrom"]["secretKeyRef"] == {"name": "ranker-feed", "key": "url"}
    ports = {port["port"] for rule in objects["NetworkPolicy/ranker"]["spec"]["egress"] for port in rule["ports"]}
    assert 6379 in ports
    assert set(env) <= set(names())


def test_everything_speaks_of_the_same_pods(objects: Objects) -> None:
    labels = objects["Deployment/ranker"]["spec"]["template"]["metadata"]["labels"]
    assert objects["NetworkPolicy/ranker"]["spec"]["podSelector"]["matchLabels"] == labels
    for name in ("Deployment/ranker", "PodDisruptionBudget/ranker"):
        assert objects[name]["spec"]["selector"]["matchLabels"] == labels
    for name in ("Service/ranker", "Service/ranker-pods"):
        assert objects[name]["spec"]["selector"] == labels
    monitored = objects["ServiceMonitor/ranker"]["spec"]["selector"]["matchLabels"]
    assert objects["Service/ranker"]["metadata"]["labels"] == monitored  # not both, or each pod counts twice
    assert objects["Service/ranker-pods"]["metadata"]["labels"] != monitored


def test_the_autoscaler_reads_what_the_adapter_makes_of_metrics_that_exist(objects: Objects) -> None:
    [rule] = yaml.safe_load((HERE / "adapter.yaml").read_text())["rules"]
    [metric] = objects["HorizontalPodAutoscaler/ranker"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    named = set(re.findall(r"`(ranker_[a-z_]+)`", (ROOT / "docs/scaling.md").read_text()))  # are looked up
    assert set(re.findall(r"ranker_[a-z_]+", rule["seriesQuery"] + rule["metricsQuery"])) <= named


def test_a_card_is_asked_for_in_the_gpu_overlay_alone_whose_pod_goes_where_cards_are_and_needs_no_spare_one() -> None:
    cpu, pod = (pod_of(built(overlay)) for overlay in OVERLAYS)
    cards = [each["containers"][0]["resources"]["limits"].get("nvidia.com/gpu") for each in (cpu, pod)]
    assert cards == [None, 1]
    assert pod["containers"][0]["image"].endswith(":cuda")
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert pod["runtimeClassName"] == "nvidia"
    assert [each["key"] for each in pod["tolerations"]] == ["nvidia.com/gpu"]
    update = {overlay: built(overlay)["Deployment/ranker"]["spec"]["strategy"]["rollingUpdate"] for overlay in OVERLAYS}
    assert update["gpu"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert update["cpu"] == {"maxSurge": 1, "maxUnavailable": 0}
