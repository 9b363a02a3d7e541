"""The phases of the GPU bench. Each yields records (plain JSON values) and runs in a separate process. Order: `all_phases`."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import Any

import torch

from loadtest.geometries import GEOMETRIES
from loadtest.gpu.card import Card
from loadtest.gpu.checks import equal_bits, make_engine, parity, parity_cases, small_config, watch
from loadtest.gpu.faults import hang
from loadtest.gpu.table import BATCH_REQUESTS, Geometry, Record, line, tiny
from loadtest.timing import Figure
from model.config import ModelConfig
from model.engine import Item
from model.split.buckets import row_sizes
from model.split.engine import SplitEngine, default_capacity
from model.split.graphs import PlainRecorder, no_garbage
from model.split.kernels.contract import Part
from model.split.step import StepPlan, host_arrays, plan_steps, step_bytes
from model.split.write import StepWriter
from model.synthetic import random_ranker, random_request

DTYPES = (torch.bfloat16, torch.float32)
HOST_TARGET_MS = 0.5


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
        asked = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, check=False
        )
        yield {
            "nvidia_smi": asked.stdout.strip() or asked.stderr.strip(),
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
    from model.split.kernels.build import compiled, describe

    config = _compiled(Card(torch.device("cpu"), tiny=small))[name]
    start, found, ready = time.perf_counter(), list[Record](), []
    for each in compiled(config, dtype, capability, names=("gate_rows", "norm_rows") if small else None):
        try:
            ready.append((each.kernel.hash, each))
        except Exception as error:
            found.append({"case": name, "kernel": each.name, "problem": f"does not compile: {error}"[:500]})
    try:
        told = describe([each for _, each in ready])
        found += [{"case": name, "hash": of} | record for (of, _), record in zip(ready, told, strict=True)]
    except Exception as error:
        found.append({"case": name, "problem": f"compiles, but cannot be read: {error}"[:500]})
    return [record | {"seconds_of_case": round(time.perf_counter() - start, 2)} for record in found]


def starts(card: Card, geometry: str) -> Iterator[Record]:
    """Seconds until an engine is ready, with an empty compiler cache and with that of the first start. Without a card, counts instead:
    binaries for Hopper and the processor time to make them, device times to be read, sizes to be recorded."""
    for name in _measured(card) if card.tiny else ("mini", "flagship"):
        with TemporaryDirectory() as cache:
            for how in ("cold", "warm"):
                with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                    seen = pool.submit(_start, name, cache, card.device.type, card.tiny).result()
                yield {"geometry": name, "start": how} | seen


def _start(name: str, cache: str, device: str, small: bool) -> Record:
    os.environ["TRITON_CACHE_DIR"] = cache
    os.environ.pop("TRITON_INTERPRET", None)  # count compiled kernels, even if the caller uses the interpreter
    card = Card(torch.device(device), tiny=small)
    config = _measured(card)[name]
    if card.is_cuda:
        engine = make_engine(random_ranker(config, device=card.device), card, warm=False)
        begin = time.perf_counter()
        engine.warm_up()
        return {"seconds": time.perf_counter() - begin, "kinds": engine.info.notes["products"]["how"]}
    from model.split.kernels.build import compiled, readings

    counted = {"readings": readings(config, 90), "sizes": len(row_sizes(default_capacity(config)))}
    begin = sum(os.times()[:4])
    hashes = {
        each.kernel.hash for each in compiled(config, torch.bfloat16, 90, names=("gate_rows",) if small else None)
    }
    return {"binaries": len(hashes), "processor_seconds": round(sum(os.times()[:4]) - begin, 2)} | counted


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
            yield record | {"operations": watched.calls, "different": len(watched.found)}
            yield from (record | {"problem": str(each)} | each.as_dict() for each in watched.found[:1])


def products(card: Card, geometry: str) -> Iterator[Record]:
    """Every operation by rows and kind: whether its bits equal the reference's and repeat, microseconds, TFLOP/s."""
    hang(card.fault, "products")
    for name, config in _measured(card).items():
        engine = make_engine(random_ranker(config, device=card.device), card, warm=False)
        for rows in (64, 128) if card.tiny else (64, 256, 1024, 1536):
            for part in _parts(engine, engine._trial(rows), rows):
                yield from kind_records(card, engine, part, name)


def kind_records(card: Card, engine: SplitEngine, part: Part, geometry: str) -> Iterator[Record]:
    """Records of one operation, one per kind of its kernels. Torch's kernels have only the reference."""
    choices: Any = getattr(engine._kernels, "choices", None)
    for kind in ("64x64", *(choices.kinds(part) if choices else ())):
        record: Record = {"geometry": geometry, "operation": part.name, "rows": part.rows, "kind": kind}
        with engine._on_device(), no_garbage(), torch.inference_mode():
            if choices:
                choices.chosen[part.name, part.rows] = kind
                record["equal_bits"] = choices.is_equal(part, kind)
            part.run(0)
            first = [each.clone() for each in part.outputs]
            part.run(0)
            again = part.name == "norm" or all(map(torch.equal, first, part.outputs))  # norms add to the residual
            record["us"] = 1e6 * card.seconds_on_device(part.run, part.layers)
        record["tflops"] = 2e-6 * part.rows * sum(each.numel() for each in part.weights[:1]) / record["us"]
        if not again:
            record["problem"] = f"{part.name} of {part.rows} rows as {kind} gives other bits every time"
        yield record
    if choices:
        choices.chosen.clear()


def _parts(engine: SplitEngine, plan: StepPlan, rows: int) -> list[Part]:
    """The operations of a step, with random inputs."""
    with engine._on_device(), torch.inference_mode():
        runner: Any = engine._runner
        parts = engine._trunk.parts(runner._written(plan).at(rows))
        for x in (x for each in parts for x in each.inputs):
            x.normal_()
    return parts


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
    """Random compositions against each candidate alone. If bits differ, again without choices, overlap and graphs."""
    config = small_config(width=64, layers=1, head_width=16) if card.tiny else GEOMETRIES["mini"]
    ranker = random_ranker(config, device=card.device)
    count = 3 if card.tiny else 100
    try:
        yield equal_bits(make_engine(ranker, card, cache_bytes=2**26), count)
    except Exception as error:
        yield {"problem": f"{type(error).__name__}: {error}"[:500]}
        recorder = {} if card.is_cuda else {"recorder": PlainRecorder(), "capacity": 256}
        engine = SplitEngine(ranker, card.device, torch.bfloat16, cache_bytes=2**26, plain=True, **recorder)  # type: ignore[arg-type]
        try:
            engine.warm_up()
            yield {"without": "choices, overlap and graphs", **equal_bits(engine, count)}
        except Exception as again:
            yield {"without": "choices, overlap and graphs", "still": f"{type(again).__name__}: {again}"[:300]}


def kernel_times(card: Card, geometry: str) -> Iterator[Record]:
    """Microseconds of each operation of one real request, cold and cached, and the least time that its bytes and products take at the
    card's ceilings. All bytes of a weight count, whatever the rows."""
    ceilings = card.ceilings()
    for name, config in _measured(card).items():
        engine = make_engine(random_ranker(config, device=card.device), card, warm=False)
        item = Item(*random_request(config, config.history_length, 24 if card.tiny else 64))
        context, (state, *_) = engine._context_of(item, {})
        for kind, asked in (("cold", context), ("cached", None)):
            (plan,) = plan_steps([(asked, 0, item.candidates, state)], engine._capacity)
            rows = -(-plan.rows // 64) * 64
            for part in _parts(engine, plan, rows):
                moved = sum(each.nbytes for each in (*part.weights[:1], *part.inputs, *part.outputs))
                if part.name == "attend":  # states hold all layers
                    moved = sum(each.nbytes for each in (*part.inputs[:2], *part.outputs))
                    moved += sum(each.nbytes for each in part.inputs[2:]) // config.layers
                flops = 2.0 * rows * sum(each.numel() for each in part.weights[:1])
                floor = max(moved / ceilings.gigabytes_per_second / 1e3, flops / ceilings.tflops / 1e6)
                with engine._on_device(), no_garbage(), torch.inference_mode():
                    seconds = card.seconds_on_device(part.run, part.layers)
                yield {
                    "geometry": name, "operation": part.name, "rows": rows, "kind": kind, "layers": part.layers,
                    "floor_us": floor, "us": 1e6 * seconds,
                }  # fmt: skip


def host(card: Card, geometry: str) -> Iterator[Record]:
    """Processor time of one thread to plan a step of many requests and to fill its arrays, against the target."""
    config = _measured(card)["mini"]
    requests = 3 if card.tiny else BATCH_REQUESTS
    engine = make_engine(random_ranker(config, device=card.device), card, warm=False)
    items = [Item(*random_request(config, config.history_length, 64, seed)) for seed in range(requests)]
    works, capacity = [], 2**15
    for number, item in enumerate(items):
        context, (state, *_) = engine._context_of(item, {})
        works.append((context, number, item.candidates, state))
    writer = StepWriter(config, "shared", engine._trunk.mixed)
    arrays = host_arrays(torch.zeros(step_bytes(config, capacity), dtype=torch.uint8), config, capacity)
    for kind, asked in (("cold", works), ("cached", [(None, *work[1:]) for work in works])):
        (plan,) = plan_steps(asked, capacity)
        for name, step in (
            ("fill", partial(writer.write, plan, arrays)),
            ("plan", partial(plan_steps, asked, capacity)),
        ):
            label = f"{requests} mini requests, {kind}: {name} a step"
            figure = Figure.of([_thread_ms(step) for _ in range(3 if card.tiny else 300)])
            target = HOST_TARGET_MS if name == "fill" and not card.tiny else None
            met = None if target is None else figure.median <= target
            yield line(label, figure.median, "ms", low=figure.low, high=figure.high, target=target, met=met)


def _thread_ms(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - start)


def engine_rows(card: Card, geometry: str) -> Iterator[Record]:
    """Device and wall time of whole forwards of one geometry, against the targets."""
    measured = Geometry(geometry, card, card.ceilings())
    yield {"engine": {name: note for name, note in measured.engine.info.notes.items() if name != "products"}}
    yield from measured.rows()


def peer_rows(card: Card, geometry: str) -> Iterator[Record]:
    """Times of the peers that compute the same on this card."""
    yield from Geometry(geometry, card, card.ceilings()).peer_rows()


def bisect(card: Card, geometry: str) -> Iterator[Record]:
    """After a failure, with blocking launches: find the first operation that fails or differs, trying the smallest case first."""
    for config in (small_config(width=64, layers=2, head_width=32), *parity_cases(card).values()):
        for dtype in DTYPES:
            try:
                found = watch(card, config, dtype).found
            except Exception as error:
                yield {"problem": f"{type(error).__name__}: {error}"[:500], "width": config.width}
                return
            if found:
                yield {"problem": str(found[0]), "width": config.width, **found[0].as_dict()}
                return
    yield {"nothing_found": True}


def _measured(card: Card) -> dict[str, ModelConfig]:
    return {"mini": tiny(GEOMETRIES["mini"])} if card.tiny else GEOMETRIES


def all_phases(geometries: Sequence[str]) -> dict[str, Phase]:
    """The phases in the order in which they run. The most wanted figures come within 540 seconds at most; peers come last."""
    rows = {name: Phase(engine_rows, 150, name) for name in geometries}
    first = [name for name in ("mini", "flagship") if name in rows]
    found = {"environment": Phase(environment, 40), "compile": Phase(compile_all, 200)}
    found |= {f"rows {name}": rows[name] for name in first}
    found |= {
        "kernels": Phase(kernels, 240), "parity": Phase(parities, 240), "products": Phase(products, 240),
        "bits": Phase(bits, 120), "kernel_times": Phase(kernel_times, 120), "host": Phase(host, 60), "starts": Phase(starts, 120),
    }  # fmt: skip
    found |= {f"rows {name}": rows[name] for name in geometries if name not in first}
    return found | {f"peers {name}": Phase(peer_rows, 120, name) for name in geometries}


BISECT = Phase(bisect, 120)
