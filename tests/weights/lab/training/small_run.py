"""A world and an architecture small enough to train in a test. Not a test itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from model.config import HashSpec, ModelConfig
from weights.lab.training.examples import Examples
from weights.lab.training.page_example import request_body
from weights.lab.training.run import split
from weights.lab.training.settings import TrainSettings, demo_config
from weights.lab.training.trainer import Trainer
from weights.lab.world.behaviour import ACTION_NAMES
from weights.lab.world.settings import WorldSettings

WORLD = WorldSettings(users=40, new_users=4, authors=24, days=10, test_days=2, slots=12)
TRAINING = TrainSettings(
    epochs=2,
    batch_contexts=16,
    warmup_steps=10,
    evaluate_every=20,
    validation_requests=20,
    threads=1,
    learning_rate=5e-3,
)


def small_config() -> ModelConfig:
    """Two layers of width 16, tables of 63 to 101 rows: collisions are sure."""

    def rows(spec: HashSpec, vocab_size: int) -> HashSpec:
        return replace(spec, vocab_size=vocab_size)

    config = demo_config(len(ACTION_NAMES))
    return replace(
        config, width=16, query_heads=2, kv_heads=1, head_width=8, history_length=13,
        user_hashes=rows(config.user_hashes, 101), post_hashes=rows(config.post_hashes, 63),
        author_hashes=rows(config.author_hashes, 65),
    )  # fmt: skip


def small_trainer(examples: Examples, **changes: object) -> Trainer:
    """A trainer before its first step; `changes` are fields of TrainSettings."""
    return Trainer(examples, *split(examples.log.counted_requests, 20), replace(TRAINING, **changes), dwell_output=0)


def exact_body(examples: Examples, index: int) -> dict[str, Any]:
    """The body of a request of the log, with dwell times as the log has them, where examples for people round them."""
    body, rows = request_body(examples, index), range(examples.oldest[index], examples.last[index])
    for event, row in zip(body["history"], rows, strict=True):
        event["dwell_time"] = float(examples.events.dwell_seconds[row])
    return body
