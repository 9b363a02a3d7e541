"""The phases of the GPU bench: each yields records, plain JSON values, and runs in a process of its own. See `__main__` for their order."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from loadtest.geometries import GEOMETRIES
from loadtest.gpu.card import Card, Ceilings
from loadtest.gpu.checks import equal_bits, make_engine, parity, parity_cases, parity_items, small_config, watch
from loadtest.gpu.faults import hang
from loadtest.gpu.table import BATCH_REQUESTS, Geometry, Row, tiny
from loadtest.gpu.watch import WRITTEN
from loadtest.timing import Figure
from model.config import ModelConfig
from model.engine import Item
from model.split.kernels.contract import Kernels, Unfused
from model.split.row_check import rows_are_independent, shape_name
from model.split.step import CANDIDATES, ROWS, host_arrays, plan_steps, step_bytes
from model.split.write import StepWriter
from model.synthetic import random_ranker, random_request

Record = dict[str, Any]
DTYPES = (torch.bfloat16, torch.float32)
HOST_TARGET_MS = 0.5
# what a search for differing bits does without, each on top of the one before
LEFT_OUT: dict[str, dict[str, Any]] = {
    "dependent launches": {"dependent": False},
    "fused products": {"dependent": False, "fuse": False},
    "library products": {"dependent": False, "fuse": False, "library": False},
    "graphs": {"dependent": False, "fuse": False, "library": False, "replay": False},
    "Triton": {"kernels": "portable"},
}


@dataclass(frozen=True, slots=True)
class Phase:
    """What runs, and the most seconds that it may take."""

    run: Callable[[Card, str], Iterator[Record]]
    seconds: float
    geometry: str = ""


def environment(card: Card, geometry: str) -> Iterator[Record]:
    """Driver and clocks, what the card can do, and what a node of a graph costs."""
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
    """Compile what will be launched, in many processes, and read what each kernel takes; a kernel that fails is a record."""
    capability = 90
    if card.is_cuda:
        major, minor = torch.cuda.get_device_capability(card.device)
        capability = 10 * major + minor
    launches = _launches(card.tiny)
    with ProcessPoolExecutor(1 if card.tiny else min(16, os.cpu_count() or 1), get_context("spawn")) as pool:
        for each in [pool.submit(_compile, card.tiny, place, capability) for place in range(len(launches))]:
            yield each.result()


@cache
def _launches(small: bool) -> list[Any]:
    """The distinct launches of all measured geometries, the same in every process; a few of them where all is small."""
    from model.split.kernels.build import collect, distinct

    configs = [tiny(GEOMETRIES["mini"])] if small else list(GEOMETRIES.values())
    found = distinct([each for config in configs for dtype in DTYPES for each in collect(config, dtype)])
    return [each for each in found if each.kernel.fn.__name__ in ("gate_rows", "norm_rows")][:4] if small else found


def _compile(small: bool, place: int, capability: int) -> Record:
    from triton.backends.compiler import GPUTarget

    from model.split.kernels.build import compile_launch, describe

    launch = _launches(small)[place]
    start = time.perf_counter()
    try:
        described = describe(launch, compile_launch(launch, GPUTarget("cuda", capability, 32)))
    except Exception as error:
        return {"kernel": launch.kernel.fn.__name__, "problem": f"does not compile: {error}"[:500]}
    return described | {"seconds": round(time.perf_counter() - start, 2)}


def kernels(card: Card, geometry: str) -> Iterator[Record]:
    """Every operation of a forward against its plain form, every variant, going on after a failure."""
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
    """Matrix products by shape, rows and kind: are they repeatable, do they give the reference's bits, how fast are they?"""
    hang(card.fault, "products")
    for name, config in _measured(card).items():
        engine = make_engine(random_ranker(config).to(card.device), card, warm=False)
        for weight in engine._trunk.linear_weights():
            if weight.dtype == torch.bfloat16:
                for rows in _product_rows(card):
                    yield from _product_records(card, engine._kernels, weight, rows, name)
        yield from fused_records(card, engine._kernels, engine._trunk.fusable_weights(), name)


def _product_rows(card: Card) -> tuple[int, ...]:
    return (64, 128) if card.tiny else (64, 256, 1024, 1537, 2048)


def fused_records(card: Card, kernels: Any, weights: Mapping[str, Tensor], name: str) -> Iterator[Record]:
    """Products that go on with the gate or RoPE, beside separate kernels; nothing where the engine has none."""
    if not hasattr(kernels, "fusion"):
        return
    from model.split.kernels.fusion import SEPARATE, Trial, fused_kinds

    for part, weight in weights.items():
        for rows in _product_rows(card):
            trial = Trial(kernels.config, kernels, part, weight, rows)
            for kind in (SEPARATE, *fused_kinds(part, rows, weight)):
                record = {"geometry": name, "part": part, "shape": shape_name(weight), "rows": rows, "kind": kind}
                record["equal_bits"] = kernels.fusion.is_equal(trial, kind)
                yield record | {"us": 1e3 * card.device_time(trial.run, 10).median}


def _product_records(card: Card, kernels: Kernels, weight: Tensor, rows: int, name: str) -> Iterator[Record]:
    from model.split.kernels.products import LIBRARY, PRODUCT_TILES, REFERENCE

    counts = torch.full((8,), rows, dtype=torch.int32, device=card.device)
    shared = {"geometry": name, "shape": shape_name(weight), "rows": rows}
    own = getattr(kernels, "products", None)

    def product(kind: str) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            out = torch.full((len(x), weight.shape[1]), torch.nan, dtype=weight.dtype, device=card.device)
            if kind == LIBRARY:
                torch.mm(x, weight, out=out)
            elif own is not None:
                own.multiply_as(kind, counts, ROWS, x, weight, out, len(x))
            else:
                kernels.multiply(None, x, weight, out, len(x))  # type: ignore[arg-type]
            return out

        return run

    reference = product(REFERENCE)
    x = torch.randn(rows, weight.shape[0], device=card.device).to(weight.dtype)
    flops = 2.0 * rows * weight.numel()
    for kind in (*PRODUCT_TILES, LIBRARY):
        run = product(kind)
        first, again, expected = run(x), run(x), x.float() @ weight.float()
        record = shared | {"kind": kind, "repeatable": torch.equal(first, again)}
        record["difference"] = float((first.float() - expected).abs().max())
        record["equal_bits"] = rows_are_independent(run, reference, rows, weight.shape[0], weight)
        record["tflops"] = flops / card.device_time(lambda run=run: run(x), 10).median / 1e9  # type: ignore[misc]
        if not record["repeatable"]:
            record["problem"] = f"product {kind} of {rows} rows with {shared['shape']} gives other bits every time"
        yield record


def parities(card: Card, geometry: str) -> Iterator[Record]:
    """Whole forwards against the dense definition, the real geometries with two layers included."""
    for name, config in parity_cases(card).items():
        for dtype in DTYPES:
            record: Record = {"case": name, "dtype": str(dtype)}
            try:
                yield record | {"difference": parity(card, config, dtype)}
            except Exception as error:
                yield record | {"problem": f"{type(error).__name__}: {error}"[:500]}


def bits(card: Card, geometry: str) -> Iterator[Record]:
    """Random compositions against each candidate alone; where they differ, without what it stops."""
    from model.split.engine import SplitEngine
    from model.split.graphs import PlainRecorder

    config = small_config(width=64, layers=1, head_width=16) if card.tiny else GEOMETRIES["mini"]
    ranker = random_ranker(config).to(card.device)
    count = 3 if card.tiny else 100
    try:
        yield equal_bits(make_engine(ranker, card, cache_bytes=2**26), count)
    except Exception as error:
        yield {"problem": f"{type(error).__name__}: {error}"[:500]}
        recorder = {} if card.is_cuda else {"recorder": PlainRecorder(), "capacity": 256}
        for left_out, options in LEFT_OUT.items():
            engine = SplitEngine(ranker, card.device, torch.bfloat16, cache_bytes=2**26, **recorder, **options)  # type: ignore[arg-type]
            try:
                engine.warm_up()
                yield {"without": left_out, **equal_bits(engine, count)}
            except Exception as again:
                yield {"without": left_out, "still": f"{type(again).__name__}: {again}"[:300]}


class TimedKernels(Unfused):
    """Notes how long each operation of a forward takes by itself, and the bytes of what it is given."""

    def __init__(self, kernels: Kernels, card: Card) -> None:
        self.seen: dict[tuple[str, int], Record] = {}
        self.key_tile = kernels.key_tile
        self._kernels, self._card = kernels, card

    def __getattr__(self, name: str) -> Any:
        if name not in WRITTEN:
            return getattr(self._kernels, name)

        def timed(*arguments: Any, **options: Any) -> None:
            step = arguments[0]
            rows = int(step.host.counts[CANDIDATES if options.get("tail") else ROWS])
            operation = getattr(self._kernels, name)
            figure = self._card.device_time(lambda: operation(*arguments, **options), 5)
            moved = sum(each[:rows].nbytes for each in arguments if isinstance(each, Tensor))
            flops = 2.0 * rows * arguments[2].numel() if name == "multiply" else 0.0
            entry = self.seen.setdefault((name, rows), {"calls": 0, "us": 0.0, "bytes": 0, "flops": 0.0})
            for key, more in (("calls", 1), ("us", 1e3 * figure.median), ("bytes", moved), ("flops", flops)):
                entry[key] += more

        return timed


def kernel_times(card: Card, geometry: str) -> Iterator[Record]:
    """Microseconds of each operation over one forward, beside what its bytes and products take at the card's ceilings."""
    ceilings = card.ceilings()
    for name, config in _measured(card).items():
        engine = make_engine(random_ranker(config).to(card.device), card, warm=False)
        timed = TimedKernels(engine._kernels, card)
        engine.run_through(timed, parity_items(config)[4:5])
        for (operation, rows), entry in timed.seen.items():
            bandwidth, rate = 1e3 * ceilings.gigabytes_per_second, 1e6 * ceilings.tflops  # of a microsecond
            floor = max(entry.pop("bytes") / bandwidth, entry.pop("flops") / rate)
            yield {"geometry": name, "operation": operation, "rows": rows, "floor_us": floor, **entry}


def host(card: Card, geometry: str) -> Iterator[Record]:
    """Processor time of one thread to fill the arrays of a step of many requests, and to plan it, beside what it is allowed."""
    config = _measured(card)["mini"]
    requests = 3 if card.tiny else BATCH_REQUESTS
    engine = make_engine(random_ranker(config).to(card.device), card, warm=False)
    items = [Item(*random_request(config, config.history_length, 64, seed)) for seed in range(requests)]
    works, capacity = [], 2**15
    for number, item in enumerate(items):
        context, state, _ = engine._context_of(item, {})
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
            yield Row(label, figure.median, "ms", figure.low, figure.high, target, met).as_dict()


def _thread_ms(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - start)


def engine_rows(card: Card, geometry: str) -> Iterator[Record]:
    """Whole forwards of one geometry, device and wall time, beside the targets."""
    measured = Geometry(geometry, card, _ceilings(card))
    yield {"engine": {name: note for name, note in measured.engine.info.notes.items() if name != "products"}}
    for row in measured.rows():
        yield row.as_dict()


def peer_rows(card: Card, geometry: str) -> Iterator[Record]:
    """The dense definition and FlexAttention on the same work."""
    for row in Geometry(geometry, card, _ceilings(card)).peer_rows():
        yield row.as_dict()


def bisect(card: Card, geometry: str) -> Iterator[Record]:
    """After a failure, with launches that block: the first operation that fails or differs, on the smallest case first."""
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


def _ceilings(card: Card) -> Ceilings:
    return card.ceilings()


def all_phases(geometries: Sequence[str]) -> dict[str, Phase]:
    """In the order in which they run; peers last."""
    found = {
        "environment": Phase(environment, 60),
        "compile": Phase(compile_all, 240),
        "kernels": Phase(kernels, 240),
        "products": Phase(products, 240),
        "parity": Phase(parities, 240),
        "bits": Phase(bits, 120),
        "kernel_times": Phase(kernel_times, 180),
        "host": Phase(host, 60),
    }
    found |= {f"rows {name}": Phase(engine_rows, 150, name) for name in geometries}
    return found | {f"peers {name}": Phase(peer_rows, 120, name) for name in geometries}


BISECT = Phase(bisect, 120)
