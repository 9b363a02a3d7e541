"""What an operator does to a running service: changes keys, looks for its version, runs it under another server."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import socket
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from loadtest.server import DEMO, example, running, serving, stop, wait_until

UVICORN = (sys.executable, "-m", "uvicorn", "--factory", "app.main:create_app", "--port", "{port}")
ROOT = {"PYTHONPATH": str(DEMO.parents[1]), "RANKER_THREADS": "1"}


def write_keys(file: Path, **keys: str) -> None:
    """As a secret is replaced: by a rename."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps({name: hashlib.sha256(key.encode()).hexdigest() for name, key in keys.items()}))
    new.replace(file)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_sighup_reads_the_file_of_keys_again(tmp_path: Path, workers: int) -> None:
    file = tmp_path / "keys.json"
    write_keys(file, old="one")
    with serving(auth__keys_file=file, workers=workers, threads=1) as server:

        def statuses(key: str) -> set[int]:
            """Of several connections, so that each worker answers some."""
            return {server.post("/rank", example(1), x_api_key=key).status_code for _ in range(12)}

        assert (statuses("one"), statuses("two")) == ({200}, {401})
        write_keys(file, new="two")
        server.signal(signal.SIGHUP)
        wait_until(lambda: (statuses("one"), statuses("two")) == ({401}, {200}), 20, server)
        file.write_text("{}")
        server.signal(signal.SIGHUP)
        wait_until(lambda: "keys_refused" in server.log_text, 20, server)
        assert (statuses("one"), statuses("two")) == ({401}, {200}), "an empty file lets nobody in without a key"


@pytest.mark.slow
def test_health_and_version_answer_under_their_common_names() -> None:
    with serving(threads=1, keep_alive_seconds=1) as server:
        assert server.get("/health").json() == {"status": "ready"}
        assert server.get("/version").json()["version"] == version("phoenix-ranking-server")
        with server.connect() as idle:
            idle.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert idle.recv(4096).startswith(b"HTTP/1.1 200")
            assert ends_within(idle, 4.0), "the setting for idle connections holds"


def ends_within(connection: socket.socket, seconds: float) -> bool:
    connection.settimeout(seconds)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False


@pytest.mark.slow
def test_uvicorn_finds_the_demo_from_any_directory(tmp_path: Path) -> None:
    with running(UVICORN, ROOT, cwd=tmp_path) as server:
        assert server.post("/rank", example()).status_code == 200
        assert server.post("/retrieve", {"user_id": "1"}).json()["code"] == "no_corpus"
        stop(server)


def test_uvicorn_ends_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    with running(UVICORN, ROOT | {"RANKER_CHECKPOINT": "nowhere"}, cwd=tmp_path, ready="") as server:
        assert server.wait(60) != 0
        assert f"{tmp_path}/nowhere is not a checkpoint" in server.log_text


@pytest.mark.slow
def test_uvicorn_ends_where_a_checkpoint_is_damaged(tmp_path: Path) -> None:
    damaged = shutil.copytree(DEMO, tmp_path / "damaged")
    (damaged / "params.safetensors").write_bytes(b"nothing")
    began = time.monotonic()
    with running(UVICORN, ROOT | {"RANKER_CHECKPOINT": str(damaged)}, cwd=tmp_path, ready="") as server:
        server.wait(60)
        assert "not_loaded" in server.log_text
    assert time.monotonic() - began < 60
