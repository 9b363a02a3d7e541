"""The plain layers against their formulas, written another way."""

from __future__ import annotations

import math

import torch

from model.layers import activate, attention, ranking_mask, rms_norm, rope_tables, rotate
from tests.model.builders import random_config, random_ranker


def test_rms_norm_scale_is_a_plain_factor() -> None:
    x = torch.tensor([[3.0, 4.0]])
    expected = torch.tensor([[2 * 3.0, 5 * 4.0]]) / math.sqrt(12.5 + 1e-5)
    torch.testing.assert_close(rms_norm(x, torch.tensor([2.0, 5.0]), 1e-5), expected)
    assert rms_norm(x.bfloat16(), torch.zeros(2), 1e-5).dtype is torch.bfloat16
    assert not rms_norm(x, torch.zeros(2), 1e-5).any()


def test_rope_turns_half_split_pairs_as_complex_numbers() -> None:
    x = torch.randn(1, 5, 2, 8, dtype=torch.float32)
    positions = torch.tensor([[0, 1, 7, 128, 1023]])
    cos, sin = rope_tables(positions, 8, 10000.0)
    pairs = torch.complex(*(half.double() for half in x.chunk(2, -1)))
    angles = positions[..., None].double() * 10000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[..., None, :]
    torch.testing.assert_close(
        rotate(x, cos, sin).double(), torch.cat((turned.real, turned.imag), -1), atol=1e-4, rtol=0
    )


def test_attention_caps_before_it_masks_and_knows_no_square_root() -> None:
    """One query, two keys, by hand: a huge logit is worth no more than the cap, and the masked key nothing."""
    query, key = torch.tensor([[[[100.0]]]]), torch.tensor([[[[100.0]], [[0.5]], [[999.0]]]])
    value = torch.tensor([[[[1.0]], [[0.0]], [[77.0]]]])
    mask = torch.tensor([[[True, True, False]]])
    weights = [math.exp(30 * math.tanh(0.125 * q / 30)) for q in (100 * 100, 100 * 0.5)]
    actual = attention(query, key, value, mask, 0.125, 30.0)
    torch.testing.assert_close(actual.squeeze(), torch.tensor(weights[0] / sum(weights)))


def test_query_heads_share_keys_in_neighbouring_groups() -> None:
    query, key = torch.randn(1, 3, 4, 6), torch.randn(1, 3, 2, 6)
    mask = torch.ones(1, 3, 3, dtype=torch.bool)
    grouped = attention(query, key, key, mask, 0.125, 30.0)
    for head in range(4):
        alone = attention(
            query[:, :, head : head + 1], *([key[:, :, head // 2 : head // 2 + 1]] * 2), mask, 0.125, 30.0
        )
        torch.testing.assert_close(grouped[:, :, head : head + 1], alone)


def test_mask_is_the_picture() -> None:
    picture = """10000
                 11000
                 11100
                 11110
                 11101"""
    expected = torch.tensor([[mark == "1" for mark in line.strip()] for line in picture.splitlines()])
    assert torch.equal(ranking_mask(3, 2, bidirectional=False), expected)
    expected[:3, :3] = True
    assert torch.equal(ranking_mask(3, 2, bidirectional=True), expected)


def test_gate_is_the_tanh_gelu_not_erf() -> None:
    x = torch.tensor([[1.7]])
    expected = 0.5 * 1.7 * (1 + math.tanh(math.sqrt(2 / math.pi) * (1.7 + 0.044715 * 1.7**3)))
    erf = 0.5 * 1.7 * (1 + math.erf(1.7 / math.sqrt(2)))
    actual = activate(x, "gelu_tanh").item()
    assert abs(actual - expected) < 1e-6 < abs(actual - erf)
    assert abs(activate(x, "gelu").item() - erf) < 1e-6
    assert abs(activate(x, "silu").item() - 1.7 / (1 + math.exp(-1.7))) < 1e-6


def test_random_weights_differ_from_each_other() -> None:
    """Equal rows would hide every wrong look-up from the tests that use them."""
    for name, parameter in random_ranker(random_config()).named_parameters():
        spread, mean = parameter.std().item(), parameter.mean().item()
        assert abs(mean - (1.0 if name.endswith("norm") else 0.0)) < spread, name
