"""The unit file for systemd, in form: it stops the main process alone, for longer than a drain, and starts what the wheel installs."""

from __future__ import annotations

import tomllib
from configparser import ConfigParser
from pathlib import Path

from app.exits import EXIT_USAGE
from app.settings import Drain


def test_the_unit_file_stops_the_main_process_and_waits() -> None:
    unit = ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read("docker/systemd/ranker.service")
    service, drain = unit["Service"], Drain()
    assert service["KillMode"] == "mixed"
    assert float(service["TimeoutStopSec"]) > drain.delay_seconds + drain.timeout_seconds + 10
    assert service["RestartPreventExitStatus"] == str(EXIT_USAGE)
    home = service["Environment"].removeprefix("HOME=")
    assert (home, service["CacheDirectoryMode"]) == (f"/var/cache/{service['CacheDirectory']}", "0700")
    program, command = service["ExecStart"].split()
    assert command == "serve"
    assert Path(program).name in tomllib.loads(Path("pyproject.toml").read_text())["project"]["scripts"]
