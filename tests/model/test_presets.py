"""Presets: which fields they set, and which shapes they refuse."""

from __future__ import annotations

import math

import pytest

from model.config import ConfigError
from model.presets import GROK, PRESETS, preset, with_preset
from tests.model.builders import random_config


def test_grok_is_what_a_config_is_by_default() -> None:
    config = random_config()
    assert {name: getattr(config, name) for name in GROK} == GROK
    assert with_preset(with_preset(config, "vanilla"), "grok").to_dict() == random_config(kv_heads=4).to_dict()


def test_every_other_preset_differs_from_every_other() -> None:
    configs = [with_preset(random_config(kv_heads=4), name) for name in PRESETS]
    assert len(set(configs)) == len(PRESETS) == 6


def test_fields_follow_the_shape() -> None:
    shape = random_config(width=72, query_heads=4, head_width=16)
    gemma, vanilla = with_preset(shape, "gemma"), with_preset(shape, "vanilla")
    assert (gemma.input_scale, gemma.attention_multiplier, gemma.ffn_width) == (math.sqrt(72), 0.25, 576)
    assert (vanilla.head_width, vanilla.kv_heads, vanilla.ffn_width) == (18, 4, 288)
    assert with_preset(shape, "gemma2").attention_multiplier == 1 / 16
    assert (with_preset(shape, "llama").attention_multiplier, vanilla.attention_multiplier) == (0.25, 18**-0.5)
    assert with_preset(random_config(head_width=128), "phoenix-2026").attention_multiplier == pytest.approx(128**-0.5)


def test_shapes_that_a_trunk_cannot_have_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="no preset 'gemma3'; there are grok, gemma, gemma2, llama, vanilla, phoenix-2026"
    ):
        preset("gemma3", random_config())
    with pytest.raises(ConfigError, match="history_length must be at most 4094, got 4095"):
        with_preset(random_config(history_length=4095), "gemma2")
    assert with_preset(random_config(history_length=4094), "gemma2").attention_cap == 50
    with pytest.raises(ConfigError, match=r"cuts width \(66\) into query_heads \(4\)"):
        with_preset(random_config(width=66), "vanilla")
