"""Debian's redis-server with an append-only file, as a feed of posts. It can be killed and restarted. Not a test itself."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

HOST = "127.0.0.1"
START_SECONDS = 20.0


class RedisServer:
    """A Redis server with a port and a directory that survive a restart. A context manager."""

    def __init__(self, directory: Path, password: str = "") -> None:
        with socket.socket() as free:
            free.bind((HOST, 0))
            self.port: int = free.getsockname()[1]
        self._directory = directory
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def is_installed() -> bool:
        return shutil.which("redis-server") is not None

    def address(self, stream: str = "posts") -> str:
        """The address of a stream, for `RANKER_RETRIEVAL__FEED`."""
        login = f":{quote(self._password, safe='')}@" if self._password else ""
        return f"redis://{login}{HOST}:{self.port}/{stream}"

    def client(self) -> Any:
        import redis

        return redis.Redis(HOST, self.port, password=self._password or None, socket_timeout=5)

    def start(self) -> None:
        """Start it and wait until it answers."""
        import redis

        self._directory.mkdir(parents=True, exist_ok=True)
        command = ["redis-server", "-"]
        options = {"bind": HOST, "port": self.port, "dir": self._directory, "save": '""', "appendonly": "yes"}
        options |= {"appendfsync": "always"}  # by default a kill can lose a second of what was acknowledged
        if self._password:
            options["requirepass"] = f'"{self._password}"'
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert self._process.stdin is not None
        self._process.stdin.write("".join(f"{name} {value}\n" for name, value in options.items()).encode())
        self._process.stdin.close()
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            with suppress(redis.RedisError):
                if self.client().ping():
                    return
            time.sleep(0.02)
        raise TimeoutError("redis-server does not answer")

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
