"""Compares random batches with the same candidates scored alone. Not one bit may differ."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import typer

from model.config import HashSpec, ModelConfig
from model.create import EngineOptions, create_engine
from model.engine import Engine, EngineError, Item
from model.inputs import Candidates
from model.presets import PRESETS, with_preset
from model.ranker import Ranker
from model.selftest import same_bits
from model.synthetic import random_candidates, random_context, random_ranker

Dtype = Literal["float32", "bfloat16"]
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
USERS = 6
GROWTH = (0, 1, 2, 30, 31, 62, 63)  # history lengths of each user, so that a longer one extends a shorter one
POOL = 100  # candidates that every request draws from


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of one run: candidates compared, candidates whose bits differ, and the cache's hits and prefixes."""

    backend: str
    compositions: int
    candidates: int
    different: int
    hits: int
    prefixes: int


def small_config(**overrides: Any) -> ModelConfig:
    """A model with both features, grouped queries and odd counts, small enough for 100 000 compositions in minutes."""
    spec = HashSpec((6364136223846793005, 40503), (1442695040888963407, 17), 2**61 - 1, 509)
    values: dict[str, Any] = {
        "width": 48, "layers": 3, "query_heads": 4, "kv_heads": 2, "head_width": 16, "history_length": max(GROWTH),
        "candidate_length": 24, "actions": 7, "continuous_actions": 3, "has_dwell": True, "has_post_age": True,
        "user_hashes": spec, "post_hashes": spec, "author_hashes": spec,
    }  # fmt: skip
    return ModelConfig(**{**values, **overrides})


class Compositions:
    """Draws forwards of random users, growing histories and candidates from a pool, and knows each candidate's scores alone.

    The engine `alone` computes these scores, one candidate per forward. It has no cache, so that cached contexts are checked too.
    """

    def __init__(
        self, alone: Engine, seed: int, *, users: int = USERS, growth: Sequence[int] = GROWTH, pool: int = POOL
    ) -> None:
        config = alone.config
        self._generator = np.random.default_rng(seed)
        longest = [random_context(config, max(growth), user) for user in range(users - 1)]
        longest.append(replace(random_context(config, max(growth), users), user_id=0))
        self._contexts = [context.first(length) for context in longest for length in growth]
        self._pool = random_candidates(config, pool, seed)
        self._oracle = [
            [alone.forward([Item(context, self._pool.chunk(place, place + 1))])[0].scores for place in range(pool)]
            for context in self._contexts
        ]

    def check(self, engine: Engine) -> tuple[int, int]:
        """Check one random composition. Return how many candidates were compared, and how many had other bits than alone."""
        items, expected = [], []
        for _ in range(self._generator.integers(1, 6)):
            which = int(self._generator.integers(len(self._contexts)))
            places = self._generator.choice(
                len(self._pool), int(self._generator.choice((1, 2, 7, 24, 63, 100))), replace=True
            )
            items.append(Item(self._contexts[which], _picked(self._pool, places)))
            expected.append([self._oracle[which][place] for place in places])
        outcomes = engine.forward(items)
        items = [replace(item, state=outcome.state) for item, outcome in zip(items, outcomes, strict=True)]
        again = engine.forward(items[:1])  # what a later chunk of the same request does
        compared = different = 0
        for outcome, rows in zip([*outcomes, *again], [*expected, expected[0]], strict=True):
            compared += len(rows)
            different += sum(not same_bits(outcome.scores.rows(slice(i, i + 1)), alone) for i, alone in enumerate(rows))
        return compared, different


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


def _picked(pool: Candidates, places: np.ndarray[Any, np.dtype[np.int64]]) -> Candidates:
    columns = pool.post_ids[places], pool.author_ids[places], pool.surfaces[places], pool.age_buckets[places]
    return Candidates(*columns, codes=pool.codes[places])


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
