"""Ends of a process and changes of its model under load: nothing that was accepted is lost or answered with another's scores."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.server import DEMO, PLAIN, Server, example, free_port, serving, wait_until
from tests.support.clients import callers
from weights.checkpoint import load_checkpoint, save_checkpoint

pytestmark = pytest.mark.slow
TOKEN = "a token of this test"


def body(user: int) -> bytes:
    return json.dumps(example(16) | {"user_id": user % 10}).encode()


def test_sigterm_under_load_loses_nothing_and_ends_with_0(duration: float) -> None:
    for _ in range(max(1, int(duration / 3))):
        with serving(drain__delay_seconds=1) as server:
            with callers(server, body, 8, pause=0.01) as replies:
                wait_until(lambda: len(replies.all) > 20)
                server.signal(signal.SIGTERM)
                wait_until(lambda: server.get("/readyz").status_code == 503, 0.5)  # told at once
                assert server.wait() == 0
            assert replies.statuses <= {200, 503}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints whose scores differ, below one folder."""
    folder = tmp_path_factory.mktemp("checkpoints")
    shutil.copytree(DEMO, folder / "one", ignore=shutil.ignore_patterns("report"))
    found = load_checkpoint(DEMO)
    manifest = found.manifest
    for parameter in found.ranker.parameters():
        parameter.data.mul_(0.9)
    labels = {
        "action_names": manifest.action_names,
        "continuous": manifest.continuous,
        "score_weights": manifest.score_weights,
    }
    save_checkpoint(folder / "two", found.ranker, name="two", version="two", **labels)
    return folder


def admin(**settings: Any) -> dict[str, Any]:
    return {"admin__port": free_port(), "admin__token_sha256": hashlib.sha256(TOKEN.encode()).hexdigest()} | settings


def reload(port: int, checkpoint: str) -> httpx.Response:
    headers = {"authorization": f"Bearer {TOKEN}"}
    body = {"checkpoint": checkpoint}
    return httpx.post(f"http://127.0.0.1:{port}/admin/reload", json=body, headers=headers, timeout=60, verify=PLAIN)


def scores_of(server: Server, user: int) -> list[float]:
    return [each["score"] for each in server.post("/rank", body(user)).json()["candidates"]]


def test_a_reload_under_load_loses_no_request_mixes_no_versions_and_refuses_a_damaged_one(
    root: Path, duration: float
) -> None:
    settings = admin(admin__root=root)
    with serving(root / "one", **settings) as server:
        known: dict[str, list[list[float]]] = {}
        for name in ("two", "one"):
            assert reload(settings["admin__port"], name).status_code == 200
            version = server.get("/info").json()["model"]["version"]
            known[version] = [scores_of(server, user) for user in range(10)]
        assert len(known) == 2

        with callers(server, body, 8, pause=0.01) as replies:
            until = time.monotonic() + duration / 2
            while time.monotonic() < until:
                for name in ("two", "one"):
                    assert reload(settings["admin__port"], name).status_code == 200
        assert replies.broken == 0
        assert replies.statuses == {200}
        right = {version: {tuple(scores) for scores in lists} for version, lists in known.items()}
        for each in replies.all:
            reply = each.json()
            assert tuple(each["score"] for each in reply["candidates"]) in right[reply["model"]["version"]]
        refused = reload(settings["admin__port"], damage(root).name)
        assert (refused.status_code, refused.json()["code"]) == (422, "checkpoint_refused")
        assert "params.safetensors" in refused.json()["detail"]
        assert [scores_of(server, user) for user in range(10)] == known[version], "the old one serves on"
        assert server.metric('ranker_reloads_total{result="failure"}') == 1


def damage(root: Path) -> Path:
    """A copy of a checkpoint with one other byte."""
    broken = root / "broken"
    shutil.copytree(root / "two", broken)
    file = broken / "params.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return broken
