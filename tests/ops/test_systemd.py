"""The unit files for systemd, in form: the service stops in order, the nightly turn runs as its user, and both start what is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from configparser import ConfigParser
from pathlib import Path

import pytest
import typer

from app.exits import EXIT_USAGE
from app.settings import Drain
from weights.command_line import app as weights_app

UNITS = Path("docker/systemd")


def unit_of(name: str) -> ConfigParser:
    """A unit file."""
    unit = ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    assert unit.read(UNITS / name)
    return unit


def test_the_unit_file_stops_the_main_process_and_waits() -> None:
    service, drain = unit_of("ranker.service")["Service"], Drain()
    assert service["KillMode"] == "mixed"
    assert float(service["TimeoutStopSec"]) > drain.delay_seconds + drain.timeout_seconds + 10
    assert service["RestartPreventExitStatus"] == str(EXIT_USAGE)
    home = service["Environment"].removeprefix("HOME=")
    assert (home, service["CacheDirectoryMode"]) == (f"/var/cache/{service['CacheDirectory']}", "0700")
    program, command = service["ExecStart"].split()
    assert command == "serve"
    assert Path(program).name in tomllib.loads(Path("pyproject.toml").read_text())["project"]["scripts"]


def test_a_service_that_fails_is_started_for_ever() -> None:
    """A checkpoint may be mounted long after the first try, which fails within a second."""
    unit = unit_of("ranker.service")
    assert unit["Unit"]["StartLimitIntervalSec"] == "0"
    assert 1 <= float(unit["Service"]["RestartSec"]) <= 10
    assert unit["Service"]["Restart"] == "on-failure"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    for unit in UNITS.iterdir():
        text = unit.read_text()
        for program in re.findall(r"^ExecStart=(\S+)", text, re.M):
            text = text.replace(program, "/bin/true")  # verify asks for the program
        (tmp_path / unit.name).write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", *sorted(tmp_path.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    service = tmp_path / "ranker.service"
    service.write_text(
        service.read_text()
        .replace("StartLimitIntervalSec=0\n", "")
        .replace("Restart=", "StartLimitIntervalSec=0\nRestart=")
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "StartLimitIntervalSec" in done.stderr, "it belongs to [Unit], and is passed over elsewhere"


def test_both_units_may_do_no_more_than_they_need() -> None:
    service, turn = (dict(unit_of(name)["Service"]) for name in ("ranker.service", "ranker-refresh.service"))
    limits = [name for name in service if name.startswith(("Protect", "Restrict", "Lock", "SystemCall"))]
    assert {name: turn.get(name) for name in limits} == {name: service[name] for name in limits}
    assert service["RestrictAddressFamilies"].split() == ["AF_INET", "AF_INET6", "AF_UNIX"]
    broken = {"MemoryDenyWriteExecute", "PrivateDevices", "DeviceAllow", "ProtectClock"}
    assert not broken & service.keys(), "torch compiles, and CUDA opens devices"


def test_the_nightly_turn_runs_as_the_user_of_the_service() -> None:
    service, turn = unit_of("ranker.service")["Service"], unit_of("ranker-refresh.service")["Service"]
    for name in ("User", "DynamicUser", "StateDirectory", "StateDirectoryMode"):
        assert turn[name] == service[name]
    program, *words = turn["ExecStart"].split()
    assert program == service["ExecStart"].split()[0]
    options = dict(zip(words[1::2], words[2::2], strict=True))
    assert {*options} == {"--served", "--events", "--checkpoint", "--out"}
    command = typer.main.get_command(weights_app).commands[words[0]]  # type: ignore[attr-defined]
    command.make_context(words[0], words[1:])
    state = f"/var/lib/{turn['StateDirectory']}/"
    assert all(place.startswith(state) for name, place in options.items() if name != "--events")
    assert turn["Type"] == "oneshot"
    assert turn["TimeoutStartSec"] == "infinity"
    assert "Install" not in unit_of("ranker-refresh.service"), "the timer starts it"
    assert unit_of("ranker-refresh.timer")["Timer"]["Persistent"] == "true"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_time_of_the_nightly_turn() -> None:
    for time, is_right in ((unit_of("ranker-refresh.timer")["Timer"]["OnCalendar"], True), ("*-*-* 25:30", False)):
        done = subprocess.run(["systemd-analyze", "calendar", time], capture_output=True, timeout=30)
        assert (done.returncode == 0) == is_right
