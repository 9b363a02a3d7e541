"""One measured run against a server: prepare, warm up, measure, store."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from loadtest.generate.generator import Arrivals, GeneratorLoad, measured, open_loop, schedule
from loadtest.generate.http_client import Client, precise_loop
from loadtest.generate.samples import Samples
from loadtest.generate.traffic import RankRequest, Traffic, TrafficSettings
from loadtest.machine import machine
from loadtest.measure.figures import Slo, in_words, percentiles_ms, summarise
from loadtest.target import Target, fit_traffic

MAX_PAYLOAD_BYTES = 2 * 2**30

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How to load a server. Warm-up traffic comes first, from the same stream, and is not measured.

    Raises ValueError for a rate or a time that is not finite, or not above 0 (`warmup_seconds` may be 0).
    """

    rate_rps: float = 100.0
    seconds: float = 30.0
    warmup_seconds: float = 5.0
    arrivals: Arrivals = "poisson"
    slo: Slo = field(default_factory=Slo)

    traffic: TrafficSettings = field(default_factory=TrafficSettings)

    def __post_init__(self) -> None:
        if not (0 < self.rate_rps < inf and 0 < self.seconds < inf and 0 <= self.warmup_seconds < inf):
            raise ValueError(
                "a rate and a time to measure are finite and above 0, a time to warm up is finite and not below 0"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return values | {"slo": asdict(self.slo), "traffic": self.traffic.to_dict()}


@dataclass(frozen=True, slots=True)
class Run:
    """The samples of a run, with its settings, server, machine, generator and summary in `meta`."""

    samples: Samples
    meta: dict[str, Any]

    @property
    def summary(self) -> dict[str, Any]:
        """The stored figures of `summarise`."""
        summary: dict[str, Any] = self.meta["summary"]
        return summary

    @property
    def slo(self) -> Slo:
        """The objective that the run was judged by."""
        return Slo(**self.meta["settings"]["slo"])

    def save(self, directory: Path) -> None:
        """Write `run.json` and `samples.npz`."""
        directory.mkdir(parents=True, exist_ok=True)
        self.samples.save(directory / "samples.npz")
        (directory / "run.json").write_text(json.dumps(self.meta, indent=1, sort_keys=True) + "\n")


class LoadRun:
    """Several runs against one server with one stream of traffic, so that users return. Raises TargetError if it does not answer."""

    def __init__(self, target: Target, settings: RunSettings, say: Say | None = None) -> None:
        self.target = target
        self.info = target.info()
        self.settings = replace(settings, traffic=fit_traffic(settings.traffic, self.info))
        self.traffic = Traffic(self.settings.traffic)
        self.say = say or (lambda line: print(line, file=sys.stderr, flush=True))

    def run(self, rate_rps: float | None = None, seed: int = 1) -> Run:
        """Warm up and measure once, at `rate_rps` if given."""
        settings = replace(self.settings, rate_rps=rate_rps or self.settings.rate_rps)
        with asyncio.Runner(loop_factory=precise_loop) as runner:
            return runner.run(self._run(settings, seed))

    async def _run(self, settings: RunSettings, seed: int) -> Run:
        async with Client(self.target.host, self.target.port) as client:
            if settings.warmup_seconds > 0:
                await self._phase(client, settings, settings.warmup_seconds, seed + 1_000_003, "warm-up")
            samples, load = await self._phase(client, settings, settings.seconds, seed, "measure")
        meta = {
            "kind": "open",
            "settings": settings.to_dict() | {"seed": seed},
            "target": self.target.url,
            "machine": machine(),
            "server": {"info": self.info},
            "generator": asdict(load) | {"is_bottleneck": load.is_bottleneck},
            "summary": summarise(samples, settings.seconds, settings.slo),
        }
        return Run(samples, meta)

    async def _phase(
        self, client: Client, settings: RunSettings, seconds: float, seed: int, name: str
    ) -> tuple[Samples, GeneratorLoad]:
        due = schedule(settings.arrivals, settings.rate_rps, seconds, seed)
        requests, samples = self._prepare(len(due)), Samples.empty(len(due))
        payloads = [self.target.request(request.for_path(self.target.endpoint)) for request in requests]
        ticker = asyncio.create_task(self._tick(samples, client, name, seconds, settings.slo))

        def is_right(row: int, body: bytes) -> bool:
            return requests[row].is_answered(body)

        _, load = await measured(open_loop(client, payloads, due, samples, is_right))
        ticker.cancel()
        for row, request in enumerate(requests):
            samples.describe(row, request)
        return samples, load

    def _prepare(self, count: int) -> list[RankRequest]:
        """Make all requests before the first is sent, so that making them does not disturb the run. Raises ValueError if too large."""
        requests, held = [], 0
        for _ in range(count):
            requests.append(next(self.traffic))
            held += len(requests[-1].body)
            if held > MAX_PAYLOAD_BYTES:
                most = f"{MAX_PAYLOAD_BYTES >> 30} GiB of bodies"
                raise ValueError(f"{count} requests need more than {most}: shorten the run")
        return requests

    async def _tick(self, samples: Samples, client: Client, name: str, seconds: float, slo: Slo) -> None:
        """Print one line per second about the requests that were due in the last second."""
        second = 0
        while True:
            await asyncio.sleep(1.0)
            part = samples[(samples.due >= second) & (samples.due < second + 1)]
            second += 1
            latency = percentiles_ms(part.latency_seconds[part.status == 200])
            self.say(
                f"{name} {min(second, seconds):3.0f}/{seconds:.0f} s  due {len(part):5d}  ok {(part.status == 200).sum():5d}  "
                f"good {slo.good(part).sum():5d}  429 {(part.status == 429).sum():4d}  failed {part.has_failed.sum():4d}  "
                f"{in_words(latency)}  waiting {client.in_flight:4d}"
            )
