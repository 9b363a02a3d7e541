"""L4: memory, descriptors, threads and cache of a server under long load with reloads, with or without a planted leak."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import numpy as np

from loadtest.matrix import Row
from loadtest.servers.launch import Server
from loadtest.soak.oracle import NAMES, Checked, admin_settings, learn, oracles, requests, swap, two_checkpoints
from loadtest.soak.servers import fake, real

CLIENTS = 8
SAMPLES = 60
CACHE_BYTES = 16 * 2**20
BYTES_PER_REQUEST_LIMIT = 512.0  # the planted leak is 1024
SPREAD_LIMIT = 8  # more descriptors or threads than after warm-up, as connections come and go


@dataclass(frozen=True, slots=True)
class Usage:
    """Resource use of a process at one moment, and how many requests it had answered."""

    answered: int
    resident_bytes: int
    descriptors: int
    threads: int


def usage(server: Server, answered: int = 0) -> Usage:
    """Read the usage of a server from /proc."""
    descriptors = len(os.listdir(f"/proc/{server.process.pid}/fd"))
    return Usage(answered, 1024 * server.status("VmRSS"), descriptors, server.status("Threads"))


def leak(seconds: float, *faults: str) -> Row:
    """Resident memory per request with the fake engine. The fault `--leak-bytes=1024` must turn it red."""
    with fake(*faults, queue__max_wait_seconds=5) as server:
        callers = Checked(learn(server, requests(30)), server.port, CLIENTS)
        return _watched("requests", callers, server, seconds)


def reload_leak(seconds: float, every_seconds: float) -> list[Row]:
    """The real service with a reload every `every_seconds`: memory per request in the second half, and the cache's size."""
    with two_checkpoints() as root:
        known = oracles(root, requests(60))
        settings = {**admin_settings(root), "cache__bytes": CACHE_BYTES, "queue__max_wait_seconds": 5}
        with real(**settings) as server:
            callers = Checked(known, server.port, CLIENTS, vanishing=0.02)
            what = f"requests, a reload every {every_seconds:.0f} s"
            row = _watched(what, callers, server, seconds, settings["admin__port"], every_seconds)
            cache = server.metric("ranker_context_cache_bytes")
    return [row, Row("L4", "context cache within its budget", 1, 0, cache / 2**20, CACHE_BYTES / 2**20, "MiB")]


def _watched(
    what: str, callers: Checked, server: Server, seconds: float, admin: object = None, every_seconds: float = 0.0
) -> Row:
    """The slope of memory over requests in the second half, when pools and caches are full."""
    seen, turn = [], 0
    began = reloaded = time.monotonic()
    with callers:
        while time.monotonic() < began + seconds:
            time.sleep(seconds / SAMPLES)
            seen.append(usage(server, callers.answered))
            if admin is not None and time.monotonic() > reloaded + every_seconds:
                reloaded, turn = time.monotonic(), turn + 1
                callers.lost += swap(admin, NAMES[turn % len(NAMES)]) != 200
    half = seen[len(seen) // 2 :]
    slope = float(np.polyfit([each.answered for each in half], [each.resident_bytes for each in half], 1)[0])
    first, last = half[0], half[-1]
    grown = max(last.descriptors - first.descriptors, last.threads - first.threads)
    beyond = grown if grown > SPREAD_LIMIT else 0
    faults = {"crossed": callers.crossed, "lost": callers.lost, "more descriptors or threads": beyond}
    what += "".join(f", {count} {fault}" for fault, count in faults.items() if count)
    failed = sum(faults.values())
    return Row("L4", what, callers.answered, failed, slope, BYTES_PER_REQUEST_LIMIT, "resident bytes a request")
