"""L1, L2, L3, L5, L6: load beyond engine or event loop, also beside a shadow checkpoint, and short deadlines, with a fake engine."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtest.generate import wrk
from loadtest.generate.generator import closed_samples, open_loop, schedule
from loadtest.generate.http_client import Client, precise_loop
from loadtest.generate.payload import rank_request
from loadtest.generate.samples import Samples
from loadtest.matrix import Row
from loadtest.servers.launch import HOST, Server
from loadtest.soak.clients import ask_all
from loadtest.soak.oracle import fingerprint
from loadtest.soak.servers import fake

FORWARD_SECONDS = 0.1  # long enough that generator and event loop do not limit the figures
BATCH = 4  # requests per forward
CANDIDATES = 16
CAPACITY_RPS = BATCH / FORWARD_SECONDS
ENGINE = (f"--forward-ms={FORWARD_SECONDS * 1e3}",)
SETTINGS: dict[str, object] = {
    "batching__max_candidates": BATCH * CANDIDATES,
    "batching__chunk_candidates": BATCH * CANDIDATES,
    "queue__max_wait_seconds": 0.7 * FORWARD_SECONDS,  # a newcomer joins the next forward or is refused
    "queue__max_candidates": 16 * BATCH * CANDIDATES,
}
REJECTION_LIMIT_MS = 20.0
STRETCH_LIMIT = 2.0
GOODPUT_LIMIT = 0.95
RECOVERY_SECONDS = 5.0
RETRIES = 3
WAVE = 100
FEW, MANY = 32, 256  # impatient callers
SHADOWED = 5  # times the capacity
SHADOW = {"shadow__checkpoint": "second", "shadow__share": 1.0}
COMPUTES = "--shadow-ms=50"  # per shadowed request, on the device of the first checkpoint
ASKED = 20  # requests whose bits are compared


@dataclass(frozen=True, slots=True)
class Load:
    """Result of one offered load: replies with 200 per second, 99th percentiles in seconds, counts."""

    goodput_rps: float
    admitted_p99: float
    rejected_p99: float
    tried: int
    broken: int  # neither 200 nor 429 with Retry-After

    @classmethod
    def of(cls, samples: Samples, seconds: float) -> Load:
        """The load of samples whose schedule lasted this many seconds."""
        good, refused = samples.status == 200, (samples.status == 429) & samples.retry_after
        took, last = samples.service_seconds, float(samples.done[good].max(initial=0.0))
        rate = float(good.sum()) / max(seconds, last)
        admitted, rejected = (float(np.percentile(took[each], 99)) if each.any() else 0.0 for each in (good, refused))
        return cls(rate, admitted, rejected, len(samples), int((~good & ~refused).sum()))


def offer(server: Server, multiple: float, seconds: float, seed: int = 1) -> Load:
    """Offer Poisson arrivals at a multiple of the capacity."""

    async def main() -> Samples:
        due = schedule("poisson", multiple * CAPACITY_RPS, seconds, seed)
        async with Client(HOST, server.port, max_connections=256, timeout_seconds=10) as client:
            return await open_loop(client, [rank_request(row + 1, CANDIDATES) for row in range(len(due))], due)

    with asyncio.Runner(loop_factory=precise_loop) as runner:
        return Load.of(runner.run(main()), seconds)


def unloaded(server: Server, requests: int) -> float:
    """99th percentile of the latency of requests sent one by one, in seconds."""
    payloads = [rank_request(user, CANDIDATES) for user in range(1, requests + 1)]
    replies = ask_all(server.port, payloads, timeout_seconds=60)
    return float(np.percentile([reply.done_at - reply.sent_at for reply in replies], 99))


def total(loads: Sequence[Load]) -> tuple[int, int]:
    """Total numbers of tried and broken requests."""
    return sum(load.tried for load in loads), sum(load.broken for load in loads)


def overload(seconds: float, settings: Mapping[str, object] = SETTINGS) -> list[Row]:
    """L1: 1×, 5× and 10× of the capacity."""
    with fake(*ENGINE, **settings) as server:
        alone = unloaded(server, max(10, int(seconds / 4 / FORWARD_SECONDS)))
        loads = [offer(server, multiple, seconds / 4) for multiple in (1, 5, 10)]
    tried, broken = total(loads)
    stretch = max(load.admitted_p99 for load in loads) / alone
    least = min(load.goodput_rps for load in loads[1:]) / max(load.goodput_rps for load in loads)
    slowest = max(load.rejected_p99 for load in loads) * 1e3
    answers = "1×, 5×, 10×: 200, or 429 with Retry-After"
    return [
        Row("L1", answers, tried, broken, slowest, REJECTION_LIMIT_MS, "ms p99 of refusals"),
        Row("L1", "latency of the admitted", tried, 0, stretch, STRETCH_LIMIT, "× unloaded p99"),
        Row("L1", "goodput at 5× and 10×", tried, 0, least, GOODPUT_LIMIT, "of peak", at_least=True),
    ]


def recovery(seconds: float) -> Row:
    """L2: load at 10× with three retries per client, then at 0.5×. How soon do all requests succeed again?

    Clients at 10× retry within 0.1 s and ignore `Retry-After`; clients at 0.5× respect it.
    """
    with fake(*ENGINE, **SETTINGS) as server, asyncio.Runner(loop_factory=precise_loop) as runner:
        tried, last_failure, failed = runner.run(_storm_then_calm(server, seconds))
    what = "10× with retries, then 0.5×: last failure after the fall"
    return Row("L2", what, tried, failed, last_failure, RECOVERY_SECONDS, "s")


async def _storm_then_calm(server: Server, seconds: float) -> tuple[int, float, int]:
    async with Client(HOST, server.port, max_connections=400, timeout_seconds=5) as client:
        due = schedule("poisson", 10 * CAPACITY_RPS, seconds / 2)
        storm = await asyncio.gather(*(_persistent(client, at, row, patient=False) for row, at in enumerate(due)))
        due = schedule("poisson", 0.5 * CAPACITY_RPS, max(seconds / 2, 2.0), seed=2)
        calm = await asyncio.gather(*(_persistent(client, at, row, patient=True) for row, at in enumerate(due)))
    failures = [float(at) for at, status in zip(due, calm, strict=True) if status != 200]
    late = sum(at > RECOVERY_SECONDS for at in failures)
    return len(storm) + len(calm), max(failures, default=0.0), late


async def _persistent(client: Client, due: float, row: int, *, patient: bool) -> int:
    """Send one request, with retries if refused; return the status of the last attempt."""
    await asyncio.sleep(float(due))
    for _ in range(1 + RETRIES):
        reply = await client.ask(rank_request(row + 1, CANDIDATES))
        if reply.status == 200:
            break
        told = float(reply.headers.get(b"retry-after", b"0"))
        await asyncio.sleep(told if patient else random.uniform(0, 0.1))
    return reply.status


def impatience(seconds: float, *faults: str, rounds: int = 3, **settings: Any) -> list[Row]:
    """L5: few and many callers that send again right after each reply, with an engine that takes no time.

    wrk measures the rate. Our own generator is slower and measures the latency of the 200s only.
    """
    requests, each = [rank_request(1, CANDIDATES)] * 100_000, seconds / 4 / rounds
    body = requests[0].partition(b"\r\n\r\n")[2]
    rates: dict[int, list[float]] = {FEW: [], MANY: []}
    loads: dict[int, list[Load]] = {FEW: [], MANY: []}
    with fake(*faults, **settings) as server:
        address = (HOST, server.port)
        for _ in range(rounds):
            for callers in (FEW, MANY):
                rates[callers].append(wrk.read(f"{server.url}/rank", [body], callers, each).good_per_s)
                samples = closed_samples(address, requests, clients=callers, seconds=each, warm_up=8 * callers)
                loads[callers].append(Load.of(samples, float(samples.done.max())))
    goodput = float(np.median(np.array(rates[MANY]) / rates[FEW]))
    few, many = (np.array([load.admitted_p99 for load in found]) for found in loads.values())
    tried, broken = total(loads[FEW] + loads[MANY])
    what = f"200s a second of {MANY} impatient callers"
    return [
        Row("L5", what, tried, broken, goodput, 0.9, f"of those of {FEW}", at_least=True),
        Row("L5", "p99 of their 200s", tried, 0, float(np.median(many / few)), 3.0, f"× that of {FEW}"),
    ]


def deadlines(requests: int) -> Row:
    """L3: deadlines shorter than the queue. A request that gets 504 must not have been computed.

    Requests come in waves: more at once would overload the event loop, which then answers 429 to unread requests.
    """
    one_at_a_time = {"batching__max_candidates": CANDIDATES, "batching__chunk_candidates": CANDIDATES}
    statuses: list[int] = []
    with fake("--forward-ms=2", queue__max_wait_seconds=0, **one_at_a_time) as server:
        for first in range(1, requests + 1, WAVE):
            users = range(first, min(first + WAVE, requests + 1))
            hurried = [rank_request(user, CANDIDATES, {"X-Request-Timeout-Ms": "40"}) for user in users]
            statuses += [reply.status for reply in ask_all(server.port, hurried, together=WAVE)]
        computed = int(server.metric("ranker_candidates_scored_total")) // CANDIDATES
    answered, late = statuses.count(200), statuses.count(504)
    wasted = computed - answered  # only a request whose forward had begun before its deadline may be computed in vain
    what = f"deadline shorter than the queue: 504 ({late}), never computed"
    in_vain = max(0, wasted) / max(1, late)
    return Row("L3", what, requests, len(statuses) - answered - late, in_vain, 0.1, "computed in vain per 504")


def shadow(seconds: float, *faults: str, rounds: int = 4) -> list[Row]:
    """L6: load at five times the capacity, in turns with and without a shadow that scores every answered request. Medians of the rounds."""
    loads: list[list[Load]] = [[], []]
    with ExitStack() as stack:
        servers = [stack.enter_context(fake(*ENGINE, COMPUTES, *faults, **SETTINGS, **more)) for more in ({}, SHADOW)]
        replies = [_asked(server) for server in servers]
        scored = servers[1].metric("ranker_shadow_candidates_total") // CANDIDATES
        for turn in range(2 * rounds):
            side = (turn + turn // 2) % 2  # A B B A
            servers[1 - side].pause()
            loads[side].append(offer(servers[side], SHADOWED, seconds / 2 / rounds, seed=turn // 2))
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
