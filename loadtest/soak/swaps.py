"""F1 and C2: checkpoints are swapped under load while clients disconnect and share batches; every reply is checked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from loadtest.matrix import Row
from loadtest.servers.launch import Server
from loadtest.soak import oracle
from loadtest.soak.oracle import NAMES, Checked, Fingerprint, admin_settings, oracles, requests, swap, two_checkpoints
from loadtest.soak.servers import fake, real

TINY_CACHE_BYTES = 2**20  # evicts all the time
CANCEL_SHARE = 0.1
CLIENTS = 16


def swaps(seconds: float, *, payload_count: int = 60, fronts: Sequence[int] = (0,)) -> list[Row]:
    """Two checkpoints in turns, a cache that is always too small, one client in ten gone before its reply.

    `fronts`: how many the server has, for so many seconds each; the oracles are single processes.
    """
    payloads = requests(payload_count)
    with two_checkpoints() as root:
        known = oracles(root, payloads)
        return [row for count in fronts for row in _swaps(root, Checked(known, payloads, CANCEL_SHARE), seconds, count)]


def _swaps(root: Path, traffic: Checked, seconds: float, fronts: int) -> list[Row]:
    settings = {**admin_settings(root), "cache__bytes": TINY_CACHE_BYTES, "queue__max_wait_seconds": 5}
    with real(**settings, fronts=fronts) as server, asyncio.Runner() as runner:
        done, refused = runner.run(_swap_under(traffic, server, settings["admin__port"], seconds))
        left = server.metric("ranker_queue_requests")
    tried = traffic.answered + traffic.lost
    swapped, checked = len(traffic.versions), f"replies against the oracle, {traffic.cancelled} cancelled"
    dropped = traffic.lost + traffic.refused
    return [
        Row("F1", f"swaps under load ({swapped} versions answered)", done, refused, dropped, 0, "dropped requests"),
        Row("C2", checked, tried, traffic.crossed, left, 0, "requests left over"),
    ]


async def _swap_under(traffic: Checked, server: Server, admin: object, seconds: float) -> tuple[int, int]:
    """Swap as fast as it goes; returns swaps done and swaps refused."""
    running = asyncio.create_task(traffic.run(server, CLIENTS))
    until, done, refused = time.monotonic() + seconds, 0, 0
    while time.monotonic() < until or done < 2:
        done += 1
        refused += await swap(admin, NAMES[done % len(NAMES)]) != 200
        await asyncio.sleep(0.05)
    traffic.stop = True
    await running
    await asyncio.sleep(0.2)
    return done, refused


def crossing(seconds: float, *faults: str) -> Row:
    """C2 around the fake engine; with `--cross` among the faults it must find every swapped pair."""
    payloads = requests(30)
    with fake("--forward-ms=3", *faults, queue__max_wait_seconds=5) as server, asyncio.Runner() as runner:
        traffic = Checked(runner.run(learn_from(server, payloads)), payloads)
        runner.run(_for_a_while(traffic, server, seconds))
    return Row("C2", "fake engine", traffic.answered, traffic.crossed, traffic.lost, 0, "lost")


async def learn_from(server: Server, payloads: list[bytes]) -> dict[str, list[Fingerprint]]:
    """The server is its own oracle: each payload asked alone, while nothing else goes on."""
    version, expected = await oracle.learn(server, payloads)
    return {version: expected}


async def _for_a_while(traffic: Checked, server: Server, seconds: float) -> None:
    running = asyncio.create_task(traffic.run(server, CLIENTS))
    await asyncio.sleep(seconds)
    traffic.stop = True
    await running
