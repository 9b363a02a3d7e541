"""L4, F1 and C2: long loads whose replies are all checked, beside reloads: memory stays level, nothing is dropped or crossed."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np

from loadtest.matrix import Row
from loadtest.servers.launch import Server
from loadtest.soak.oracle import NAMES, Checked, admin_settings, learn, oracles, requests, swap, two_checkpoints
from loadtest.soak.servers import fake, real

CLIENTS = 8
SAMPLES = 60
CACHE_BYTES = 16 * 2**20
TINY_CACHE_BYTES = 2**20  # evicts all the time
VANISHING = 0.1
SWAPPING = 16  # clients
BYTES_PER_REQUEST_LIMIT = 512.0  # the planted leak is 1024
SPREAD_LIMIT = 8  # more descriptors or threads than after warm-up, as connections come and go


def usage(server: Server) -> tuple[int, int, int]:
    """Resident bytes, descriptors and threads of a server now."""
    descriptors = len(os.listdir(f"/proc/{server.process.pid}/fd"))
    return 1024 * server.status("VmRSS"), descriptors, server.status("Threads")


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
            seen.append((callers.answered, *usage(server)))
            if admin is not None and time.monotonic() > reloaded + every_seconds:
                reloaded, turn = time.monotonic(), turn + 1
                callers.lost += swap(admin, NAMES[turn % len(NAMES)]) != 200
    answered, resident, *others = np.array(seen[len(seen) // 2 :]).T
    slope = float(np.polyfit(answered, resident, 1)[0])
    grown = max(int(other[-1] - other[0]) for other in others)
    beyond = grown if grown > SPREAD_LIMIT else 0
    faults = {"crossed": callers.crossed, "lost": callers.lost, "more descriptors or threads": beyond}
    what += "".join(f", {count} {fault}" for fault, count in faults.items() if count)
    failed = sum(faults.values())
    return Row("L4", what, callers.answered, failed, slope, BYTES_PER_REQUEST_LIMIT, "resident bytes a request")


def swaps(seconds: float, *, payload_count: int = 60, fronts: Sequence[int] = (0,)) -> list[Row]:
    """Swap between two checkpoints, with a cache that is always too small, and one request in ten abandoned before its reply.

    `fronts`: numbers of fronts to test, each for `seconds`. The oracles are single processes.
    """
    rows = []
    with two_checkpoints() as root:
        known = oracles(root, requests(payload_count))
        for count in fronts:
            settings = {**admin_settings(root), "cache__bytes": TINY_CACHE_BYTES, "queue__max_wait_seconds": 5}
            with real(**settings, fronts=count) as server:
                with Checked(known, server.port, SWAPPING, vanishing=VANISHING) as callers:
                    until, done, refused = time.monotonic() + seconds, 0, 0
                    while time.monotonic() < until or done < 2:
                        done += 1
                        refused += swap(settings["admin__port"], NAMES[done % len(NAMES)]) != 200
                        time.sleep(0.05)
                time.sleep(0.2)
                left = server.metric("ranker_queue_requests")
            dropped, tried = callers.lost + callers.refused, callers.answered + callers.lost
            what = f"swaps under load ({len(callers.versions)} versions answered)"
            checked = f"replies against the oracle, {callers.vanished} cancelled"
            rows.append(Row("F1", what, done, refused, dropped, 0, "dropped requests"))
            rows.append(Row("C2", checked, tried, callers.crossed, left, 0, "requests left over"))
    return rows


def crossing(seconds: float, *faults: str) -> Row:
    """C2 with the fake engine. With the fault `--cross`, it must find swapped replies."""
    with (
        fake("--forward-ms=3", *faults, queue__max_wait_seconds=5) as server,
        Checked(learn(server, requests(30)), server.port, SWAPPING) as callers,
    ):
        time.sleep(seconds)
    return Row("C2", "fake engine", callers.answered, callers.crossed, callers.lost, 0, "lost")
