"""The run without torch: it knows the HTTP side from the import linter, and refuses an environment in which it would show nothing."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / ".ci/test-light"
LIGHT = runpy.run_path(str(SCRIPT))


def test_the_seam_is_every_module_that_speaks_http() -> None:
    modules = set(LIGHT["seam"]())
    assert {"app.server.listener", "app.http.rank", "app.request.validate", "app.interface"} <= modules
    assert not any(name.startswith(("app.engine", "app.service")) for name in modules)


def test_an_environment_with_torch_would_show_nothing() -> None:
    refused = subprocess.run([sys.executable, SCRIPT, "--inside"], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1
    assert "there is a torch in this environment" in refused.stderr


def test_torch_is_all_that_is_left_out() -> None:
    wanted = LIGHT["requirements"]()
    names = {line.split(">")[0] for line in wanted}
    assert names >= {"fastapi", "numpy", "uvicorn", "pytest", "hypothesis", "pytest-timeout"}
    assert not names & {"torch", "triton"}
