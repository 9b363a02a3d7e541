"""L6: five times the capacity with and without a shadow checkpoint that computes for every answered request, in turns."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from typing import Any

import numpy as np

from loadtest.generate.http_client import Client, precise_loop
from loadtest.generate.payload import rank_request
from loadtest.matrix import Row
from loadtest.servers.launch import HOST, Server
from loadtest.soak.overload import CANDIDATES, ENGINE, SETTINGS, Load, offer
from loadtest.soak.servers import fake

MULTIPLE = 5
COMPUTES = "--shadow-ms=50"  # each shadowed request, on the device that the first checkpoint has its forwards on
ASKED = 20  # requests whose bits are compared
SHADOW = {"shadow__checkpoint": "second", "shadow__share": 1.0}


def shadow(seconds: float, *faults: str, rounds: int = 4) -> list[Row]:
    """Medians over the rounds, with a shadow over without."""
    loads: list[list[Load]] = [[], []]
    with ExitStack() as stack, asyncio.Runner(loop_factory=precise_loop) as runner:
        servers = [stack.enter_context(fake(*ENGINE, COMPUTES, *faults, **SETTINGS, **more)) for more in ({}, SHADOW)]
        replies = [runner.run(_asked(server)) for server in servers]
        scored = servers[1].metric("ranker_shadow_candidates_total") // CANDIDATES
        for turn in range(2 * rounds):
            side = (turn + turn // 2) % 2  # A B B A
            servers[1 - side].pause()
            loads[side].append(runner.run(offer(servers[side], MULTIPLE, seconds / 2 / rounds, seed=turn // 2)))
            servers[1 - side].resume()
    p99, goodput = (
        [float(np.median([getattr(load, name) for load in side])) for side in loads]
        for name in ("admitted_p99", "goodput_rps")
    )
    tried, broken = (sum(getattr(load, name) for load in loads[0] + loads[1]) for name in ("tried", "broken"))
    changed = sum(one != other for one, other in zip(*replies, strict=True))
    return [
        Row("L6", "replies beside a shadow that has scored them", int(scored), changed, changed, 0, "changed"),
        Row("L6", "5× beside a shadow: p99 of the admitted", tried, broken, p99[1] / p99[0], 1.15, "× without"),
        Row("L6", "5× beside a shadow: goodput", tried, 0, goodput[1] / goodput[0], 0.95, "× without", at_least=True),
    ]


async def _asked(server: Server) -> list[Any]:
    """What a server says to the same requests one by one, but for its timings."""
    async with Client(HOST, server.port, max_connections=1, keep_bodies=True) as client:
        found = []
        for user in range(1, ASKED + 1):
            reply = await client.ask(rank_request(user, CANDIDATES))
            found.append(json.loads(reply.body) | {"timings_ms": None} if reply.status == 200 else None)
            await asyncio.sleep(0.08)  # a moment for the shadow
        return found
