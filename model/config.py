"""The architecture of one checkpoint, as frozen values. Settings of the service are in `app.settings`.

Dimension letters, the same in the whole project: `B` requests, `H` history slots, `S = 1 + H` context (user + history),
`C` candidates, `T = S + C`, `D` model width, `N` query heads, `G` key/value heads, `K` head width, `F` feed-forward width,
`A` discrete actions, `Z` continuous actions, `L` layers, `Q` code levels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self

from model.bounds import ConfigError as ConfigError
from model.bounds import check_architecture, check_hashes, fields_from_json

ContextAttention = Literal["causal", "bidirectional"]
CandidatePositions = Literal["shared", "sequential"]
NormKind = Literal["rms", "layer"]
PositionKind = Literal["rope", "sinusoidal"]
Activation = Literal["gelu_tanh", "gelu", "silu"]

MAX_POST_AGE_MINUTES = 4800  # of the published checkpoints
MAX_DWELL_SECONDS = 30.0
DWELL_HIDDEN_WIDTH = 64

# What the published ranker lacks. A manifest omits these at their defaults, so that its digest stays what it was.
TRUNK_OPTIONS = (
    "norm", "sandwich", "positions", "activation", "gated", "biases", "explicit_ffn_width", "input_scale",
    "max_post_age_minutes",
)  # fmt: skip
CODE_OPTIONS = ("code_levels", "code_values", "history_counts")
HISTORY_COUNTS = 3  # of a candidate: events of its author, of its post, and all; then of its code of each level
MOST_COUNTED = 15  # the largest of them, see `history_counts` of `model.inputs`


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
        check_hashes(self)

    @property
    def count(self) -> int:
        """How many hash functions, hence embedding rows, an entity has."""
        return len(self.scales)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that shapes the ranker. Comes from a checkpoint, never from the environment. Raises ConfigError."""

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
    norm: NormKind = "rms"  # `layer` has a bias and subtracts the mean
    sandwich: bool = True  # a norm after attention and FFN too, before each residual addition
    positions: PositionKind = "rope"  # `sinusoidal`: added to the tokens
    activation: Activation = "gelu_tanh"
    gated: bool = True
    biases: bool = False  # of every linear map of the trunk
    explicit_ffn_width: int | None = None  # F, where `widening` does not give it
    input_scale: float = 1.0  # of the tokens, before the first layer
    code_levels: int = 0  # Q, content codes of a post; 0: the model reads none
    code_values: int = 0  # of a level: codes are 1 … code_values, and 0 means none
    history_counts: bool = False  # a candidate is told how often the history has its author, its post and its codes

    def __post_init__(self) -> None:
        check_architecture(self)

    @property
    def ffn_width(self) -> int:
        """F: the explicit one, or two thirds of the widened width, rounded up to a multiple of 8 (`ffn_size` upstream)."""
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

    @property
    def has_extendable_contexts(self) -> bool:
        """Whether a context keeps its numbers when newer events follow, so that the context cache may extend it."""
        return self.context_attention == "causal" and not self.right_anchored

    @property
    def token_levels(self) -> int:
        """Levels of small integers that a token is made of: the content codes, then the counts of the history."""
        return self.code_levels + (HISTORY_COUNTS + self.code_levels) * self.history_counts

    @property
    def token_values(self) -> int:
        """The largest integer of any level."""
        return max(self.code_values, MOST_COUNTED * self.history_counts)

    @property
    def code_rows(self) -> int:
        """Rows of the table of all levels: those of the first level, then those of the second …"""
        return self.token_levels * self.token_values

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is the inverse. Options of the trunk, the codes and the counts are left out at their defaults."""
        defaults = {field.name: field.default for field in fields(self) if field.name in TRUNK_OPTIONS + CODE_OPTIONS}
        return {name: value for name, value in asdict(self).items() if name not in defaults or value != defaults[name]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from JSON values. Raises ConfigError for an unknown, missing or wrongly typed key."""
        arguments = fields_from_json(cls, values, "architecture")
        for name in ("user_hashes", "post_hashes", "author_hashes"):
            arguments[name] = HashSpec(**fields_from_json(HashSpec, arguments[name], f"architecture.{name}"))
        return cls(**arguments)


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
        if self.history_counts:
            raise ConfigError("a retrieval model counts nothing of a history: its posts are encoded without one")
