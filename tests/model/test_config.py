"""ModelConfig: derived figures, strictness, round trip, and the trunks that have a name."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from model.config import CODE_OPTIONS, TRUNK_OPTIONS, ConfigError, HashSpec, ModelConfig, RetrievalConfig
from model.presets import GROK, PRESETS, with_preset
from tests.model.builders import random_config


@pytest.mark.parametrize(
    ("width", "widening", "expected"), [(128, 4.0, 344), (128, 2.0, 176), (64, 4.0, 176), (512, 2.0, 688)]
)
def test_ffn_width_is_two_thirds_rounded_up_to_eight(width: int, widening: float, expected: int) -> None:
    assert random_config(width=width, widening=widening).ffn_width == expected


@pytest.mark.parametrize(("granularity", "oldest", "buckets"), [(60, 4800, 82), (60, 60 * 24 * 365, 8762)])
def test_post_age_has_a_bucket_for_each_step_and_two_more(granularity: int, oldest: int, buckets: int) -> None:
    config = random_config(post_age_granularity_minutes=granularity, max_post_age_minutes=oldest)
    assert config.post_age_buckets == buckets


@pytest.mark.parametrize("name", PRESETS)
def test_survives_json(name: str) -> None:
    config = with_preset(random_config(context_attention="bidirectional"), name)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_what_the_published_ranker_lacks_is_not_written() -> None:
    """Digests are taken over these values: a manifest from before there were other trunks must not change."""
    written = list(random_config(code_levels=0, code_values=0).to_dict())
    assert written[-3:] == ["post_age_granularity_minutes", "right_anchored", "context_attention"]
    assert len(written) == 23
    assert set(written).isdisjoint(TRUNK_OPTIONS + CODE_OPTIONS)
    further = random_config(sandwich=False, input_scale=8.0).to_dict().keys() - written
    assert further == {"sandwich", "input_scale", "code_levels", "code_values"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unheard_of": 1}, "unknown keys: unheard_of"),
        ({"width": "128"}, "architecture.width must be of type int"),
        ({"layers": True}, "architecture.layers must be of type int"),
        ({"width": 0}, "width must be positive"),
        ({"norm_epsilon": -1e-5}, "norm_epsilon must lie in 1e-30 … 1e.30"),
        ({"attention_cap": float("inf")}, "attention_cap must lie in 1e-30 … 1e.30"),
        ({"attention_multiplier": float("nan")}, r"attention_multiplier must be at most 1e\+30 either way"),
        ({"rope_base": 10**300}, "rope_base must lie in 1e-30 … 1e.30, got 10000000000000000000…$"),
        ({"kv_heads": 3}, "multiple of kv_heads"),
        ({"code_levels": 65}, "code_levels must lie in 0 … 64, got 65"),
        ({"code_values": -1}, "code_values must lie in 0 … 1048576, got -1"),
        ({"code_values": 0}, r"code_levels \(3\) and code_values \(0\) must both be 0 or both be positive"),
        ({"head_width": 15}, "head_width must be even, got 15"),
        ({"activation": "relu" * 100}, "activation must be 'gelu_tanh' or 'gelu' or 'silu', got 'relu[relu]{59}$"),
        ({"attention_cap": "30"}, r"attention_cap must be of type float \| None, got str"),
        ({"positions": "sinusoidal", "width": 63}, "width must be even for sinusoidal positions, got 63"),
        ({"input_scale": None}, "input_scale must be of type float, got NoneType"),
        ({"explicit_ffn_width": 0}, "explicit_ffn_width must be positive and at most 4194304, got 0"),
        ({"explicit_ffn_width": 2**23}, "explicit_ffn_width must be positive and at most 4194304, got 8388608"),
        ({"user_hashes": 5}, "user_hashes must be an object"),
        ({"history_length": 10**6}, "history_length must be positive and at most 32768, got 1000000"),
        ({"continuous_actions": -1}, "continuous_actions must lie in 0 … 4096"),
        ({"max_post_age_minutes": 2**27}, "post_age_buckets must be positive and at most 65536"),
        (
            {"kv_heads": 1024, "query_heads": 1024, "head_width": 1024, "history_length": 32768},
            "keys and values a context",
        ),
    ],
)
def test_refuses_with_the_field(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict({**random_config().to_dict(), **change})


def test_hash_functions_must_pair_up() -> None:
    with pytest.raises(ConfigError, match="same non-zero length"):
        HashSpec((1, 2), (3,), 97, 10)
    with pytest.raises(ConfigError, match="at most 16 hash functions"):
        HashSpec((1,) * 17, (1,) * 17, 97, 10)
    with pytest.raises(ConfigError, match="modulus"):
        replace(random_config().user_hashes, modulus=2**63)
    for scales in ("12", [1, 2.0], [True, 2]):
        values = random_config().to_dict()
        values["user_hashes"]["scales"] = scales
        with pytest.raises(ConfigError, match=r"architecture.user_hashes.scales must be a list of integers"):
            ModelConfig.from_dict(values)


def test_70_billion_parameters_and_32_768_events_are_allowed() -> None:
    """The shape of a Llama 3 70B, as an example of what is far beyond a ranker of today."""
    shape = {"width": 8192, "layers": 80, "query_heads": 64, "kv_heads": 8, "head_width": 128, "widening": 5.25}
    assert random_config(**shape, history_length=32_768, candidate_length=32_768).ffn_width == 28_672


@pytest.mark.parametrize(
    "changes",
    [{"has_dwell": True}, {"has_post_age": True}, {"continuous_actions": 2}, {"context_attention": "bidirectional"}],
)
def test_what_two_towers_cannot_have_is_refused(changes: dict[str, object]) -> None:
    values = random_config(has_dwell=False, has_post_age=False, continuous_actions=0).to_dict()
    config = RetrievalConfig.from_dict(values)
    assert RetrievalConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match="a retrieval model has neither"):
        RetrievalConfig.from_dict(values | changes)
    with pytest.raises(ConfigError, match="unknown keys: linear_projection"):
        ModelConfig.from_dict(config.to_dict())


# trunks by name


def test_grok_is_what_a_config_is_by_default() -> None:
    config = random_config()
    assert {name: getattr(config, name) for name in GROK} == GROK
    assert with_preset(with_preset(config, "vanilla"), "grok").to_dict() == random_config(kv_heads=4).to_dict()


def test_the_fields_of_a_trunk_follow_the_shape() -> None:
    shape = random_config(width=72, query_heads=4, head_width=16)
    gemma, vanilla = with_preset(shape, "gemma"), with_preset(shape, "vanilla")
    assert (gemma.input_scale, gemma.attention_multiplier, gemma.ffn_width) == (math.sqrt(72), 0.25, 576)
    assert (vanilla.head_width, vanilla.kv_heads, vanilla.ffn_width) == (18, 4, 288)
    assert with_preset(shape, "gemma2").attention_multiplier == 1 / 16
    assert (with_preset(shape, "llama").attention_multiplier, vanilla.attention_multiplier) == (0.25, 18**-0.5)


def test_shapes_that_a_trunk_cannot_have_are_refused() -> None:
    with pytest.raises(ConfigError, match="no preset 'gemma3'; there are grok, gemma, gemma2, llama, vanilla"):
        with_preset(random_config(), "gemma3")
    with pytest.raises(ConfigError, match="history_length must be at most 4094, got 4095"):
        with_preset(random_config(history_length=4095), "gemma2")
    assert with_preset(random_config(history_length=4094), "gemma2").attention_cap == 50
    with pytest.raises(ConfigError, match=r"divides width \(66\) by query_heads \(4\)"):
        with_preset(random_config(width=66), "vanilla")
