"""The trunks of the source documents, each as fields of `ModelConfig`. docs/models.md names the model behind each."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal, TypeVar, get_args

from model.config import ConfigError, ModelConfig

AnyConfig = TypeVar("AnyConfig", bound=ModelConfig)

Preset = Literal["grok", "gemma", "gemma2", "llama", "vanilla"]
PRESETS: tuple[Preset, ...] = get_args(Preset)
GEMMA2_WINDOW = 4096  # every second layer of Gemma 2 looks back at most this many tokens

GROK: dict[str, Any] = {
    "norm": "rms", "norm_epsilon": 1e-5, "sandwich": True, "input_scale": 1.0, "positions": "rope", "rope_base": 10_000.0,
    "right_anchored": False, "attention_multiplier": 0.125, "attention_cap": 30.0, "activation": "gelu_tanh", "gated": True,
    "explicit_ffn_width": None, "biases": False,
}  # fmt: skip


def with_preset(config: AnyConfig, name: str) -> AnyConfig:
    """The same model with the trunk `name`, one of `PRESETS`. Raises ConfigError for another name, and for a shape that this trunk
    does not support."""
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    return replace(config, **GROK | _differences(config, name))


def _differences(config: ModelConfig, name: str) -> dict[str, Any]:
    """The fields that this trunk has otherwise than Grok's."""
    per_head = config.head_width**-0.5
    if name == "gemma":
        return {
            "norm_epsilon": 1e-6, "sandwich": False, "input_scale": math.sqrt(config.width), "attention_multiplier": per_head,
            "attention_cap": None, "explicit_ffn_width": 8 * config.width,
        }  # fmt: skip
    if name == "gemma2":
        if 2 + config.history_length > GEMMA2_WINDOW:
            raise ConfigError(
                f"gemma2 sees {GEMMA2_WINDOW} tokens back in every second layer, which is not implemented: "
                f"history_length must be at most {GEMMA2_WINDOW - 2}, got {config.history_length}"
            )
        return {
            "norm_epsilon": 1e-6, "input_scale": math.sqrt(config.width), "attention_multiplier": 256**-0.5,
            "attention_cap": 50.0, "explicit_ffn_width": 4 * config.width,
        }  # fmt: skip
    if name == "llama":
        return {"sandwich": False, "attention_multiplier": per_head, "activation": "silu", "widening": 4.0}
    if name == "vanilla":
        if config.width % config.query_heads:
            raise ConfigError(
                f"vanilla divides width ({config.width}) by query_heads ({config.query_heads}), which leaves a remainder"
            )
        head_width = config.width // config.query_heads
        return {
            "norm": "layer", "sandwich": False, "positions": "sinusoidal", "attention_multiplier": head_width**-0.5,
            "attention_cap": None, "activation": "gelu", "gated": False, "explicit_ffn_width": 4 * config.width,
            "biases": True, "kv_heads": config.query_heads, "head_width": head_width,
        }  # fmt: skip
    return {}
