"""Debian's HAProxy with the file of docker/, in front of two servers that are killed or restarted under load: no request is lost."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from loadtest.machine import ROOT
from loadtest.server import Server, example, free_port, running, serving, wait_until
from tests.support.clients import Replies, callers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]
KILLS, RESTARTS = 4, 2
"""In `make test`; `make soak` goes on for its seconds."""
CALLERS_OF_A_KIND = 2
RESTART_SECONDS = 60.0
BODIES = [json.dumps(example(16) | {"user_id": user}).encode() for user in range(40)]
KINDS: list[dict[str, str]] = [
    {},
    {"connection": "close"},
    {"x-routing-key": "a user"},
    {"x-routing-key": "another user", "connection": "close"},
]
"""Headers of the kinds of callers: kept and new connections, without and with a routing key."""


@dataclass
class Proxied:
    """HAProxy, the ports of its two rankers, and its administration socket."""

    proxy: Server
    ports: list[int]
    socket_path: Path

    def status(self, number: int) -> str:
        """What HAProxy says of `ranker-1` or `ranker-2`: UP, DOWN, NOLB (takes nothing new), or one of these with a count of checks."""
        with socket.socket(socket.AF_UNIX) as asked:
            asked.connect(str(self.socket_path))
            asked.sendall(b"show stat\n")
            table = asked.makefile().read().removeprefix("# ")
        rows = csv.DictReader(io.StringIO(table))
        return next(row["status"] for row in rows if row["svname"] == f"ranker-{number}")


def configuration(ports: list[int], folder: Path) -> str:
    """The file of docker/ with the addresses of this machine, two servers, and an administration socket."""
    text = (ROOT / "docker/haproxy.cfg").read_text()
    text = text.replace("global\n", f"global\n    stats socket {folder}/admin level admin\n", 1)
    text = text.replace("local0 warning", "local0 info")
    text = text.replace("    log global\n", "    log global\n    option httplog\n", 1)
    text = text.replace("bind :8404", f"bind 127.0.0.1:{free_port()}").replace("bind :8000", "bind 127.0.0.1:{port}")
    text = re.sub(r"^ *server \w+-[34] .*\n", "", text, flags=re.M)
    for number, port in enumerate(ports, 1):
        text = text.replace(f"ranker-{number}:8000", f"127.0.0.1:{port}")
    return text


@contextmanager
def proxied(folder: Path, ports: list[int]) -> Iterator[Proxied]:
    """The proxy in front of servers at these ports, once it has found both to be ready."""
    port = free_port()
    file = folder / "haproxy.cfg"
    file.write_text(configuration(ports, folder).replace("{port}", str(port)))
    with running(["haproxy", "-db", "-f", str(file)], {}, port=port) as proxy:
        found = Proxied(proxy, ports, folder / "admin")
        wait_until(lambda: [found.status(1), found.status(2)] == ["UP", "UP"])
        yield found


@contextmanager
def load(proxy: Server) -> Iterator[list[Replies]]:
    """Callers of every kind, until the block ends."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                callers(
                    proxy,
                    lambda turn: BODIES[turn % 40],
                    CALLERS_OF_A_KIND,
                    pause=0.04,
                    impatient=True,
                    headers=headers,
                )
            )
            for headers in KINDS
        ]


def restart_in_turn(
    folder: Path, turns: int, seconds: float, end: Callable[[Server], object]
) -> tuple[list[Replies], int, int]:
    """End the two servers in turn under load and start them again, at least `turns` times and for at least `seconds`. Returns the replies
    of each kind of caller, how many servers were ended, and how often HAProxy sent the same request again at most."""
    ports = [free_port(), free_port()]
    ended = 0
    with ExitStack() as stack:
        servers = [stack.enter_context(ranker(port)) for port in ports]
        with proxied(folder, ports) as found, load(found.proxy) as replies:
            until = time.monotonic() + seconds
            while ended < turns or time.monotonic() < until:
                number = ended % 2
                end(servers[number])
                servers[number].wait()
                servers[number] = stack.enter_context(ranker(ports[number]))
                wait_until(lambda number=number: found.status(number + 1) == "UP", RESTART_SECONDS, found.proxy)
                time.sleep(0.5)
                ended += 1
            retries = [int(each) for each in re.findall(r'/\+?(\d+) \d+/\d+ "POST ', found.proxy.log_text)]
            print("What HAProxy logged, but for replies of 200:")
            print("\n".join(line for line in found.proxy.log_text.splitlines() if " 200 " not in line))
    return replies, ended, max(retries)


def ranker(port: int) -> object:
    return serving(port=port, threads=1, drain__delay_seconds=2, logs__success_sample=0)


def lost(replies: list[Replies]) -> list[str]:
    """What callers got instead of a ranking, by kind of caller."""
    return [
        f"{headers}: {answers.broken} without a reply, {[(each.status, each.content[:80]) for each in answers.all if each.status != 200]}"
        for headers, answers in zip(KINDS, replies, strict=True)
        if answers.broken or answers.statuses != {200}
    ]


@pytest.fixture(autouse=True)
def haproxy() -> None:
    if shutil.which("haproxy") is None:
        pytest.skip("haproxy is not installed; make test installs it on Debian")


def test_kills_behind_haproxy_lose_no_request(tmp_path: Path, duration: float) -> None:
    replies, kills, retries = restart_in_turn(tmp_path, KILLS, duration, lambda server: server.signal(signal.SIGKILL))
    print(f"{kills} kills, {sum(len(each.all) for each in replies)} requests, sent again {retries} times at most")
    assert lost(replies) == []
    assert retries <= 2, "five are allowed, and the second of two servers should do"


def test_rolling_restarts_behind_haproxy_lose_no_request(tmp_path: Path, duration: float) -> None:
    replies, restarts, retries = restart_in_turn(
        tmp_path, RESTARTS, duration, lambda server: server.signal(signal.SIGTERM)
    )
    print(f"{restarts} restarts, {sum(len(each.all) for each in replies)} requests, sent again {retries} times at most")
    assert lost(replies) == []
