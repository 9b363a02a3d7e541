"""A server whose card is seen and cannot be used: it starts, serves with the processor, and says so everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.machine import ROOT
from loadtest.server import example, serving

CARD = """
import importlib.util, sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name != "torch.cuda":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            module.is_available = lambda: True
            module.mem_get_info = lambda device=None: (40 << 30, 80 << 30)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.slow
def test_a_server_whose_card_cannot_be_used_starts_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(CARD)
    with serving(retrieval=True, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}) as server:
        assert server.get("/readyz").json() == {"status": "ready", "engine": "cpu"}
        info = server.get("/info").json()
        assert info["device"] == "cpu"
        assert [step["rung"] for step in info["engine"]["steps_down"]] == ["recorded", "torch"]
        assert (info["engine"]["rung"], info["backend"]) == ("cpu", "native")
        assert all("CUDA" in step["reason"] for step in info["engine"]["steps_down"])
        assert info["retrieval"]["engine"]["search"]["not_on_device"].startswith("cuda: every way of ranking")
        assert server.metric("ranker_engine_steps_down") == 2
        assert server.post("/rank", example()).status_code == 200
        assert server.post("/recommend", {"user_id": 7, "k": 5}).status_code == 200
        server.process.terminate()
        server.process.wait(30)  # every line is written then
        refused = [line["rung"] for line in server.log_lines if line["event"] == "fast_path_refused"]
        assert refused == ["recorded", "torch", "device"]
