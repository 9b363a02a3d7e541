"""Compares random batches with the same candidates scored alone. Not one bit may differ."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

import typer

from loadtest.compositions import POOL, Compositions, small_config
from model.create import EngineOptions, create_engine
from model.engine import Engine, EngineError
from model.presets import PRESETS, with_preset
from model.ranker import Ranker
from model.synthetic import random_ranker

Dtype = Literal["float32", "bfloat16"]
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of one run: candidates compared, candidates whose bits differ, and the cache's hits and prefixes."""

    backend: str
    compositions: int
    candidates: int
    different: int
    hits: int
    prefixes: int


def run(
    make_engine: Callable[[int], Engine],
    compositions: int,
    seed: int = 0,
    *,
    pool: int = POOL,
    progress: Callable[[int], None] | None = None,
) -> Tally:
    """Check `compositions` random compositions on `make_engine(cache_bytes)`, with a cache so small that it evicts all the time."""
    draws = Compositions(make_engine(0), seed, pool=pool)
    engine = make_engine(400_000)
    compared = different = 0
    for done in range(compositions):
        more, wrong = draws.check(engine)
        compared, different = compared + more, different + wrong
        if progress is not None and done % 1000 == 0:
            progress(done)
    stats = engine.cache_stats()
    return Tally(engine.info.backend, compositions, compared, different, stats.hits, stats.prefixes)


def engines(ranker: Ranker, options: EngineOptions) -> Callable[[int], Engine]:
    """A function that makes a warm engine with a cache of so many bytes, for `run`."""

    def make(cache_bytes: int) -> Engine:
        engine = create_engine(ranker, replace(options, cache_bytes=cache_bytes))
        engine.warm_up()
        return engine

    return make


def measure(
    compositions: int = 100_000,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    backend: Literal["native", "torch", "auto"] = "native",
    vectors: Literal["auto", "avx2", "neon"] = "auto",
    device: Literal["cpu", "cuda"] = "cpu",
    preset: str = "grok",
) -> None:
    """Compare random batches with the same candidates scored alone. Exit code 1 if a bit differs.

    `compositions`: in total, split evenly over dtypes and trunks. `preset`: name of a trunk, or all.
    """
    if preset not in ("all", *PRESETS):
        raise typer.BadParameter(f"no trunk is named {preset!r}; there are all, {', '.join(PRESETS)}")
    presets, failed = tuple(PRESETS) if preset == "all" else (preset,), False
    if compositions < (least := 2 * len(presets)):
        raise typer.BadParameter(f"--compositions must be at least {least}, one for each dtype and trunk")
    try:
        for name, dtype in itertools.product(presets, DTYPES):  # before the first of them takes its minutes
            create_engine(
                random_ranker(with_preset(small_config(), name)),
                EngineOptions(device, dtype, backend=backend, vectors=vectors),
            ).close()
    except EngineError as error:
        raise typer.BadParameter(str(error)) from error
    for name, dtype in itertools.product(presets, DTYPES):
        ranker, start = random_ranker(with_preset(small_config(), name)), time.perf_counter()
        make = engines(ranker, EngineOptions(device, dtype, backend=backend, vectors=vectors))
        tally = run(make, compositions // (2 * len(presets)), seed, progress=_say if sys.stderr.isatty() else None)
        facts = {"preset": name, "vectors": vectors, "dtype": dtype}
        print(json.dumps({**facts, **asdict(tally), "seconds": round(time.perf_counter() - start, 1)}), flush=True)
        failed |= tally.different > 0
    sys.exit(failed)


def _say(done: int) -> None:
    print(f"\r{done} compositions", end="", file=sys.stderr, flush=True)
