"""The architecture of one checkpoint, as frozen values. Not for settings of the service.

Dimension letters, the same in the whole project: `B` requests, `H` history slots, `S = 1 + H` context (user + history),
`C` candidates, `T = S + C`, `D` model width, `N` query heads, `G` key/value heads, `K` head width, `F` feed-forward width,
`A` discrete actions, `Z` continuous actions, `L` layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self, get_args

ContextAttention = Literal["causal", "bidirectional"]
CandidatePositions = Literal["shared", "sequential"]
Norm = Literal["rms", "layer"]
Positions = Literal["rope", "sinusoidal"]
Activation = Literal["gelu_tanh", "gelu", "silu"]
CapForm = Literal["tanh", "softsign"]

MAX_POST_AGE_MINUTES = 4800
MAX_DWELL_SECONDS = 30.0
DWELL_HIDDEN_WIDTH = 64

# Upper bounds for a checkpoint: above every ranker known to us, yet small enough that little memory or time is spent before the
# shapes of its tensors are compared. Lengths matter most, since no tensor of the checkpoint has that length to compare with.
LARGEST = {
    "width": 65_536, "layers": 1024, "query_heads": 1024, "kv_heads": 1024, "head_width": 1024, "widening": 64,
    "history_length": 32_768, "candidate_length": 32_768, "actions": 4096, "product_surfaces": 65_536,
    "post_age_granularity_minutes": 2**24, "max_post_age_minutes": 2**27, "post_age_buckets": 65_536,
}  # fmt: skip
MAX_HASHES = 16  # hash functions of one entity
MAX_CONTEXT_NUMBERS = 2**33  # keys and values of one full context: 16 GiB in bf16
MAX_FACTOR = 1e30  # float32 can hold this factor and its inverse, with room to multiply
MAX_FFN_WIDTH = LARGEST["widening"] * LARGEST["width"]

CHOICES = {
    "context_attention": get_args(ContextAttention), "norm": get_args(Norm), "positions": get_args(Positions),
    "activation": get_args(Activation), "cap_form": get_args(CapForm),
}  # fmt: skip
# Options that Grok's trunk and the published inputs lack. A manifest omits them at their defaults, so that Grok manifests stay unchanged.
TRUNK_OPTIONS = (
    "norm", "sandwich", "positions", "cap_form", "activation", "gated", "biases", "explicit_ffn_width", "input_scale", "qk_norm",
    "max_post_age_minutes",
)  # fmt: skip


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
                f"hash scales and biases must have the same non-zero length, got {len(self.scales)} and {len(self.biases)}"
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
    candidate_length: int  # slots in a chunk of the published pipeline; sequential positions repeat after this many
    actions: int  # A
    user_hashes: HashSpec
    post_hashes: HashSpec
    author_hashes: HashSpec
    continuous_actions: int = 0  # Z
    widening: float = 2.0
    attention_multiplier: float = 0.125
    attention_cap: float | None = 30.0  # bounds the attention logits; None: no bound
    rope_base: float = 10000.0
    norm_epsilon: float = 1e-5
    product_surfaces: int = 16
    has_dwell: bool = False
    has_post_age: bool = False
    post_age_granularity_minutes: int = 60
    max_post_age_minutes: int = MAX_POST_AGE_MINUTES  # older posts share the last bucket
    right_anchored: bool = False
    context_attention: ContextAttention = "causal"
    norm: Norm = "rms"  # `layer` has a bias and subtracts the mean
    sandwich: bool = True  # a norm after attention and FFN too, before each residual addition
    positions: Positions = "rope"  # `sinusoidal`: added to the tokens
    cap_form: CapForm = "tanh"  # cap · tanh(x / cap); `softsign`: x / (1 + |x| / cap)
    activation: Activation = "gelu_tanh"
    gated: bool = True
    biases: bool = False  # of every linear map of the trunk
    explicit_ffn_width: int | None = None  # F, where `widening` does not give it
    input_scale: float = 1.0  # of the tokens, before the first layer
    qk_norm: bool = False  # RMSNorm of every head's query and key, before RoPE

    def __post_init__(self) -> None:
        for name, largest in LARGEST.items():
            if not 0 < getattr(self, name) <= largest:
                raise ConfigError(f"{name} must be positive and at most {largest}, got {_short(getattr(self, name))}")
        for name in ("attention_cap", "rope_base", "norm_epsilon", "input_scale"):
            factor = getattr(self, name)
            if not (1 / MAX_FACTOR <= factor <= MAX_FACTOR if factor is not None else name == "attention_cap"):
                raise ConfigError(f"{name} must lie in {1 / MAX_FACTOR:g} … {MAX_FACTOR:g}, got {_short(factor)}")
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
        self._check_trunk()
        numbers = 2 * self.layers * self.kv_heads * self.head_width * (1 + self.history_length)
        if numbers > MAX_CONTEXT_NUMBERS:
            raise ConfigError(
                f"layers, kv_heads, head_width and history_length make {numbers} keys and values a context, "
                f"at most {MAX_CONTEXT_NUMBERS} are supported"
            )

    def _check_trunk(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be {' or '.join(map(repr, choices))}, got {getattr(self, name)!r:.64}")
        if self.head_width % 2:
            raise ConfigError(f"head_width must be even, got {self.head_width}")
        if self.positions == "sinusoidal" and self.width % 2:
            raise ConfigError(f"width must be even for sinusoidal positions, got {self.width}")
        if self.attention_cap is None and self.cap_form != "tanh":
            raise ConfigError(f"cap_form {self.cap_form!r} needs an attention_cap")
        if self.explicit_ffn_width is not None and not 0 < self.explicit_ffn_width <= MAX_FFN_WIDTH:
            raise ConfigError(
                f"explicit_ffn_width must be positive and at most {MAX_FFN_WIDTH}, got {_short(self.explicit_ffn_width)}"
            )

    @property
    def ffn_width(self) -> int:
        """F: the explicit one, or two thirds of the widened width, rounded up to a multiple of 8."""
        if self.explicit_ffn_width is not None:
            return self.explicit_ffn_width
        width = int(self.widening * self.width) * 2 // 3
        return -(-width // 8) * 8

    @property
    def candidate_position(self) -> int:
        """The first candidate slot, where every candidate sits in shared mode."""
        return 1 + self.history_length

    @property
    def post_age_buckets(self) -> int:
        """Rows of the post-age table; bucket 0 stands for unknown."""
        return self.max_post_age_minutes // self.post_age_granularity_minutes + 2

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is the inverse. Trunk options with Grok's values are left out."""
        grok = {field.name: field.default for field in fields(self) if field.name in TRUNK_OPTIONS}
        return {name: value for name, value in asdict(self).items() if name not in grok or value != grok[name]}

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
    """The number as text for an error message, cut if it is long."""
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
    kind, _, optional = annotation.partition(" | ")
    types = wanted.get(kind)
    if optional and value is None:
        return
    if types and (not isinstance(value, types) or (isinstance(value, bool) and annotation != "bool")):
        raise ConfigError(f"{where} must be of type {annotation}, got {type(value).__name__}")


@dataclass(frozen=True, slots=True)
class RetrievalConfig(ModelConfig):
    """Everything that shapes the two towers: the ranker's inputs and trunk, causal, without dwell, post age or heads.

    `candidate_length` has no meaning here. Without `linear_projection` a candidate is the mean of its hash embeddings.
    """

    linear_projection: bool = True

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        if self.has_dwell or self.has_post_age or self.continuous_actions or self.context_attention != "causal":
            raise ConfigError("a retrieval model has neither dwell, post age nor continuous actions, and is causal")
