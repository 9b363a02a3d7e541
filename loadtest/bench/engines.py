"""Engine rows of the table: ours against the dense eager reference and the bare matrix products, in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from loadtest.bench.table import Row
from loadtest.bits import run as run_compositions
from loadtest.bits import small_config
from loadtest.geometries import GEOMETRIES, in_dtype
from loadtest.timing import Figure, alternate, ratio
from model.config import ModelConfig
from model.create import EngineOptions, create_engine
from model.dense import DenseEngine
from model.engine import Engine, Item
from model.native.build import Vectors
from model.native.engine import NativeEngine
from model.presets import PRESETS, with_preset
from model.split.engine import SplitEngine
from model.synthetic import random_ranker, random_request

CACHE_BYTES = 2**28
SHAPES = ("mini", "nano")
NARROWER_COSTS = 2.6  # the registers hold half, the clock is the same
SPEED_TARGETS = {("mini", 64): (4, 8), ("mini", 512): (9, 12), ("nano", 64): (3, 16), ("nano", 512): (6, 18)}


def item_of(config: ModelConfig, candidates: int, history: int | None = None) -> Item:
    """A request with a full history, or one of the given length."""
    return Item(*random_request(config, config.history_length if history is None else history, candidates, seed=7))


def speed_rows(dtype: torch.dtype, rounds: int, vectors: Vectors = "auto") -> Iterator[Row]:
    """Cold (no cache) and cached forwards of one request against the dense definition, same dtype and threads."""
    for name in SHAPES:
        config = GEOMETRIES[name]
        ranker = random_ranker(config)
        cold, cached = (NativeEngine(ranker, dtype, cache_bytes=kept, vectors=vectors) for kept in (0, CACHE_BYTES))
        dense = DenseEngine(in_dtype(random_ranker(config), dtype), dtype)
        for candidates in (64, 512):
            item = item_of(config, candidates)
            sides = {
                side: _forward(engine, item) for side, engine in (("dense", dense), ("cold", cold), ("cached", cached))
            }
            seconds = alternate(sides, rounds, repeats={"cold": 3, "cached": 3})
            for side, target in zip(("cold", "cached"), SPEED_TARGETS[name, candidates], strict=True):
                yield Row(
                    f"{name} C={candidates}, {side}, vs dense eager",
                    ratio(seconds["dense"], seconds[side]),
                    "×",
                    target if vectors == "auto" else 1,  # the others speak of the widest vectors that a processor has
                    at_least=True,
                    ours_ms=1e3 * Figure.of(seconds[side]).median,
                    reference_ms=1e3 * Figure.of(seconds["dense"]).median,
                )


def preset_rows(dtype: torch.dtype, rounds: int) -> Iterator[Row]:
    """Every trunk in the shape of mini, by the engine that `auto` takes for it, against the dense definition."""
    for name in PRESETS:
        ranker = random_ranker(with_preset(GEOMETRIES["mini"], name))
        options = EngineOptions("cpu", "bfloat16" if dtype is torch.bfloat16 else "float32")
        cold, cached = (create_engine(ranker, replace(options, cache_bytes=kept)) for kept in (0, CACHE_BYTES))
        item = item_of(ranker.config, 64)
        seconds = alternate(
            {
                "dense": _forward(DenseEngine(in_dtype(copy.deepcopy(ranker), dtype), dtype), item),
                "cold": _forward(cold, item),
                "cached": _forward(cached, item),
            },
            rounds,
        )
        for side in ("cold", "cached"):
            yield Row(
                f"{name}, mini C=64, {side}, {cold.info.backend}, vs dense eager",
                ratio(seconds["dense"], seconds[side]),
                "×",
                1,
                at_least=True,
                ours_ms=1e3 * Figure.of(seconds[side]).median,
                reference_ms=1e3 * Figure.of(seconds["dense"]).median,
            )
        cold.close()
        cached.close()


def vector_rows(rounds: int, vectors: Vectors) -> Iterator[Row]:
    """Narrower vectors in fp32 against the widest and against the torch engine, which the caller's environment may hold to them."""
    for name in SHAPES:
        ranker = random_ranker(GEOMETRIES[name])
        for side, kept in (("cold", 0), ("cached", CACHE_BYTES)):
            engines: dict[str, Engine] = {
                "ours": NativeEngine(ranker, torch.float32, cache_bytes=kept, vectors=vectors),
                "widest": NativeEngine(ranker, torch.float32, cache_bytes=kept),
                "torch": SplitEngine(ranker, "cpu", torch.float32, cache_bytes=kept),
            }
            for candidates in (64, 512):
                item = item_of(ranker.config, candidates)
                seconds = alternate(
                    {who: _forward(engine, item) for who, engine in engines.items()},
                    rounds,
                    repeats={"ours": 3, "widest": 3},
                )
                milliseconds = {who: 1e3 * Figure.of(seconds[who]).median for who in engines}
                what = f"{name} C={candidates}, {side}, fp32: {vectors}"
                widest = engines["widest"].info.notes["vectors"]
                yield Row(f"{what} vs {widest}", ratio(seconds["ours"], seconds["widest"]), "×", NARROWER_COSTS,
                          at_least=False, ours_ms=milliseconds["ours"], reference_ms=milliseconds["widest"])  # fmt: skip
                yield Row(f"{what} vs torch engine", ratio(seconds["torch"], seconds["ours"]), "×", 1,
                          at_least=True, ours_ms=milliseconds["ours"], reference_ms=milliseconds["torch"])  # fmt: skip
            for engine in engines.values():
                engine.close()


def product_rows(dtype: torch.dtype, rounds: int, vectors: Vectors = "auto") -> Iterator[Row]:
    """The cold forward of nano against its layers' matrix products alone, as torch runs them."""
    config = GEOMETRIES["nano"]
    engine = NativeEngine(random_ranker(config), dtype, vectors=vectors)
    for candidates in (64, 512):
        products = bare_products(config, 1 + config.history_length + candidates, dtype)
        sides = {"ours": _forward(engine, item_of(config, candidates)), "products": products}
        seconds = alternate(sides, rounds)
        yield Row(
            f"nano C={candidates}, cold, vs its layers' bare GEMMs",
            ratio(seconds["ours"], seconds["products"]),
            "×",
            2.0,
            at_least=False,
            ours_ms=1e3 * Figure.of(seconds["ours"]).median,
            reference_ms=1e3 * Figure.of(seconds["products"]).median,
        )


def bare_products(config: ModelConfig, rows: int, dtype: torch.dtype) -> Callable[[], object]:
    """The products of every layer for that many rows: no attention, no norms, no tokens, nothing pruned."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = config.query_heads * config.head_width, config.kv_heads * config.head_width
    shapes = (
        (config.width, queries + 2 * keys),
        (queries, config.width),
        (config.width, 2 * config.ffn_width),
        (config.ffn_width, config.width),
    )
    pairs = [
        (torch.randn(rows, depth, generator=generator).to(dtype), torch.randn(depth, columns, generator=generator).to(dtype))
        for _ in range(config.layers)
        for depth, columns in shapes
    ]  # fmt: skip

    @torch.inference_mode()
    def run() -> None:
        for a, b in pairs:
            a @ b

    return run


def growth_row(dtype: torch.dtype, rounds: int, vectors: Vectors = "auto") -> Row:
    """The worst doubling of the time as C doubles from 64 to 2048, mini, cached."""
    config = GEOMETRIES["mini"]
    engine = NativeEngine(random_ranker(config), dtype, cache_bytes=CACHE_BYTES, vectors=vectors)
    counts = [64 << power for power in range(6)]
    sides = {str(count): _forward(engine, item_of(config, count)) for count in counts}
    seconds = alternate(sides, rounds)
    steps = [ratio(seconds[str(2 * count)], seconds[str(count)]) for count in counts[:-1]]
    return Row("C doubled, 64 → 2048: worst step", max(steps, key=lambda step: step.median), "×", 2.1, at_least=False)


def bits_row(compositions: int, vectors: Vectors = "auto") -> Row:
    """Candidates whose bits change with batch mates, order, parts or cache state."""
    ranker = random_ranker(small_config())
    different = 0
    for dtype in (torch.float32, torch.bfloat16):

        def make(cache_bytes: int, dtype: torch.dtype = dtype) -> Engine:
            return NativeEngine(ranker, dtype, cache_bytes=cache_bytes, vectors=vectors)

        different += run_compositions(make, compositions // 2).different
    return Row(
        f"candidates with other bits, {compositions} compositions", Figure.of([different]), "", 0, at_least=False
    )


def _forward(engine: Engine, item: Item) -> Callable[[], object]:
    return lambda: engine.forward([item])
