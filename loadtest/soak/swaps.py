"""F1 and C2: swaps checkpoints under load while clients disconnect and share batches, and checks every reply."""

from __future__ import annotations

import time
from collections.abc import Sequence

from loadtest.matrix import Row
from loadtest.soak.oracle import NAMES, Checked, admin_settings, learn, oracles, requests, swap, two_checkpoints
from loadtest.soak.servers import fake, real

TINY_CACHE_BYTES = 2**20  # evicts all the time
VANISHING = 0.1
CLIENTS = 16


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
                with Checked(known, server.port, CLIENTS, vanishing=VANISHING) as callers:
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
        Checked(learn(server, requests(30)), server.port, CLIENTS) as callers,
    ):
        time.sleep(seconds)
    return Row("C2", "fake engine", callers.answered, callers.crossed, callers.lost, 0, "lost")
