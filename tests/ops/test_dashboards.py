"""The dashboards load into Grafana: data sources resolve, panels do not overlap, provisioning names real files."""

from __future__ import annotations

from copy import deepcopy

import pytest
import yaml

from tests.ops.boards import Board, boards, faults, panels
from tests.ops.prometheus import ROOT

GRAFANA = ROOT / "docker/grafana"


@pytest.mark.parametrize("name", ["service", "engine", "model", "capacity", "retrieval", "second"])
def test_a_board_has_no_faults(name: str) -> None:
    assert list(faults(boards()[name])) == []


def test_boards_have_names_of_their_own() -> None:
    found = boards().values()
    assert len({board["uid"] for board in found}) == len({board["title"] for board in found}) == len(found)


def dangling(board: Board) -> None:
    next(panels(board))["targets"][0]["datasource"] = {"type": "prometheus", "uid": "P1809F7CD0C75ACF3"}


def doubled(board: Board) -> None:
    board["panels"].append(board["panels"][0])


def unknown_variable(board: Board) -> None:
    next(panels(board))["targets"][0]["expr"] += ' * on (job) ranker_ready{job="$jobs"}'


def without_source_variable(board: Board) -> None:
    board["templating"]["list"] = [v for v in board["templating"]["list"] if v["name"] != "datasource"]


@pytest.mark.parametrize("plant", [dangling, doubled, unknown_variable, without_source_variable])
def test_a_planted_fault_is_found(plant) -> None:  # type: ignore[no-untyped-def]
    board = deepcopy(boards()["service"])
    plant(board)
    assert list(faults(board))


def test_provisioning_points_at_what_compose_mounts() -> None:
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
    provider = yaml.safe_load((GRAFANA / "provisioning/dashboards/ranker.yml").read_text())["providers"][0]
    source = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    mounts = dict(mount.split(":")[:2] for mount in compose["services"]["grafana"]["volumes"])
    inside = {target: local for local, target in mounts.items()}
    assert (ROOT / "docker" / inside[provider["options"]["path"]]).samefile(GRAFANA / "dashboards")
    assert (ROOT / "docker" / inside["/etc/grafana/provisioning"]).samefile(GRAFANA / "provisioning")
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in compose["services"]
