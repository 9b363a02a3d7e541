"""Random batches of a small model, with each candidate's scores alone. Needs torch and numpy alone, as `loadtest.gpu` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from model.config import HashSpec, ModelConfig
from model.engine import Engine, Item
from model.inputs import Candidates
from model.selftest import same_bits
from model.synthetic import random_candidates, random_context

USERS = 6
GROWTH = (0, 1, 2, 30, 31, 62, 63)  # history lengths of each user, so that a longer one extends a shorter one
POOL = 100  # candidates that every request draws from


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


def _picked(pool: Candidates, places: np.ndarray[Any, np.dtype[np.int64]]) -> Candidates:
    columns = pool.post_ids[places], pool.author_ids[places], pool.surfaces[places], pool.age_buckets[places]
    return Candidates(*columns, codes=pool.codes[places])
