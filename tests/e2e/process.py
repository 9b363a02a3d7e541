"""`python -m app` as a real process on a free port. Not a test itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "weights" / "demo"
START_SECONDS = 60.0
STOP_SECONDS = 20.0


class Server:
    """A running process: its base URL, and the log lines it has written so far."""

    def __init__(self, settings: dict[str, Any], python: Path | str = sys.executable, directory: Path = ROOT) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RANKER_")}
        environment |= {
            "OMP_NUM_THREADS": "1",
            "RANKER_PORT": "0",
            "RANKER_LOGS__FORMAT": "json",
            "RANKER_DRAIN__DELAY_SECONDS": "0",
        }
        environment |= {f"RANKER_{name.upper()}": str(value) for name, value in settings.items()}
        self.lines: list[dict[str, Any]] = []
        self.raw: list[str] = []
        self.process = subprocess.Popen(
            [python, "-m", "app"], env=environment, cwd=directory, stderr=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.raw.append(line)
            if line.startswith("{"):
                self.lines.append(json.loads(line))

    def wait_ready(self) -> None:
        """Return once /readyz says so."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            if self.process.poll() is not None:
                self._reader.join(5)
                raise AssertionError(f"the server ended with {self.process.returncode}: {''.join(self.raw)}")
            if self.port and httpx.get(f"{self.url}/readyz").status_code == 200:
                return
            time.sleep(0.05)
        raise AssertionError(f"not ready after {START_SECONDS} s: {''.join(self.raw)}")

    @property
    def port(self) -> int:
        """0 while it does not listen."""
        return next((line["port"] for line in self.lines if line.get("event") == "listening"), 0)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self._reader.join(5)


@contextmanager
def serving(
    checkpoint: Path | str, python: Path | str = sys.executable, directory: Path = ROOT, **settings: Any
) -> Iterator[Server]:
    """A ready server of a checkpoint; settings by their names without the prefix, such as `queue__max_candidates`."""
    server = Server({"checkpoint": checkpoint} | settings, python, directory)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()
