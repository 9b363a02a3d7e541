"""L6: load at five times the capacity, in turns with and without a shadow checkpoint that scores every answered request."""

from __future__ import annotations

import time
from contextlib import ExitStack

import numpy as np

from loadtest.generate.payload import rank_request
from loadtest.matrix import Row
from loadtest.servers.launch import Server
from loadtest.soak.clients import ask_all
from loadtest.soak.oracle import fingerprint
from loadtest.soak.overload import CANDIDATES, ENGINE, SETTINGS, Load, offer, total
from loadtest.soak.servers import fake

MULTIPLE = 5
COMPUTES = "--shadow-ms=50"  # per shadowed request, on the device of the first checkpoint
ASKED = 20  # requests whose bits are compared
SHADOW = {"shadow__checkpoint": "second", "shadow__share": 1.0}


def shadow(seconds: float, *faults: str, rounds: int = 4) -> list[Row]:
    """Rows of medians over the rounds: with a shadow ÷ without one."""
    loads: list[list[Load]] = [[], []]
    with ExitStack() as stack:
        servers = [stack.enter_context(fake(*ENGINE, COMPUTES, *faults, **SETTINGS, **more)) for more in ({}, SHADOW)]
        replies = [_asked(server) for server in servers]
        scored = servers[1].metric("ranker_shadow_candidates_total") // CANDIDATES
        for turn in range(2 * rounds):
            side = (turn + turn // 2) % 2  # A B B A
            servers[1 - side].pause()
            loads[side].append(offer(servers[side], MULTIPLE, seconds / 2 / rounds, seed=turn // 2))
            servers[1 - side].resume()
    p99, goodput = (
        [float(np.median([getattr(load, name) for load in side])) for side in loads]
        for name in ("admitted_p99", "goodput_rps")
    )
    tried, broken = total(loads[0] + loads[1])
    changed = sum(one != other for one, other in zip(*replies, strict=True))
    return [
        Row("L6", "replies beside a shadow that has scored them", int(scored), changed, changed, 0, "changed"),
        Row("L6", "5× beside a shadow: p99 of the admitted", tried, broken, p99[1] / p99[0], 1.15, "× without"),
        Row("L6", "5× beside a shadow: goodput", tried, 0, goodput[1] / goodput[0], 0.95, "× without", at_least=True),
    ]


def _asked(server: Server) -> list[bytes]:
    """Fingerprints of a server's replies to the same requests, sent one by one."""
    found = []
    for user in range(1, ASKED + 1):
        [reply] = ask_all(server.port, [rank_request(user, CANDIDATES)], keep_bodies=True)
        found.append(fingerprint(reply) if reply.status == 200 else b"")
        time.sleep(0.08)  # a moment for the shadow
    return found
