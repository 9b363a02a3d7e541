"""The page for callers: every command and program on it runs as it stands, against the demo."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from loadtest.machine import ROOT
from tests.app.api.live import Live

PAGE = (ROOT / "docs" / "api.md").read_text()
ADDRESS = "localhost:8000"


def blocks(language: str) -> list[str]:
    """The blocks of a language that call the service."""
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return [block for block in found if ADDRESS in block]


@pytest.mark.parametrize("number", range(len(blocks("bash"))))
def test_every_curl_on_the_page_is_answered(server: Live, number: int) -> None:
    command = blocks("bash")[number].replace(ADDRESS, f"127.0.0.1:{server.port}")
    command = re.sub(r"\bcurl\b", "curl --fail-with-body", command)
    done = subprocess.run(["bash", "-euc", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [] not in json.loads(done.stdout[done.stdout.index("{") :]).values(), "the example shows nothing"


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_every_program_on_the_page_runs(server: Live, number: int) -> None:
    program = blocks("python")[number].replace(ADDRESS, f"127.0.0.1:{server.port}")
    program = re.sub(r"timeout_seconds=[0-9.]+", "timeout_seconds=30", program)
    environment = {"PYTHONPATH": str(ROOT / "app" / "client")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


def test_the_page_has_commands_and_programs() -> None:
    assert (len(blocks("bash")) > 2, len(blocks("python")) > 0) == (True, True)
