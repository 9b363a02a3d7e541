"""L4: memory, descriptors, threads and cache of a server under long load with reloads, with or without a planted leak."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loadtest.matrix import Row
from loadtest.servers.launch import Server
from loadtest.soak.oracle import NAMES, Checked, admin_settings, oracles, requests, swap, two_checkpoints
from loadtest.soak.servers import fake, real
from loadtest.soak.swaps import learn_from

CLIENTS = 8
SAMPLES = 60
CACHE_BYTES = 16 * 2**20
BYTES_PER_REQUEST_LIMIT = 512.0  # the planted leak is 1024
SPREAD_LIMIT = 8  # descriptors and threads more than after warm-up: connections come and go


@dataclass(frozen=True, slots=True)
class Usage:
    """A process at one moment."""

    answered: int
    resident_bytes: int
    descriptors: int
    threads: int


def usage(server: Server, answered: int) -> Usage:
    """Read from /proc."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    values = dict(line.split(":", 1) for line in status.splitlines())
    return Usage(
        answered,
        int(values["VmRSS"].split()[0]) * 1024,
        len(os.listdir(f"/proc/{server.process.pid}/fd")),
        int(values["Threads"]),
    )


def leak(seconds: float, *faults: str) -> Row:
    """Resident memory a request, around the fake engine; `--leak-bytes=1024` among the faults must turn it red."""
    with fake(*faults, queue__max_wait_seconds=5) as server, asyncio.Runner() as runner:
        payloads = requests(30)
        traffic = Checked(runner.run(learn_from(server, payloads)), payloads)
        seen = runner.run(_watched(traffic, server, seconds))
    return _row("L4", "requests", seen, traffic)


def reload_leak(seconds: float, every_seconds: float) -> list[Row]:
    """The real service with a reload every so often; memory is compared between reloads of the second half."""
    payloads = requests(60)
    with two_checkpoints() as root:
        known = oracles(root, payloads)
        settings = {**admin_settings(root), "cache__bytes": CACHE_BYTES, "queue__max_wait_seconds": 5}
        with real(**settings) as server, asyncio.Runner() as runner:
            traffic = Checked(known, payloads, cancel_share=0.02)
            seen = runner.run(_watched(traffic, server, seconds, settings["admin__port"], every_seconds))
            cache = server.metric("ranker_context_cache_bytes")
    over = Row("L4", "context cache within its budget", 1, 0, cache / 2**20, CACHE_BYTES / 2**20, "MiB")
    return [_row("L4", f"requests, a reload every {every_seconds:.0f} s", seen, traffic), over]


async def _watched(
    traffic: Checked, server: Server, seconds: float, admin: object = None, every_seconds: float = 0.0
) -> list[Usage]:
    running = asyncio.create_task(traffic.run(server, CLIENTS))
    began = reloaded = time.monotonic()
    seen, turn = [], 0
    while time.monotonic() < began + seconds:
        await asyncio.sleep(seconds / SAMPLES)
        seen.append(usage(server, traffic.answered))
        if admin is not None and time.monotonic() > reloaded + every_seconds:
            reloaded, turn = time.monotonic(), turn + 1
            if await swap(admin, NAMES[turn % len(NAMES)]) != 200:
                traffic.lost += 1
    traffic.stop = True
    await running
    return seen


def _row(name: str, what: str, seen: list[Usage], traffic: Checked) -> Row:
    """The slope of memory over requests in the second half, when pools and caches have filled."""
    half = seen[len(seen) // 2 :]
    slope = float(np.polyfit([each.answered for each in half], [each.resident_bytes for each in half], 1)[0])
    first, last = half[0], half[-1]
    grown = max(last.descriptors - first.descriptors, last.threads - first.threads)
    faults = {
        "crossed": traffic.crossed,
        "lost": traffic.lost,
        "more descriptors or threads": grown * (grown > SPREAD_LIMIT),
    }
    what += "".join(f", {count} {fault}" for fault, count in faults.items() if count)
    return Row(
        name, what, traffic.answered, sum(faults.values()), slope, BYTES_PER_REQUEST_LIMIT, "resident bytes a request"
    )
