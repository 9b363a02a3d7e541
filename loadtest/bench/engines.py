"""Engine rows of the targets table: our engine against the dense eager reference and bare matrix products, in one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch

from loadtest import bits
from loadtest.bits import small_config
from loadtest.geometries import GEOMETRIES, in_dtype
from loadtest.matrix import Row
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
NARROWER_COSTS = 2.6  # registers are half as wide, at the same clock rate
SPEED_TARGETS = {("mini", 64): (4, 8), ("mini", 512): (9, 12), ("nano", 64): (3, 16), ("nano", 512): (6, 18)}
LIMIT_TARGETS = {("mini", 64, "cold"): 0.55, ("mini", 512, "cold"): 0.68, ("mini", 512, "cached"): 0.75}  # in fp32
PRODUCT = 1024  # rows, depth and columns of a product that runs as fast as this processor can
THRICE = {"cold": 3, "cached": 3, "ours": 3, "widest": 3}  # quick sides run three times per round


def engine_rows(dtype: torch.dtype, rounds: int, compositions: int, vectors: Vectors) -> Iterator[Row]:
    """All engine rows. With narrower `vectors`, presets are left out and our widest vectors are a reference too."""
    if vectors != "auto":
        yield from vector_rows(rounds, vectors)
    yield from speed_rows(dtype, rounds, vectors)
    if vectors == "auto":
        yield from preset_rows(dtype, rounds)
    yield from limit_rows(dtype, rounds, vectors)
    yield from product_rows(dtype, rounds, vectors)
    yield growth_row(dtype, rounds, vectors)
    yield bits_row(compositions, vectors)


def computed_in(vectors: Vectors) -> str:
    """The dtype that our engine chooses by default with these vectors."""
    return NativeEngine(random_ranker(small_config()), vectors=vectors).info.dtype


def item_of(config: ModelConfig, candidates: int) -> Item:
    """A request with a full history."""
    return Item(*random_request(config, config.history_length, candidates, seed=7))


def timed(engines: Mapping[str, Engine], item: Item, rounds: int) -> dict[str, list[float]]:
    """Seconds of each engine's forward of one request, in turns."""
    return alternate(
        {name: partial(engine.forward, [item]) for name, engine in engines.items()}, rounds, repeats=THRICE
    )


def compared(
    what: str, seconds: Mapping[str, list[float]], ours: str, reference: str, target: float, *, faster: bool = True
) -> Row:
    """A row with the reference's time ÷ ours; ours ÷ the reference's unless `faster`."""
    sides = [Figure.of(seconds[side]) for side in (ours, reference)]
    over, under = (reference, ours) if faster else (ours, reference)
    return Row.of(what, ratio(seconds[over], seconds[under]), "×", target, at_least=faster, sides=sides)


def speed_rows(dtype: torch.dtype, rounds: int, vectors: Vectors = "auto") -> Iterator[Row]:
    """Cold (no cache) and cached forwards of one request against the dense definition, with the same dtype and threads."""
    for name in SHAPES:
        config = GEOMETRIES[name]
        ranker = random_ranker(config)
        cold, cached = (NativeEngine(ranker, dtype, cache_bytes=kept, vectors=vectors) for kept in (0, CACHE_BYTES))
        dense = DenseEngine(in_dtype(random_ranker(config), dtype), dtype)
        for candidates in (64, 512):
            seconds = timed({"dense": dense, "cold": cold, "cached": cached}, item_of(config, candidates), rounds)
            for side, widest in zip(("cold", "cached"), SPEED_TARGETS[name, candidates], strict=True):
                target = widest if vectors == "auto" else 1  # the targets assume the processor's widest vectors
                yield compared(f"{name} C={candidates}, {side}, vs dense eager", seconds, side, "dense", target)


def limit_rows(dtype: torch.dtype, rounds: int, vectors: Vectors = "auto") -> Iterator[Row]:
    """How near each forward is to the fastest possible: the operations that isolated ranking needs, at the rate at which torch
    computes a large product with the same dtype and threads, over the time of our forward. The product runs in turns with it.
    Where torch computes bf16 more slowly than fp32, as without instructions for it, the product is in fp32."""
    product = large_product(dtype)
    if dtype is torch.bfloat16:
        seconds = alternate({"bf16": product, "fp32": large_product(torch.float32)}, 3)
        product = product if min(seconds["bf16"]) < min(seconds["fp32"]) else large_product(torch.float32)
    for name in SHAPES:
        config = GEOMETRIES[name]
        ranker = random_ranker(config)
        engines = {
            side: NativeEngine(ranker, dtype, cache_bytes=kept, vectors=vectors)
            for side, kept in (("cold", 0), ("cached", CACHE_BYTES))
        }
        for candidates in (64, 512):
            item = item_of(config, candidates)
            sides: dict[str, Callable[[], object]] = {
                side: partial(engine.forward, [item]) for side, engine in engines.items()
            }
            seconds = alternate(sides | {"product": product}, rounds, repeats=THRICE)
            for side in engines:
                share = needed_operations(config, candidates, cached=side == "cached") / (2 * PRODUCT**3)
                least = [share * one for one in seconds["product"]]
                is_compared = dtype is torch.float32 and vectors == "auto"
                target = LIMIT_TARGETS.get((name, candidates, side), math.inf) if is_compared else math.inf
                figures = [Figure.of(seconds[side]), Figure.of(least)]
                what = f"{name} C={candidates}, {side}, of the rate of a large product"
                yield Row.of(what, ratio(least, seconds[side]), "×", target, at_least=True, sides=figures)
        for engine in engines.values():
            engine.close()


def large_product(dtype: torch.dtype) -> Callable[[], object]:
    """A product of two square matrices in torch."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(PRODUCT, PRODUCT, generator=generator).to(dtype) for _ in range(2))
    return torch.inference_mode()(partial(torch.mm, left, right))


def needed_operations(config: ModelConfig, candidates: int, *, cached: bool) -> float:
    """Multiplications and additions in the matrix products of one request with a full history, none of them in vain.

    A context row attends to what came before it, and in the last layer it is only a key and a value. A candidate attends to the
    context and itself. With a `cached` context only the candidates are computed.
    """
    width, layers, context = config.width, config.layers, 1 + config.history_length
    queries, keys = config.query_heads * config.head_width, config.kv_heads * config.head_width
    key_value, attended = width * 2 * keys, 2 * queries  # multiplications of a row, and of a row with one key
    layer = width * queries + key_value + queries * width + 3 * width * config.ffn_width
    entity = (config.post_hashes.count + config.author_hashes.count) * width * width
    row = entity + layers * (layer + attended * (context + 1)) + width * (config.actions + config.continuous_actions)
    needed = candidates * row
    if not cached:
        tokens = config.user_hashes.count * width * width + config.history_length * entity
        causal = attended * context * (context + 1) // 2
        needed += tokens + (layers - 1) * (context * layer + causal) + context * key_value
    return 2.0 * needed


def preset_rows(dtype: torch.dtype, rounds: int) -> Iterator[Row]:
    """Every trunk in the shape of mini, on the engine that `auto` chooses for it, against the dense definition."""
    for name in PRESETS:
        ranker = random_ranker(with_preset(GEOMETRIES["mini"], name))
        options = EngineOptions("cpu", "bfloat16" if dtype is torch.bfloat16 else "float32")
        engines = {
            "dense": DenseEngine(in_dtype(copy.deepcopy(ranker), dtype), dtype),
            "cold": create_engine(ranker, replace(options, cache_bytes=0)),
            "cached": create_engine(ranker, replace(options, cache_bytes=CACHE_BYTES)),
        }
        seconds, backend = timed(engines, item_of(ranker.config, 64), rounds), engines["cold"].info.backend
        for side in ("cold", "cached"):
            yield compared(f"{name}, mini C=64, {side}, {backend}, vs dense eager", seconds, side, "dense", 1)
            engines[side].close()


def vector_rows(rounds: int, vectors: Vectors) -> Iterator[Row]:
    """Narrower vectors in fp32 against the widest and the torch engine, which the environment may limit to the same vectors."""
    for name in SHAPES:
        ranker = random_ranker(GEOMETRIES[name])
        for side, kept in (("cold", 0), ("cached", CACHE_BYTES)):
            engines: dict[str, Engine] = {
                "ours": NativeEngine(ranker, torch.float32, cache_bytes=kept, vectors=vectors),
                "widest": NativeEngine(ranker, torch.float32, cache_bytes=kept),
                "torch": SplitEngine(ranker, "cpu", torch.float32, cache_bytes=kept),
            }
            widest = engines["widest"].info.notes["vectors"]
            for candidates in (64, 512):
                seconds = timed(engines, item_of(ranker.config, candidates), rounds)
                what = f"{name} C={candidates}, {side}, fp32: {vectors}"
                yield compared(f"{what} vs {widest}", seconds, "ours", "widest", NARROWER_COSTS, faster=False)
                yield compared(f"{what} vs torch engine", seconds, "ours", "torch", 1)
            for engine in engines.values():
                engine.close()


def product_rows(dtype: torch.dtype, rounds: int, vectors: Vectors = "auto") -> Iterator[Row]:
    """The cold forward of nano against its layers' matrix products alone, as torch runs them."""
    config = GEOMETRIES["nano"]
    engine = NativeEngine(random_ranker(config), dtype, vectors=vectors)
    for candidates in (64, 512):
        products = bare_products(config, 1 + config.history_length + candidates, dtype)
        ours = partial(engine.forward, [item_of(config, candidates)])
        sides: dict[str, Callable[[], object]] = {"ours": ours, "products": products}
        what = f"nano C={candidates}, cold, vs its layers' bare GEMMs"
        yield compared(what, alternate(sides, rounds), "ours", "products", 2.0, faster=False)


def bare_products(config: ModelConfig, rows: int, dtype: torch.dtype) -> Callable[[], object]:
    """The matrix products of every layer for `rows` rows: no attention, norms or tokens, and nothing pruned."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = config.query_heads * config.head_width, config.kv_heads * config.head_width
    shapes = [(config.width, queries + 2 * keys), (queries, config.width)]
    shapes += [(config.width, 2 * config.ffn_width), (config.ffn_width, config.width)]

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    pairs = [(drawn(rows, depth), drawn(depth, columns)) for _ in range(config.layers) for depth, columns in shapes]

    @torch.inference_mode()
    def run() -> None:
        for a, b in pairs:
            a @ b

    return run


def growth_row(dtype: torch.dtype, rounds: int, vectors: Vectors = "auto") -> Row:
    """The largest growth in time of any step as C doubles from 64 to 2048, mini, cached."""
    config = GEOMETRIES["mini"]
    engine = NativeEngine(random_ranker(config), dtype, cache_bytes=CACHE_BYTES, vectors=vectors)
    counts = [64 << power for power in range(6)]
    seconds = alternate({str(count): partial(engine.forward, [item_of(config, count)]) for count in counts}, rounds)
    steps = [ratio(seconds[str(2 * count)], seconds[str(count)]) for count in counts[:-1]]
    return Row.of("C doubled, 64 → 2048: worst step", max(steps, key=lambda step: step.median), "×", 2.1)


def bits_row(compositions: int, vectors: Vectors = "auto") -> Row:
    """Number of candidates whose bits change with batch mates, order, parts or cache state."""
    ranker, different = random_ranker(small_config()), 0
    for dtype in bits.DTYPES:
        make = bits.engines(ranker, EngineOptions("cpu", dtype, backend="native", vectors=vectors))
        different += bits.run(make, compositions // 2).different
    return Row.of(f"candidates with other bits, {compositions} compositions", Figure.of([different]), "", 0)
