"""Settings of a training run, and the demo's architecture. Equal settings and logs give equal checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from model.config import HashSpec, ModelConfig

MERSENNE_61 = 2**61 - 1
VALIDATION_SHARE = 0.03


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Within:
    """The finite numbers from `low` to `high`, without the one of these two that is `excluded`."""

    low: int
    high: int
    excluded: int | None = None

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and value != self.excluded

    def __str__(self) -> str:
        low = f"{'above' if self.excluded == self.low else 'at least'} {self.low:,}"
        return f"{low} and {'below' if self.excluded == self.high else 'at most'} {self.high:,}"


SEED = Within(0, 2**64 - 1)
SHARE, FACTOR, WEIGHT = Within(0, 1), Within(0, 1000, excluded=0), Within(0, 1000)
RATE, NORM = Within(0, 1, excluded=0), Within(0, 1_000_000, excluded=0)
COUNT = Within(1, 1_000_000)
THREADS = Within(1, 256)
ROWS = Within(2, 2**31 - 1)
"""Rows of an embedding table; row 0 is padding."""


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """How a run learns. Each field says what it is and what it may be: `settings_table` prints them, and `--set NAME=VALUE` changes them.

    Raises ValueError for a value that a field may not have; the message names the field.
    """

    seed: Annotated[int, "seed of the initial values, the order of requests and the hidden ids", SEED] = 1
    epochs: Annotated[
        float,
        "most passes over the training period; the weights with the best validation loss are kept",
        Within(0, 10_000, excluded=0),
    ] = 2.4
    batch_contexts: Annotated[int, "contexts in a step; contexts of similar length are batched together", COUNT] = 32
    max_candidates: Annotated[
        int, "most candidates of one context; a longer request loses random candidates, others in each epoch", COUNT
    ] = 64
    shared_events: Annotated[
        int,
        "successive requests of a user share a context as long as at most this many events lie between them",
        Within(0, COUNT.high),
    ] = 0
    hidden_user_share: Annotated[
        float, "share of users shown as unknown: half of them under an id never seen, half without an id", SHARE
    ] = 0.1
    hidden_post_share: Annotated[
        float, "share of posts shown under an id never seen, like new posts when the model serves", SHARE
    ] = 0.85
    hidden_author_share: Annotated[float, "share of authors shown under an id never seen", SHARE] = 0.0
    hidden_event_share: Annotated[
        float, "share of events left out of the histories, so that no single event decides", SHARE
    ] = 0.0
    hidden_code_share: Annotated[
        float,
        "share of the content codes, level by level, shown as none, so that they do not tell which post it is",
        SHARE,
    ] = 0.0
    counts_share: Annotated[
        float,
        "how much of a label is what a logistic model on counts expects, rather than what happened: small logs are then not learned by "
        "heart",
        SHARE,
    ] = 0.0
    learning_rate: Annotated[
        float, "highest learning rate of AdamW; after the warm-up it falls as half a cosine", RATE
    ] = 3e-3
    warmup_steps: Annotated[int, "most steps in which the learning rate rises from 0", COUNT] = 100
    warmup_share: Annotated[
        float, "the warm-up takes at most this share of the steps; 0: `warmup_steps`, however short the run is", SHARE
    ] = 0.0
    norm_rate: Annotated[
        float,
        "factor of the learning rate for the outer and final norm scales, which start at 0 and have far to go",
        FACTOR,
    ] = 8.0
    attention_rate: Annotated[
        float, "factor of the learning rate for queries and keys, whose initial values are worth keeping", FACTOR
    ] = 0.1
    weight_decay: Annotated[float, "weight decay of the matrices", WEIGHT] = 0.01
    table_decay: Annotated[float, "weight decay of the embedding tables", WEIGHT] = 0.0
    averaging: Annotated[
        float,
        "the kept weights are a moving average with this share of the old average at each step, or less, so that it looks back "
        "over a tenth of the steps at most (not with `--start`); 0: no average",
        Within(0, 1, excluded=1),
    ] = 0.0
    gradient_norm: Annotated[float, "gradients with a larger norm are scaled down to this one", NORM] = 1.0
    dwell_weight: Annotated[float, "weight of the dwell loss; with 1 it counts as much as one action", WEIGHT] = 1.0
    evaluate_every: Annotated[int, "most steps between two evaluations on the validation requests", COUNT] = 250
    evaluations: Annotated[
        int, "a run that ends at its last step has at least so many evaluations", Within(0, COUNT.high)
    ] = 0
    validation_share: Annotated[
        float,
        "share of the requests of the training period, the newest, that are kept for validation",
        Within(0, 1, excluded=0),
    ] = VALIDATION_SHARE
    validation_requests: Annotated[int, "most validation requests, an even sample of those kept", COUNT] = 600
    patience: Annotated[
        int, "the run ends after this many evaluations in a row without a better validation loss", COUNT
    ] = 8
    device: Annotated[Literal["cpu", "cuda"], "where the run computes"] = "cpu"
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        "data type of the trunk's activations; weights, moments and losses are float32",
    ] = "float32"
    threads: Annotated[
        int,
        "CPU threads; a second one gains little at this size, and other counts give other bits",
        THREADS,
    ] = 1

    def __post_init__(self) -> None:
        check_fields(self)


def check(name: str, value: object, allowed: Within | tuple[str, ...]) -> None:
    """Raise ValueError, which names the setting, for a value that it may not have."""
    if value not in allowed:  # type: ignore[operator]
        raise ValueError(f"{name} must be {_words(allowed)}, got {value!r:.64}")


def check_fields(settings: object) -> None:
    """Raise ValueError, which names the field, for a value that a dataclass of settings may not have: its annotations say what it may be,
    a `Within` or a Literal."""
    kind: type = type(settings)
    for name, allowed in _allowed(kind).items():
        check(name, getattr(settings, name), allowed)


def settings_table() -> list[tuple[str, Any, str, str]]:
    """Name, default, possible values and meaning of every setting."""
    hints, allowed = get_type_hints(TrainSettings, include_extras=True), _allowed(TrainSettings)
    return [
        (field.name, field.default, _words(allowed[field.name]), get_args(hints[field.name])[1])
        for field in fields(TrainSettings)
    ]


@cache
def _allowed(settings: type) -> dict[str, Within | tuple[str, ...]]:
    """What each field of a dataclass of settings may be, where its annotation says it."""
    allowed: dict[str, Within | tuple[str, ...]] = {}
    for name, hint in get_type_hints(settings, include_extras=True).items():
        kind, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        within = [note for note in notes if isinstance(note, Within)]
        if within or get_origin(kind) is Literal:
            allowed[name] = within[0] if within else get_args(kind)
    return allowed


def _words(allowed: Within | tuple[str, ...]) -> str:
    return str(allowed) if isinstance(allowed, Within) else " or ".join(allowed)


def replaced(owner: T, values: Mapping[str, Any]) -> T:
    """A dataclass with those of the values that are named like its fields."""
    mine = {field.name: values[field.name] for field in fields(owner) if field.name in values}  # type: ignore[arg-type]
    return replace(owner, **mine)  # type: ignore[type-var]


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
