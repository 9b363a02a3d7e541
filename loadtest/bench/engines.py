"""Engine rows: our engine against the dense eager definition and against the rate of a large product, in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from loadtest import bits
from loadtest.compositions import small_config
from loadtest.geometries import GEOMETRIES, in_dtype
from loadtest.rows import Row
from loadtest.timing import Figure, alternate, ratio
from model.config import ModelConfig
from model.create import EngineOptions
from model.dense import DenseEngine
from model.engine import Engine, Item
from model.native.engine import NativeEngine
from model.synthetic import random_ranker, random_request

CACHE_BYTES = 2**28
SHAPES = ("mini", "nano")
COMPOSITIONS = 1000  # of the row on bits
SPEED_TARGETS = {("mini", 64): (4, 8), ("mini", 512): (9, 12), ("nano", 64): (3, 16), ("nano", 512): (6, 18)}
EFFICIENCY_TARGETS = {("mini", 64, "cold"): 0.55, ("mini", 512, "cold"): 0.68, ("mini", 512, "cached"): 0.75}  # in fp32
CODES_TARGET, CODE_REPEATS = 1.05, 3
PRODUCT = 1024  # rows, depth and columns of a product that runs as fast as this processor can
THRICE = {"cold": 3, "cached": 3, "ours": 3, "widest": 3}  # quick sides run three times per round


def engine_rows(dtype: Literal["auto", "bfloat16", "float32"], rounds: int) -> Iterator[Row]:
    """All engine rows but those of content codes."""
    computed = computed_dtype(dtype)
    yield from speed_rows(computed, rounds)
    yield from efficiency_rows(computed, rounds)
    yield growth_row(computed, rounds)
    yield bits_row(COMPOSITIONS)


def computed_dtype(dtype: Literal["auto", "bfloat16", "float32"]) -> torch.dtype:
    """The dtype of this name; `auto` is the one that the engine chooses on this processor."""
    chosen = NativeEngine(random_ranker(small_config())).info.dtype if dtype == "auto" else dtype
    computed: torch.dtype = getattr(torch, chosen)
    return computed


def code_rows(dtype: Literal["auto", "bfloat16", "float32"], rounds: int) -> Iterator[Row]:
    """The time of a forward with content codes, X's six levels of 256, over that without."""
    plain, computed = GEOMETRIES["mini"], computed_dtype(dtype)
    configs = {"without": plain, "with": replace(plain, code_levels=6, code_values=256)}
    for state, cache_bytes in (("cold", 0), ("cached", CACHE_BYTES)):
        engines = {
            side: NativeEngine(random_ranker(config), computed, cache_bytes=cache_bytes)
            for side, config in configs.items()
        }
        for candidates in (64, 512):
            sides = {
                side: partial(engine.forward, [item_of(configs[side], candidates)]) for side, engine in engines.items()
            }
            seconds = alternate(sides, rounds, repeats=dict.fromkeys(sides, CODE_REPEATS))
            what = f"mini C={candidates}, {state}, with codes vs without"
            yield compared_row(what, seconds, "with", "without", CODES_TARGET, faster=False)
        for engine in engines.values():
            engine.close()


def item_of(config: ModelConfig, candidates: int) -> Item:
    """A request with a full history."""
    return Item(*random_request(config, config.history_length, candidates, seed=7))


def timed(engines: Mapping[str, Engine], item: Item, rounds: int) -> dict[str, list[float]]:
    """Seconds of each engine's forward of one request, in turns."""
    return alternate(
        {name: partial(engine.forward, [item]) for name, engine in engines.items()}, rounds, repeats=THRICE
    )


def compared_row(
    what: str, seconds: Mapping[str, list[float]], ours: str, reference: str, target: float, *, faster: bool = True
) -> Row:
    """A row with the reference's time ÷ ours; ours ÷ the reference's unless `faster`."""
    sides = [Figure.of(seconds[side]) for side in (ours, reference)]
    over, under = (reference, ours) if faster else (ours, reference)
    return Row.of(what, ratio(seconds[over], seconds[under]), "×", target, at_least=faster, sides=sides)


def speed_rows(dtype: torch.dtype, rounds: int) -> Iterator[Row]:
    """Cold (no cache) and cached forwards of one request against the dense definition, with the same dtype and threads."""
    for name in SHAPES:
        config = GEOMETRIES[name]
        ranker = random_ranker(config)
        cold, cached = (NativeEngine(ranker, dtype, cache_bytes=cache_bytes) for cache_bytes in (0, CACHE_BYTES))
        dense = DenseEngine(in_dtype(random_ranker(config), dtype), dtype)
        for candidates in (64, 512):
            seconds = timed({"dense": dense, "cold": cold, "cached": cached}, item_of(config, candidates), rounds)
            for side, target in zip(("cold", "cached"), SPEED_TARGETS[name, candidates], strict=True):
                yield compared_row(f"{name} C={candidates}, {side}, vs dense eager", seconds, side, "dense", target)


def efficiency_rows(dtype: torch.dtype, rounds: int) -> Iterator[Row]:
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
            side: NativeEngine(ranker, dtype, cache_bytes=cache_bytes)
            for side, cache_bytes in (("cold", 0), ("cached", CACHE_BYTES))
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
                is_compared = dtype is torch.float32
                target = EFFICIENCY_TARGETS.get((name, candidates, side), math.inf) if is_compared else math.inf
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


def growth_row(dtype: torch.dtype, rounds: int) -> Row:
    """The largest growth in time of any step as C doubles from 64 to 2048, mini, cached."""
    config = GEOMETRIES["mini"]
    engine = NativeEngine(random_ranker(config), dtype, cache_bytes=CACHE_BYTES)
    counts = [64 << power for power in range(6)]
    seconds = alternate({str(count): partial(engine.forward, [item_of(config, count)]) for count in counts}, rounds)
    steps = [ratio(seconds[str(2 * count)], seconds[str(count)]) for count in counts[:-1]]
    return Row.of("C doubled, 64 → 2048: worst step", max(steps, key=lambda step: step.median), "×", 2.1)


def bits_row(compositions: int) -> Row:
    """Number of candidates whose bits change with batch mates, order, parts or cache state."""
    ranker, different = random_ranker(small_config()), 0
    for dtype in bits.DTYPES:
        make = bits.engines(ranker, EngineOptions("cpu", dtype, backend="native"))
        different += bits.run(make, compositions // 2).different
    return Row.of(f"candidates with other bits, {compositions} compositions", Figure.of([different]), "", 0)
