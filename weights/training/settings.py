"""Settings of a training run, and the demo's architecture. Equal settings and logs give equal checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

from model.config import HashSpec, ModelConfig

MERSENNE_61 = 2**61 - 1


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """`epochs` passes over the training period in batches of `batch_requests`; the rate warms up, then falls as a cosine.

    Raises ValueError for an `init`, `device` or `dtype` that does not exist.
    """

    seed: int = 1
    epochs: float = 2.4
    batch_requests: int = 32
    learning_rate: float = 3e-3
    norm_rate: float = 8.0  # of the outer and final norm scales, which start from 0 upstream and have far to go
    attention_rate: float = 0.1  # of the query and key weights, whose initial values are worth keeping
    warmup_steps: int = 100
    weight_decay: float = 0.01
    table_decay: float = 0.0
    gradient_norm: float = 1.0
    continuous_weight: float = 1.0  # weight of the dwell loss against the mean of the discrete losses
    fresh_user_share: float = 0.1  # users shown as unknown: half under an id never seen, half without one
    fresh_post_share: float = 0.85  # posts shown under an id never seen, as most are when served
    max_candidates: int = 64  # per request; longer ones lose random candidates
    init: Literal["upstream", "unit"] = "upstream"
    evaluate_every: int = 250  # steps between evaluations on the validation requests
    validation_requests: int = 600
    patience: int = 8  # evaluations in a row without a better validation loss before the run stops
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = (
        "float32"  # of the trunk's activations; weights, moments and losses stay float32
    )
    threads: int = 1  # per process; a second gains little at this size, and other counts give other bits

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(TrainSettings).items():
            if (known := get_args(kind)) and getattr(self, name) not in known:
                raise ValueError(f"{name} must be {' or '.join(known)}, got {getattr(self, name)!r}")


def demo_config(actions: int) -> ModelConfig:
    """The demo's architecture: 2 layers of width 64, 64 history slots, tables of a few thousand rows."""

    def hashes(vocab_size: int, salt: int) -> HashSpec:
        scales = (141_364_432_931 + 2 * salt, 548_961_815_243 + 4 * salt)
        return HashSpec(scales, (661_354_438_295 + salt, 31_543_898_295 + 3 * salt), MERSENNE_61, vocab_size)

    return ModelConfig(
        width=64, layers=2, query_heads=4, kv_heads=2, head_width=32, history_length=63, candidate_length=64,
        actions=actions, user_hashes=hashes(8192, 10), post_hashes=hashes(2048, 20), author_hashes=hashes(2048, 30),
        continuous_actions=1, has_dwell=True, has_post_age=True, attention_multiplier=0.5,
    )  # fmt: skip
