"""Debian's HAProxy with the shipped configuration, in front of processes on this machine. Sends no load."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from loadtest.machine import ROOT
from loadtest.servers.launch import HOST, free_port
from loadtest.servers.target import Target, get

CONFIG = ROOT / "docker" / "haproxy" / "haproxy.cfg"
PROGRAM = shutil.which(
    "haproxy", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:" + str(ROOT / ".cache/haproxy/usr/sbin")
)
SERVED_BY = "x-served-by"


@contextmanager
def balancer(ports: Sequence[int], *changes: tuple[str, str], slow_start: str = "1s") -> Iterator[Target]:
    """In front of the processes that listen, or will, on these ports. Replies name the process: `x-served-by: ranker-1`.

    `changes`: lines of the configuration, as patterns, and what stands there in their place.
    """
    port = free_port()
    text = (
        CONFIG.read_text()
        .replace("bind :8000", f"bind {HOST}:{port}")
        .replace("slowstart 10s", f"slowstart {slow_start}")
    )
    text = text.replace("backend rankers\n", f"backend rankers\n    http-response set-header {SERVED_BY} %s\n")
    for number in range(1, text.count(" server ranker-") + 1):
        line = f"server ranker-{number} ranker-{number}:8000"
        here = f"server ranker-{number} {HOST}:{ports[number - 1]}" if number <= len(ports) else f"# {line}"
        text = text.replace(line, here)
    for pattern, instead in changes:
        text, found = re.subn(rf"(?m)^ *{pattern}$", instead, text)
        assert found, f"no line of the configuration is {pattern}"
    assert PROGRAM is not None, "haproxy is not installed"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "haproxy.cfg"
        path.write_text(text)
        process = subprocess.Popen(
            [PROGRAM, "-f", str(path), "-db"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            target = Target(HOST, port)
            while not _is_up(target):
                assert process.poll() is None, "haproxy ended"
                time.sleep(0.05)
            yield target
        finally:
            process.terminate()
            process.wait(10)


def _is_up(target: Target) -> bool:
    try:
        return get(f"{target.origin}/readyz", 2).status_code == 200
    except httpx.HTTPError:
        return False
