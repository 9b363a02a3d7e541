"""Settings of a training run, and the demo's architecture. Equal settings and logs give equal checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_type_hints

from model.config import HashSpec, ModelConfig

MERSENNE_61 = 2**61 - 1


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """How a run learns. Each field says what it is: `settings_table` prints them, and `--set NAME=VALUE` changes them.

    Raises ValueError for a `device` or `dtype` that does not exist.
    """

    seed: Annotated[int, "of initial values, order and hidden ids"] = 1
    epochs: Annotated[
        float, "passes over the training period, at most; the weights with the best validation loss are kept"
    ] = 2.4
    batch_contexts: Annotated[int, "contexts in a step; those of like length are batched together"] = 32
    max_candidates: Annotated[int, "of one context; a longer request loses random candidates, anew in each epoch"] = 64
    shared_events: Annotated[
        int, "successive requests of a user share a context while at most so many events lie between"
    ] = 0
    hidden_user_share: Annotated[float, "users shown as unknown: half under an id never seen, half without one"] = 0.1
    hidden_post_share: Annotated[float, "posts shown under an id never seen, as new ones are when served"] = 0.85
    hidden_author_share: Annotated[float, "authors shown under an id never seen"] = 0.0
    hidden_event_share: Annotated[float, "events left out of the histories, so that no single one decides"] = 0.0
    learning_rate: Annotated[float, "of AdamW at its highest; it falls as half a cosine"] = 3e-3
    warmup_steps: Annotated[int, "steps in which the rate rises from 0"] = 100
    norm_rate: Annotated[
        float, "factor of the rate for outer and final norm scales, which start from 0 and have far to go"
    ] = 8.0
    attention_rate: Annotated[
        float, "factor of the rate for queries and keys, whose initial values are worth keeping"
    ] = 0.1
    weight_decay: Annotated[float, "of the matrices"] = 0.01
    table_decay: Annotated[float, "of the embedding tables"] = 0.0
    averaging: Annotated[float, "share of the old average that the kept weights hold at each step; 0: no average"] = 0.0
    gradient_norm: Annotated[float, "gradients are scaled down to this norm"] = 1.0
    dwell_weight: Annotated[float, "of the dwell's loss, where 1 puts it on a par with one action"] = 1.0
    evaluate_every: Annotated[int, "steps between two looks at the validation requests"] = 250
    validation_requests: Annotated[int, "requests of the last 3 % of the training period that validate, at most"] = 600
    patience: Annotated[int, "looks in a row without a better validation loss that end the run"] = 8
    device: Annotated[Literal["cpu", "cuda"], "where the run computes"] = "cpu"
    dtype: Annotated[
        Literal["float32", "bfloat16"], "of the trunk's activations; weights, moments and losses are float32"
    ] = "float32"
    threads: Annotated[int, "a second gains little at this size, and other counts give other bits"] = 1

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(TrainSettings).items():
            if (known := get_args(kind)) and getattr(self, name) not in known:
                raise ValueError(f"{name} must be {' or '.join(known)}, got {getattr(self, name)!r}")


def settings_table() -> list[tuple[str, Any, str]]:
    """Name, default and meaning of every setting."""
    meanings = get_type_hints(TrainSettings, include_extras=True)
    return [(each.name, each.default, meanings[each.name].__metadata__[0]) for each in fields(TrainSettings)]


def hashes(vocab_size: int, salt: int) -> HashSpec:
    """Two hash functions into a table of `vocab_size` rows; another `salt` gives other functions."""
    scales = (141_364_432_931 + 2 * salt, 548_961_815_243 + 4 * salt)
    return HashSpec(scales, (661_354_438_295 + salt, 31_543_898_295 + 3 * salt), MERSENNE_61, vocab_size)


def demo_config(actions: int) -> ModelConfig:
    """The demo's architecture: 2 layers of width 64, 64 history slots, tables of a few thousand rows."""
    return ModelConfig(
        width=64, layers=2, query_heads=4, kv_heads=2, head_width=32, history_length=63, candidate_length=64,
        actions=actions, user_hashes=hashes(8192, 10), post_hashes=hashes(2048, 20), author_hashes=hashes(2048, 30),
        continuous_actions=1, has_dwell=True, has_post_age=True, attention_multiplier=0.5,
    )  # fmt: skip
