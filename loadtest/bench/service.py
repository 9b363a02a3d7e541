"""HTTP rows of the targets table: what the service adds to a forward, what batching gains, how soon it is ready."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import orjson
import torch

from loadtest.bench.engines import computed_in, engine_rows
from loadtest.bench.production import checkpoint_of, payload_of, production_rows, wire_rows
from loadtest.generate.generator import closed_samples
from loadtest.generate.samples import STAGES, Samples
from loadtest.generate.traffic import Traffic, TrafficSettings
from loadtest.matrix import HISTORY, Row, publish
from loadtest.servers.launch import ranking_server
from loadtest.servers.target import Target, fit_traffic
from loadtest.timing import Figure, ratio

WARM_UP_REQUESTS = 50
PARSE, FORWARD, SERIALIZE = (STAGES.index(stage) for stage in ("parse", "forward", "serialize"))


def measure(
    rounds: int = 15,
    seconds: float = 4.0,
    compositions: int = 2000,
    dtype: Literal["auto", "bfloat16", "float32"] = "auto",
    vectors: Literal["auto", "avx2", "neon"] = "auto",
    history: Path = HISTORY,
) -> None:
    """The targets table: engines against the dense definition, and the service around them. Exit code 0 even if targets are missed.

    `rounds`: readings of each side. `seconds`: length of a throughput reading. `compositions`: random batches for the row on bits.
    With `vectors`, there are no HTTP rows. `history`: CSV file to append to.
    """
    if vectors == "avx2" and not os.environ.get("ATEN_CPU_CAPABILITY"):  # torch reads it as it is imported
        os.environ["ATEN_CPU_CAPABILITY"] = "avx2"
        os.execv(sys.executable, [sys.executable, "-m", "loadtest", *sys.argv[1:]])  # noqa: S606
    chosen = computed_in(vectors) if dtype == "auto" else dtype
    rows = []
    found = engine_rows(getattr(torch, chosen), rounds, compositions, vectors)
    if vectors == "auto":
        found = chain(found, service_rows(chosen, seconds), production_rows(rounds), wire_rows(rounds))
    for row in found:
        print(f"{row.what}: {row.figure:.3g} {row.unit} ({'met' if row.ok else 'missed'})", file=sys.stderr)
        rows.append(row)
    run = {"torch": torch.__version__, "dtype": chosen, "threads": torch.get_num_threads(), "vectors": vectors}
    publish(rows, run, history=history)


def service_rows(dtype: str, seconds: float) -> Iterator[Row]:
    """Every HTTP row; `seconds` is how long one reading of throughput takes."""
    settings: dict[str, Any] = {"dtype": dtype, "logs__level": "warning"}
    with checkpoint_of("mini") as checkpoint:
        started = time.perf_counter()
        with ranking_server(checkpoint=checkpoint, **settings) as server:
            ready = time.perf_counter() - started
            yield Row.of("ready after start, kernel cached", Figure.of([ready]), "s", 15)
            yield overhead_row(server.target)
            yield json_row(server.target)
            yield from reply_rows(server.target)
        yield batching_row(checkpoint, settings, seconds)


def overhead_row(target: Target) -> Row:
    """Latency at one client minus the server's own forward time, mini, C = 64, median of 400 requests."""
    samples = all_answered(target, ranking_bodies(target, 64, 400), clients=1)
    took, forward = samples.service_seconds, samples.stages_ms[:, FORWARD] / 1e3
    sides = [Figure.of(side.tolist()) for side in (took, forward)]
    extra = Figure.of((1e3 * (took - forward)).tolist())
    return Row.of("HTTP p50 minus forward, mini C=64, one client", extra, "ms", 1.5, sides=sides)


def json_row(target: Target) -> Row:
    """The server's own parse and serialize time for C = 512 in the column form, checks and features included."""
    stages = all_answered(target, ranking_bodies(target, 512, 200), clients=1).stages_ms
    both = stages[:, PARSE] + stages[:, SERIALIZE]
    return Row.of("JSON in and out, C=512", Figure.of(both.tolist()), "ms", 1.5)


def reply_rows(target: Target) -> Iterator[Row]:
    """The server's own time to write a reply of 512 candidates on each wire, which blocks the event loop."""
    bodies = ranking_bodies(target, 512, 200)
    contents = [orjson.loads(body.partition(b"\r\n\r\n")[2]) for body in bodies]
    payloads = {wire: [payload_of(content, wire) for content in contents] for wire in ("binary", "columns")}
    for (wire, asked), goal_ms in zip((payloads | {"objects": bodies}).items(), (0.05, 0.15, 0.7), strict=True):
        spent = all_answered(target, asked, clients=1).stages_ms[:, SERIALIZE]
        yield Row.of(f"reply of 512 candidates, {wire}", Figure.of(spent.tolist()), "ms", goal_ms)


def batching_row(checkpoint: Path, settings: dict[str, Any], seconds: float) -> Row:
    """Replies per second at 32 clients, batching on against off: two servers, loaded in turns, never at once."""
    settings = settings | {"queue__max_wait_seconds": 0}  # a busy machine must not turn slow replies into refusals
    with (
        ranking_server(checkpoint=checkpoint, **settings) as batched,
        ranking_server(checkpoint=checkpoint, batching__max_requests=1, **settings) as single,
    ):
        rates: dict[str, list[float]] = {"on": [], "off": []}
        bodies = ranking_bodies(batched.target, 64, 4000)
        for _ in range(4):
            for name, server in (("on", batched), ("off", single)):
                samples = all_answered(server.target, bodies, clients=32, seconds=seconds)
                rates[name].append(float((samples.status == 200).sum() / samples.done.max()))
    gain = ratio(rates["on"], rates["off"])
    return Row.of("throughput at 32 clients, mini C=64, vs batching off", gain, "×", 2.0, at_least=True)


def ranking_bodies(target: Target, candidates: int, count: int) -> list[bytes]:
    """Whole requests of the traffic model with `candidates` candidates each, in the column form."""
    settings = fit_traffic(TrafficSettings(objects_share=0.0), target.info()).with_fixed_candidates(candidates)
    return [target.request(request.body) for request in Traffic(settings).take(count)]


def first_visits(target: Target, candidates: int, users: int, *, as_objects: bool) -> list[bytes]:
    """One body for each of `users` new users, whose histories fill the model's window."""
    settings = TrafficSettings(objects_share=float(as_objects), full_histories=True)
    traffic = Traffic(fit_traffic(settings, target.info()).with_fixed_candidates(candidates))
    return [traffic.first_visit().body for _ in range(users)]


def all_answered(target: Target, payloads: list[bytes], *, clients: int, seconds: float = 60.0) -> Samples:
    """Samples of a closed loop, without its first requests. Raises RuntimeError if a reply is not 200."""
    address = target.host, target.port
    samples = closed_samples(address, payloads, clients=clients, seconds=seconds, warm_up=WARM_UP_REQUESTS)
    if (samples.status != 200).any():
        raise RuntimeError(f"{int((samples.status != 200).sum())} of {len(samples)} requests failed")
    return samples
