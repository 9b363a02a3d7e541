"""Ends of a process and changes of its model under load: nothing that was accepted is lost or answered with another's scores."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import time
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from app.settings import Admin, Settings
from loadtest.server import PLAIN, example, free_port, serving, wait_until
from tests.app.api.live import QUIET, ready
from tests.support.checkpoints import one_and_two
from tests.support.clients import callers

TOKEN = "a token of this test"


BODIES = [json.dumps(example(16) | {"user_id": user}).encode() for user in range(10)]


def body(turn: int) -> bytes:
    return BODIES[turn % 10]


@pytest.mark.slow
def test_sigterm_under_load_loses_nothing_and_ends_with_0(duration: float) -> None:
    for _ in range(max(1, int(duration / 3))):
        with serving(drain__delay_seconds=1) as server:
            with callers(server, body, 8, pause=0.01) as replies:
                wait_until(lambda: len(replies.all) > 20)
                server.signal(signal.SIGTERM)
                wait_until(lambda: server.get("/readyz").status_code == 503, 0.9)  # told at once
                assert server.wait() == 0
            assert replies.statuses <= {200, 503}


@pytest.mark.slow
def test_a_reload_under_load_loses_nothing_and_mixes_no_versions(tmp_path: Path, duration: float) -> None:
    root = one_and_two(tmp_path)
    admin = Admin(port=free_port(), token_sha256=SecretStr(hashlib.sha256(TOKEN.encode()).hexdigest()), root=root)
    with (
        ready(Settings(port=0, checkpoint=root / "one", admin=admin, logs=QUIET)) as live,
        httpx.Client(base_url=live.url, verify=PLAIN, headers={"content-type": "application/json"}) as client,
    ):

        def reload(name: str) -> httpx.Response:
            url, headers = f"http://127.0.0.1:{admin.port}/admin/reload", {"authorization": f"Bearer {TOKEN}"}
            return httpx.post(url, json={"checkpoint": name}, headers=headers, timeout=60, verify=PLAIN)

        def scores() -> list[tuple[float, ...]]:
            replies = [client.post("/rank", content=each).json() for each in BODIES]
            return [tuple(each["score"] for each in reply["candidates"]) for reply in replies]

        known: dict[str, list[tuple[float, ...]]] = {}
        for name in ("two", "one"):
            assert reload(name).status_code == 200
            version = client.get("/info").json()["model"]["version"]
            known[version] = scores()
        assert len(known) == 2

        with callers(live, body, 8, pause=0.01) as replies:
            until = time.monotonic() + duration / 2
            while time.monotonic() < until:
                for name in ("two", "one"):
                    assert reload(name).status_code == 200
        assert replies.broken == 0
        assert replies.statuses == {200}
        for each in replies.all:
            reply = each.json()
            assert tuple(row["score"] for row in reply["candidates"]) in known[reply["model"]["version"]]
        refused = reload(damage(root).name)
        assert (refused.status_code, refused.json()["code"]) == (422, "checkpoint_refused")
        assert "params.safetensors" in refused.json()["detail"]
        assert scores() == known[version], "the old one serves on"
        assert live.figure('ranker_reloads_total{result="failure"}') == 1


def damage(root: Path) -> Path:
    """A copy of a checkpoint with one other byte."""
    broken = root / "broken"
    shutil.copytree(root / "two", broken)
    file = broken / "params.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return broken
