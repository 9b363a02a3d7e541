"""The phases of the GPU bench. Each yields records (plain JSON values) and runs in a separate process. Order: `all_phases`."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from tempfile import TemporaryDirectory

import torch

from loadtest.geometries import GEOMETRIES
from loadtest.gpu.card import Card
from loadtest.gpu.checks import check_config, equal_bits, make_engine, parity, parity_cases, watch
from loadtest.gpu.faults import hang
from loadtest.gpu.table import Geometry, Record, line, tiny
from model.config import ModelConfig
from model.engine import Item
from model.split.engine import SplitEngine
from model.synthetic import random_ranker, random_request

DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Phase:
    """A function to run, and the most seconds that it may take."""

    run: Callable[[Card, str], Iterator[Record]]
    seconds: float
    geometry: str = ""


def environment(card: Card, geometry: str) -> Iterator[Record]:
    """Driver and clocks, the card's measured ceilings, and the cost of a graph node."""
    if card.is_cuda:
        query = "--query-gpu=name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,memory.total"
        queried = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, check=False
        )
        yield {
            "nvidia_smi": queried.stdout.strip() or queried.stderr.strip(),
            "capability": torch.cuda.get_device_capability(),
        }
    ceilings = card.ceilings()
    yield {"bf16_tflops": ceilings.tflops, "copy_gb_per_s": ceilings.gigabytes_per_second}
    if card.is_cuda:
        x, graph, nodes = torch.zeros(64, device=card.device), torch.cuda.CUDAGraph(), 500
        with torch.cuda.graph(graph):
            for _ in range(nodes):
                x += 1
        yield {"graph_node_us": 1e3 * card.device_time(graph.replay).median / nodes}


def compile_all(card: Card, geometry: str) -> Iterator[Record]:
    """Compile all kernels in many processes and yield what each one uses. A kernel that fails yields a problem."""
    capability = 90
    if card.is_cuda:
        major, minor = torch.cuda.get_device_capability(card.device)
        capability = 10 * major + minor
    tasks = [(name, dtype, capability, card.tiny) for dtype in DTYPES for name in _compiled(card)]
    tasks = tasks[:1] if card.tiny else tasks
    seen = set()
    with ProcessPoolExecutor(min(len(tasks), os.cpu_count() or 1), get_context("spawn")) as pool:
        for task in as_completed([pool.submit(_compile, *task) for task in tasks]):
            for record in task.result():
                if record.get("hash", record) not in seen:
                    seen.add(record.get("hash"))
                    yield record


def _compiled(card: Card) -> dict[str, ModelConfig]:
    """Every architecture for which an engine is made, in the order of their figures."""
    whole = {name: GEOMETRIES[name] for name in ("mini", "flagship", "seed", "nano")}
    return _measured(card) if card.tiny else whole | parity_cases(card)


def _compile(name: str, dtype: torch.dtype, capability: int, small: bool) -> list[Record]:
    from loadtest.gpu.build import compiled

    config = _compiled(Card(torch.device("cpu"), tiny=small))[name]
    start = time.perf_counter()
    try:
        records: list[Record] = [
            {"case": name, "kernel": kernel.name, "dtype": str(dtype), "hash": kernel.binary.hash, **kernel.usage()}
            for kernel in compiled(config, dtype, capability)
        ]
    except Exception as error:
        records = [{"case": name, "dtype": str(dtype), "problem": f"does not compile: {error}"[:500]}]
    return [record | {"seconds_of_case": round(time.perf_counter() - start, 2)} for record in records]


def starts(card: Card, geometry: str) -> Iterator[Record]:
    """Seconds until an engine is ready, with an empty compiler cache and with that of the first start."""
    for name in _measured(card) if card.tiny else ("mini", "flagship"):
        with TemporaryDirectory() as cache:
            for how in ("cold", "warm"):
                with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                    seconds = pool.submit(_start, name, cache, card.device.type, card.tiny).result()
                yield line(f"{name}: seconds until an engine is ready, {how}", seconds, "s")


def _start(name: str, cache: str, device: str, small: bool) -> float:
    os.environ["TRITON_CACHE_DIR"] = cache
    card = Card(torch.device(device), tiny=small)
    ranker = random_ranker(_measured(card)[name], device=card.device)
    begin = time.perf_counter()
    make_engine(ranker, card)
    return time.perf_counter() - begin


def kernels(card: Card, geometry: str) -> Iterator[Record]:
    """Every operation of a forward against its plain form, for every variant. Goes on after a failure."""
    for name, config in parity_cases(card).items():
        for dtype in DTYPES:
            record: Record = {"case": name, "dtype": str(dtype)}
            try:
                watched = watch(card, config, dtype)
            except Exception as error:
                yield record | {"problem": f"{type(error).__name__}: {error}"[:500]}
                continue
            yield record | {"operations": watched.calls, "different": len(watched.differences)}
            yield from (
                record | {"problem": str(difference)} | difference.as_dict() for difference in watched.differences[:1]
            )


def parities(card: Card, geometry: str) -> Iterator[Record]:
    """Whole forwards against the dense definition, including the real geometries with two layers."""
    for name, config in parity_cases(card).items():
        for dtype in DTYPES:
            record: Record = {"case": name, "dtype": str(dtype)}
            try:
                yield record | {"difference": parity(card, config, dtype)}
            except Exception as error:
                yield record | {"problem": f"{type(error).__name__}: {error}"[:500]}


def bits(card: Card, geometry: str) -> Iterator[Record]:
    """Random compositions against each candidate alone. If bits differ, again with torch's kernels."""
    hang(card.fault, "bits")
    config = check_config(width=64, layers=1, head_width=16) if card.tiny else GEOMETRIES["mini"]
    ranker = random_ranker(config, device=card.device)
    count = 3 if card.tiny else 100
    try:
        yield equal_bits(make_engine(ranker, card, cache_bytes=2**26), count)
    except Exception as error:
        yield {"problem": f"{type(error).__name__}: {error}"[:500]}
        engine = SplitEngine(ranker, card.device, torch.bfloat16, cache_bytes=2**26, kernels="torch")
        try:
            engine.warm_up()
            yield {"with": "torch's kernels", **equal_bits(engine, count)}
        except Exception as again:
            yield {"with": "torch's kernels", "still": f"{type(again).__name__}: {again}"[:300]}


def kernel_times(card: Card, geometry: str) -> Iterator[Record]:
    """Microseconds and launches of each kernel in one request's forward, cold and cached, the longest first."""
    for name, config in _measured(card).items():
        engine = make_engine(random_ranker(config, device=card.device), card)
        item = Item(*random_request(config, config.history_length, 24 if card.tiny else 64))
        cached = Item(item.context, item.candidates, engine.forward([item])[0].state)
        for kind, request in (("cold", item), ("cached", cached)):
            seen = card.operations(lambda request=request, engine=engine: engine.forward([request]))  # type: ignore[misc]
            for operation, (us, calls) in sorted(seen.items(), key=lambda timed: -timed[1][0])[:12]:
                yield {"geometry": name, "kind": kind, "operation": operation, "us": round(us, 2), "calls": calls}


def engine_rows(card: Card, geometry: str) -> Iterator[Record]:
    """Device and wall time of whole forwards of one geometry, against the targets."""
    measured = Geometry(geometry, card, card.ceilings())
    yield {"engine": measured.engine.info.notes}
    yield from measured.rows()


def peer_rows(card: Card, geometry: str) -> Iterator[Record]:
    """Times of the peers that compute the same on this card."""
    yield from Geometry(geometry, card, card.ceilings()).peer_rows()


def bisect(card: Card, geometry: str) -> Iterator[Record]:
    """After a failure, with blocking launches: find the first operation that fails or differs, trying the smallest case first."""
    for config in (check_config(width=64, layers=2, head_width=32), *parity_cases(card).values()):
        for dtype in DTYPES:
            try:
                differences = watch(card, config, dtype).differences
            except Exception as error:
                yield {"problem": f"{type(error).__name__}: {error}"[:500], "width": config.width}
                return
            if differences:
                yield {"problem": str(differences[0]), "width": config.width, **differences[0].as_dict()}
                return
    yield {"nothing_found": True}


def _measured(card: Card) -> dict[str, ModelConfig]:
    return {"mini": tiny(GEOMETRIES["mini"])} if card.tiny else GEOMETRIES


def all_phases(geometries: Sequence[str]) -> dict[str, Phase]:
    """The phases in the order in which they run. The most wanted figures come within 540 seconds at most; peers come last."""
    rows = {name: Phase(engine_rows, 150, name) for name in geometries}
    first = [name for name in ("mini", "flagship") if name in rows]
    phases = {"environment": Phase(environment, 40), "compile": Phase(compile_all, 200)}
    phases |= {f"rows {name}": rows[name] for name in first}
    phases |= {
        "kernels": Phase(kernels, 240), "parity": Phase(parities, 240), "bits": Phase(bits, 120),
        "kernel_times": Phase(kernel_times, 120), "starts": Phase(starts, 120),
    }  # fmt: skip
    phases |= {f"rows {name}": rows[name] for name in geometries if name not in first}
    return phases | {f"peers {name}": Phase(peer_rows, 120, name) for name in geometries}


BISECT = Phase(bisect, 120)
