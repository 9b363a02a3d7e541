"""Runs Debian's redis-server with an append-only file, as a feed of posts for replicas. It can be killed and restarted."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from loadtest.servers.launch import HOST, free_port, start_process, wait_until

START_SECONDS = 20.0


class RedisServer:
    """A Redis server with a fixed port and a directory for its file, which survive a restart. A context manager."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.directory = directory
        self._process: subprocess.Popen[Any] | None = None

    @staticmethod
    def is_installed() -> bool:
        """Whether redis-server is installed."""
        return shutil.which("redis-server") is not None

    def url(self, stream: str) -> str:
        """The URL of a stream, for `RANKER_RETRIEVAL__FEED`."""
        return f"redis://{HOST}:{self.port}/{stream}"

    def client(self) -> Any:
        """A client of this server."""
        import redis

        return redis.Redis(HOST, self.port, socket_timeout=5)

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = ["redis-server", "--bind", HOST, "--port", str(self.port), "--save", "", "--appendonly", "yes"]
        command += ["--appendfsync", "always"]  # by default a kill can lose a second of what was acknowledged
        self.directory.mkdir(parents=True, exist_ok=True)
        self._process = start_process([*command, "--dir", str(self.directory)], stdout=subprocess.DEVNULL)
        assert wait_until(self._answers, START_SECONDS), "redis-server does not answer"

    def _answers(self) -> bool:
        import redis

        with suppress(redis.RedisError):
            return bool(self.client().ping())
        return False

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
