"""What an architecture from a checkpoint must satisfy before anything is built from it: types, bounds, and which fields go together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

# Upper bounds for a checkpoint: above every ranker known to us, yet small enough that little memory or time is spent before the
# shapes of its tensors are compared. Lengths matter most, since no tensor of the checkpoint has that length to compare with.
LARGEST = {
    "width": 65_536, "layers": 1024, "query_heads": 1024, "kv_heads": 1024, "head_width": 1024, "widening": 64,
    "history_length": 32_768, "candidate_length": 32_768, "actions": 4096, "product_surfaces": 65_536,
    "post_age_granularity_minutes": 2**24, "max_post_age_minutes": 2**27, "post_age_buckets": 65_536,
}  # fmt: skip
MAX_FFN_WIDTH = LARGEST["widening"] * LARGEST["width"]
MAX_CODE_LEVELS = 64
MAX_CODE = 2**20  # the largest content code
MAX_HASHES = 16  # hash functions of one entity
MAX_CONTEXT_NUMBERS = 2**33  # keys and values of one full context: 16 GiB in bf16
MAX_FACTOR = 1e30  # float32 can hold this factor and its inverse, with room to multiply
FACTORS = ("attention_cap", "rope_base", "norm_epsilon", "input_scale")  # positive numbers
CHOICES = {
    "context_attention": ("causal", "bidirectional"), "norm": ("rms", "layer"), "positions": ("rope", "sinusoidal"),
    "activation": ("gelu_tanh", "gelu", "silu"),
}  # fmt: skip


class ConfigError(ValueError):
    """An architecture that cannot be built; the message names the field."""


def check_hashes(spec: Any) -> None:
    """Raises ConfigError for a `HashSpec` that cannot index a table."""
    scales, biases = len(spec.scales), len(spec.biases)
    _require(
        0 < scales == biases, f"hash scales and biases must have the same non-zero length, got {scales} and {biases}"
    )
    _require(scales <= MAX_HASHES, f"an entity may have at most {MAX_HASHES} hash functions, got {scales}")
    _require(0 < spec.modulus < 2**63, f"hash modulus must lie in 1 … 2^63 - 1, got {_short(spec.modulus)}")
    _require(2 <= spec.vocab_size < 2**31, f"vocab_size must lie in 2 … 2^31 - 1, got {_short(spec.vocab_size)}")


def check_architecture(config: Any) -> None:
    """Raises ConfigError for a `ModelConfig` that cannot be built; the message names the field."""
    for name, largest in LARGEST.items():
        value = getattr(config, name)
        _require(0 < value <= largest, f"{name} must be positive and at most {largest}, got {_short(value)}")
    for name in FACTORS:
        value, smallest = getattr(config, name), 1 / MAX_FACTOR
        is_factor = smallest <= value <= MAX_FACTOR if value is not None else name == "attention_cap"
        _require(is_factor, f"{name} must lie in {smallest:g} … {MAX_FACTOR:g}, got {_short(value)}")
    for name, choices in CHOICES.items():
        value = getattr(config, name)
        _require(value in choices, f"{name} must be {' or '.join(map(repr, choices))}, got {value!r:.64}")
    multiplier, continuous, ffn = config.attention_multiplier, config.continuous_actions, config.explicit_ffn_width
    _require(
        abs(multiplier) <= MAX_FACTOR,
        f"attention_multiplier must be at most {MAX_FACTOR:g} either way, got {_short(multiplier)}",
    )
    _require(
        0 <= continuous <= LARGEST["actions"],
        f"continuous_actions must lie in 0 … {LARGEST['actions']}, got {_short(continuous)}",
    )
    _require(
        ffn is None or 0 < ffn <= MAX_FFN_WIDTH,
        f"explicit_ffn_width must be positive and at most {MAX_FFN_WIDTH}, got {_short(ffn or 0)}",
    )
    levels, values = config.code_levels, config.code_values
    _require(0 <= levels <= MAX_CODE_LEVELS, f"code_levels must lie in 0 … {MAX_CODE_LEVELS}, got {_short(levels)}")
    _require(0 <= values <= MAX_CODE, f"code_values must lie in 0 … {MAX_CODE}, got {_short(values)}")
    _require(
        (levels == 0) == (values == 0),
        f"code_levels ({levels}) and code_values ({values}) must both be 0 or both be positive",
    )
    _require(
        config.history_counts in (False, True),
        f"history_counts must be true or false, got {config.history_counts!r:.64}",
    )
    _require(
        config.query_heads % config.kv_heads == 0,
        f"query_heads ({config.query_heads}) must be a multiple of kv_heads ({config.kv_heads})",
    )
    _require(config.head_width % 2 == 0, f"head_width must be even, got {config.head_width}")
    _require(
        config.positions == "rope" or config.width % 2 == 0,
        f"width must be even for sinusoidal positions, got {config.width}",
    )
    numbers = 2 * config.layers * config.kv_heads * config.head_width * (1 + config.history_length)
    _require(
        numbers <= MAX_CONTEXT_NUMBERS,
        f"layers, kv_heads, head_width and history_length make {numbers} keys and values a context, "
        f"at most {MAX_CONTEXT_NUMBERS} are supported",
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _short(number: float) -> str:
    """The number as text for an error message, cut if it is long."""
    text = repr(number)
    return text if len(text) <= 24 else f"{text[:20]}…"


def fields_from_json(cls: type, values: Any, where: str) -> dict[str, Any]:
    """JSON values as arguments of a dataclass. Raises ConfigError for an unknown, missing or wrongly typed one."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be an object")
    fields_by_name = {field.name: field for field in fields(cls)}
    if unknown := sorted(set(values) - set(fields_by_name)):
        raise ConfigError(f"{where} has unknown keys: {', '.join(unknown)}")
    for name, field in fields_by_name.items():
        if name not in values and field.default is field.default_factory:  # both are MISSING: no default at all
            raise ConfigError(f"{where} lacks {name}")
    return {name: _typed(value, str(fields_by_name[name].type), f"{where}.{name}") for name, value in values.items()}


def _typed(value: Any, annotation: str, where: str) -> Any:
    """A JSON value for a field with this annotation: numbers, flags and lists of integers are checked."""
    kind, _, optional = annotation.partition(" | ")
    if kind == "tuple[int, ...]":
        if not isinstance(value, list | tuple) or any(type(item) is not int for item in value):
            raise ConfigError(f"{where} must be a list of integers")
        return tuple(value)
    types = {"int": (int,), "float": (int, float), "bool": (bool,)}.get(kind)
    if types and type(value) not in types and not (optional and value is None):
        raise ConfigError(f"{where} must be of type {annotation}, got {type(value).__name__}")
    return value
