"""A Redis server of a test's own, by Debian's redis-server."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from loadtest.server import free_port


@contextmanager
def redis_server(folder: Path, port: int = 0, *options: str) -> Iterator[str]:
    """Run it until the block ends, with its data in `folder`; yields its URL. Skips the test where it is not installed."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed; make test installs it on Debian")
    port = port or free_port()
    command = [
        "redis-server",
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--dir",
        str(folder),
        "--save",
        "",
        "--appendonly",
        "yes",
        *options,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 20
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert time.monotonic() < until, "redis-server did not start"
            time.sleep(0.02)
        yield f"redis://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)
