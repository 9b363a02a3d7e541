"""Known trunks, each as a dict of `ModelConfig` fields. docs/trunks.md names the model behind each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from model.config import ConfigError, ModelConfig

AnyConfig = TypeVar("AnyConfig", bound=ModelConfig)

GEMMA2_WINDOW = 4096  # every second layer of Gemma 2 looks back at most this many tokens

GROK: dict[str, Any] = {
    "norm": "rms", "norm_epsilon": 1e-5, "sandwich": True, "input_scale": 1.0,
    "positions": "rope", "rope_base": 10_000.0, "right_anchored": False,
    "attention_multiplier": 0.125, "attention_cap": 30.0, "cap_form": "tanh", "qk_norm": False,
    "activation": "gelu_tanh", "gated": True, "explicit_ffn_width": None, "biases": False,
}  # fmt: skip


def _gemma(shape: ModelConfig) -> dict[str, Any]:
    return {
        "norm_epsilon": 1e-6, "sandwich": False, "input_scale": math.sqrt(shape.width),
        "attention_multiplier": shape.head_width**-0.5, "attention_cap": None, "explicit_ffn_width": 8 * shape.width,
    }  # fmt: skip


def _gemma2(shape: ModelConfig) -> dict[str, Any]:
    if 2 + shape.history_length > GEMMA2_WINDOW:
        raise ConfigError(
            f"gemma2 sees {GEMMA2_WINDOW} tokens back in every second layer, which is not implemented: "
            f"history_length must be at most {GEMMA2_WINDOW - 2}, got {shape.history_length}"
        )
    return {
        "norm_epsilon": 1e-6, "input_scale": math.sqrt(shape.width),
        "attention_multiplier": 256**-0.5, "attention_cap": 50.0, "explicit_ffn_width": 4 * shape.width,
    }  # fmt: skip


def _llama(shape: ModelConfig) -> dict[str, Any]:
    return {"sandwich": False, "attention_multiplier": shape.head_width**-0.5, "activation": "silu", "widening": 4.0}


def _vanilla(shape: ModelConfig) -> dict[str, Any]:
    if shape.width % shape.query_heads:
        raise ConfigError(
            f"vanilla cuts width ({shape.width}) into query_heads ({shape.query_heads}), which leaves a rest"
        )
    head_width = shape.width // shape.query_heads
    return {
        "norm": "layer", "sandwich": False, "positions": "sinusoidal", "attention_multiplier": head_width**-0.5,
        "attention_cap": None, "activation": "gelu", "gated": False, "explicit_ffn_width": 4 * shape.width,
        "biases": True, "kv_heads": shape.query_heads, "head_width": head_width,
    }  # fmt: skip


def _phoenix_2026(shape: ModelConfig) -> dict[str, Any]:
    return {
        "sandwich": False, "right_anchored": True, "attention_multiplier": math.sqrt(128) / shape.head_width,
        "attention_cap": 80.0, "cap_form": "softsign", "qk_norm": True, "gated": False,
    }  # fmt: skip


_DIFFERENCES: dict[str, Callable[[ModelConfig], dict[str, Any]]] = {
    "grok": lambda shape: {}, "gemma": _gemma, "gemma2": _gemma2, "llama": _llama, "vanilla": _vanilla,
    "phoenix-2026": _phoenix_2026,
}  # fmt: skip
PRESETS = tuple(_DIFFERENCES)


def preset(name: str, shape: ModelConfig) -> dict[str, Any]:
    """The `ModelConfig` fields that give a model of this shape the trunk `name`, one of `PRESETS`; `phoenix-2026` is experimental.

    Raises ConfigError for an unknown name, and for a shape that this trunk does not support.
    """
    if name not in _DIFFERENCES:
        raise ConfigError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    return GROK | _DIFFERENCES[name](shape)


def with_preset(config: AnyConfig, name: str) -> AnyConfig:
    """The same model with another trunk: see `preset`."""
    return replace(config, **preset(name, config))
