"""The run with the lowest versions: it installs every lower bound of the service, and a torch that is at hand."""

from __future__ import annotations

import runpy
from pathlib import Path

LOWEST = runpy.run_path(str(Path(__file__).parents[2] / ".ci/test-lowest"))


def test_every_bound_of_the_service_is_tried_but_for_torch() -> None:
    wanted = LOWEST["requirements"]()
    names = {line.split(">")[0].split("=")[0] for line in wanted}
    assert names >= {"fastapi", "orjson", "pydantic", "httptools", "grpcio", "pyarrow", "tenacity", "torch"}
    assert [line for line in wanted if line.startswith("torch")] == ["torch==2.13.0+cpu"]
    assert not [line for line in wanted if ">" not in line and not line.startswith("torch")]
