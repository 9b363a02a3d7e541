"""The architecture of one checkpoint, as frozen values. Not for settings of the service.

Dimension letters, the same in the whole project: `B` requests, `H` history slots, `S = 1 + H` context (user + history),
`C` candidates, `T = S + C`, `D` model width, `N` query heads, `G` key/value heads, `K` head width, `F` feed-forward width,
`A` discrete actions, `Z` continuous actions, `L` layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self

ContextAttention = Literal["causal", "bidirectional"]
CandidatePositions = Literal["shared", "sequential"]

MAX_POST_AGE_MINUTES = 4800
MAX_DWELL_SECONDS = 30.0
DWELL_HIDDEN_WIDTH = 64

# The most that a checkpoint may ask for: beyond every ranker known to us, and little enough that no memory or time is spent
# before the shapes of its tensors are compared. Lengths matter most: no tensor of the checkpoint is as long as they say.
LARGEST = {
    "width": 65_536, "layers": 1024, "query_heads": 1024, "kv_heads": 1024, "head_width": 1024, "widening": 64,
    "history_length": 32_768, "candidate_length": 32_768, "actions": 4096, "product_surfaces": 65_536,
    "post_age_granularity_minutes": MAX_POST_AGE_MINUTES,
}  # fmt: skip
MAX_HASHES = 16  # hash functions of one entity
MAX_CONTEXT_NUMBERS = 2**33  # keys and values of one full context: 16 GiB in bf16
MAX_FACTOR = 1e30  # float32 still holds such a factor, and its inverse, with room to multiply


class ConfigError(ValueError):
    """An architecture that cannot be built; the message names the field."""


@dataclass(frozen=True, slots=True)
class HashSpec:
    """Hash functions of one kind of entity into its own embedding table of `vocab_size` rows; row 0 is padding.

    Function j maps an id to `(id * scales[j] + biases[j]) mod modulus mod (vocab_size - 1) + 1`.
    """

    scales: tuple[int, ...]
    biases: tuple[int, ...]
    modulus: int
    vocab_size: int

    def __post_init__(self) -> None:
        if not self.scales or len(self.scales) != len(self.biases):
            raise ConfigError(
                f"hash scales and biases must be equally many and not empty, got {len(self.scales)} and {len(self.biases)}"
            )
        if len(self.scales) > MAX_HASHES:
            raise ConfigError(f"an entity may have at most {MAX_HASHES} hash functions, got {len(self.scales)}")
        if not 0 < self.modulus < 2**63:
            raise ConfigError(f"hash modulus must lie in 1 … 2^63 - 1, got {_short(self.modulus)}")
        if not 2 <= self.vocab_size < 2**31:
            raise ConfigError(f"vocab_size must lie in 2 … 2^31 - 1, got {_short(self.vocab_size)}")

    @property
    def count(self) -> int:
        """How many hash functions, hence embedding rows, an entity has."""
        return len(self.scales)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that shapes the ranker. Comes from a checkpoint, never from the environment."""

    width: int  # D
    layers: int  # L
    query_heads: int  # N
    kv_heads: int  # G
    head_width: int  # K
    history_length: int  # H
    candidate_length: int  # slots in a chunk of the published pipeline; positions in sequential mode repeat after it
    actions: int  # A
    user_hashes: HashSpec
    post_hashes: HashSpec
    author_hashes: HashSpec
    continuous_actions: int = 0  # Z
    widening: float = 2.0
    attention_multiplier: float = 0.125
    attention_cap: float = 30.0
    rope_base: float = 10000.0
    norm_epsilon: float = 1e-5
    product_surfaces: int = 16
    has_dwell: bool = False
    has_post_age: bool = False
    post_age_granularity_minutes: int = 60
    right_anchored: bool = False
    context_attention: ContextAttention = "causal"

    def __post_init__(self) -> None:
        for name, largest in LARGEST.items():
            if not 0 < getattr(self, name) <= largest:
                raise ConfigError(f"{name} must be positive and at most {largest}, got {_short(getattr(self, name))}")
        for name in ("attention_cap", "rope_base", "norm_epsilon"):
            if not 1 / MAX_FACTOR <= getattr(self, name) <= MAX_FACTOR:
                raise ConfigError(
                    f"{name} must lie in {1 / MAX_FACTOR:g} … {MAX_FACTOR:g}, got {_short(getattr(self, name))}"
                )
        if not abs(self.attention_multiplier) <= MAX_FACTOR:
            raise ConfigError(
                f"attention_multiplier must be at most {MAX_FACTOR:g} either way, got {_short(self.attention_multiplier)}"
            )
        if not 0 <= self.continuous_actions <= LARGEST["actions"]:
            raise ConfigError(
                f"continuous_actions must lie in 0 … {LARGEST['actions']}, got {_short(self.continuous_actions)}"
            )
        if self.query_heads % self.kv_heads:
            raise ConfigError(f"query_heads ({self.query_heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_width % 2:
            raise ConfigError(f"head_width must be even for RoPE, got {self.head_width}")
        if self.context_attention not in ("causal", "bidirectional"):
            raise ConfigError(f"context_attention must be 'causal' or 'bidirectional', got {self.context_attention!r}")
        numbers = 2 * self.layers * self.kv_heads * self.head_width * (1 + self.history_length)
        if numbers > MAX_CONTEXT_NUMBERS:
            raise ConfigError(
                f"layers, kv_heads, head_width and history_length make {numbers} keys and values a context, "
                f"at most {MAX_CONTEXT_NUMBERS} are supported"
            )

    @property
    def ffn_width(self) -> int:
        """F: two thirds of the widened width, rounded up to a multiple of 8."""
        width = int(self.widening * self.width) * 2 // 3
        return -(-width // 8) * 8

    @property
    def candidate_position(self) -> int:
        """The first candidate slot, where every candidate sits in shared mode."""
        return 1 + self.history_length

    @property
    def post_age_buckets(self) -> int:
        """Rows of the post-age table; bucket 0 stands for unknown."""
        return MAX_POST_AGE_MINUTES // self.post_age_granularity_minutes + 2

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` inverts it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from JSON values. Raises ConfigError for an unknown, missing or wrongly typed key."""
        arguments = _checked(cls, values, "architecture")
        for name in ("user_hashes", "post_hashes", "author_hashes"):
            if not isinstance(arguments[name], Mapping):
                raise ConfigError(f"architecture.{name} must be an object")
            spec = _checked(HashSpec, arguments[name], f"architecture.{name}")
            for key in ("scales", "biases"):
                spec[key] = _integers(spec[key], f"architecture.{name}.{key}")
            arguments[name] = HashSpec(**spec)
        return cls(**arguments)


def _short(number: float) -> str:
    """A number for a sentence: one of 300 digits is cut."""
    text = repr(number)
    return text if len(text) <= 24 else f"{text[:20]}…"


def _integers(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or any(type(item) is not int for item in value):
        raise ConfigError(f"{where} must be a list of integers")
    return tuple(value)


def _checked(cls: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    known = {field.name: field for field in fields(cls)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"{where} has unknown keys: {', '.join(unknown)}")
    for name, field in known.items():
        if name not in values:
            if field.default is field.default_factory:  # both are MISSING: no default at all
                raise ConfigError(f"{where} lacks {name}")
            continue
        _check_type(values[name], str(field.type), f"{where}.{name}")
    return dict(values)


def _check_type(value: Any, annotation: str, where: str) -> None:
    wanted: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,)}
    types = wanted.get(annotation)
    if types and (not isinstance(value, types) or (isinstance(value, bool) and annotation != "bool")):
        raise ConfigError(f"{where} must be of type {annotation}, got {type(value).__name__}")


@dataclass(frozen=True, slots=True)
class RetrievalConfig(ModelConfig):
    """Everything that shapes the two towers: the same inputs and trunk without dwell and post age, causal, no heads.

    `candidate_length` has no meaning here. Without `linear_projection` a candidate is the mean of its hash embeddings.
    """

    linear_projection: bool = True

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        if self.has_dwell or self.has_post_age or self.continuous_actions or self.context_attention != "causal":
            raise ConfigError("a retrieval model has neither dwell, post age nor continuous actions, and is causal")
