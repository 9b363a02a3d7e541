"""How much the load generator can send by itself: the rate beyond which its own lateness, not a server's, is measured."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from typing import Any

import httptools

from loadtest.generate.arrivals import schedule
from loadtest.generate.generator import OpenLoop, measured
from loadtest.generate.http_client import Client, precise_loop
from loadtest.generate.payload import post
from loadtest.generate.traffic import Traffic, TrafficSettings
from loadtest.machine import machine

RATES = (250, 500, 1000, 1500, 2000, 3000, 4000, 6000)
BODIES = 2000
ANSWER_BYTES = 12_000  # about what 64 candidates with nineteen probabilities take


def measure_ceiling(seconds: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Rising rates against a process that answers at once; ends where the generator is late twice. Plain JSON values."""
    bodies = [request.body for request in Traffic(TrafficSettings().with_fixed_candidates(64)).take(BODIES)]
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    trials: list[dict[str, Any]] = []
    try:
        port = here.recv()
        for rate in RATES:
            with asyncio.Runner(loop_factory=precise_loop) as runner:
                trials.append(runner.run(_trial(port, rate, seconds, bodies)))
            say("  ".join(f"{name} {value}" for name, value in trials[-1].items()))
            if len(trials) > 1 and all(trial["is_bottleneck"] for trial in trials[-2:]):
                break
    finally:
        process.terminate()
        process.join()
    held = [trial["rate_rps"] for trial in trials if not trial["is_bottleneck"]]
    return {"kind": "ceiling", "ceiling_rps": max(held, default=0), "trials": trials, "machine": machine()}


async def _trial(port: int, rate: float, seconds: float, bodies: list[bytes]) -> dict[str, Any]:
    client = Client("127.0.0.1", port)
    due = schedule("poisson", rate, seconds)
    payloads = [post("ceiling", "/rank", bodies[row % len(bodies)]) for row in range(len(due))]
    samples, load = await measured(OpenLoop(client, payloads, due), client)
    await client.close()
    return {
        "rate_rps": rate,
        "answered": int((samples.status == 200).sum()),
        "lag_p99_ms": round(load.lag_p99_ms, 3),
        "cpu_share": round(load.cpu_share, 3),
        "cpu_us_per_request": round(1e6 * load.cpu_share * seconds / len(due)),
        "is_bottleneck": load.is_bottleneck,
    }


def _serve(pipe: Any) -> None:
    asyncio.run(_answer(pipe))


async def _answer(pipe: Any) -> None:
    server = await asyncio.get_running_loop().create_server(_Answer, "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


class _Answer(asyncio.Protocol):
    """Says 200 to whatever comes."""

    reply = f"HTTP/1.1 200 OK\r\nContent-Length: {ANSWER_BYTES}\r\n\r\n".encode() + b" " * ANSWER_BYTES

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        self.transport.write(self.reply)  # type: ignore[attr-defined]
