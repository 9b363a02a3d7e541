"""The plain trunk against what other implementations computed: their hidden states of every layer, causal and ranking mask."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from model.layers import attention_weights, rms_norm, soft_cap
from model.presets import with_preset
from model.ranker import Ranker
from model.synthetic import random_ranker
from model.tolerances import TRUNKS
from model.trunk import Seen
from tests import trunk_goldens as goldens
from tests.model.builders import random_config


def distance(ours: Tensor, recorded: np.ndarray) -> float:  # type: ignore[type-arg]
    assert ours.shape == recorded.shape
    return float(np.abs(ours.numpy() - recorded).max())


def streams(name: str, kind: str, dtype: torch.dtype = torch.float32, model: Ranker | None = None) -> list[Tensor]:
    whole, context = goldens.ranker(name)
    expected = goldens.arrays(name, "expected")
    x, positions = torch.from_numpy(expected["x"]), torch.from_numpy(expected[f"{kind}/positions"])
    mask = goldens.mask_of(kind, context, len(x))
    return goldens.run(model or whole, x, positions, mask, dtype, final=name != "vanilla")


@pytest.mark.parametrize("kind", goldens.MASKS)
@pytest.mark.parametrize("name", goldens.NAMES)
def test_every_layer_is_the_other_implementations(name: str, kind: str) -> None:
    expected, tolerance = goldens.arrays(name, "expected"), TRUNKS[name]
    *layers, final = streams(name, kind)
    assert distance(torch.stack(layers), expected[f"{kind}/hidden_fp32"]) <= tolerance.layers
    assert distance(final, expected[f"{kind}/final_fp32"]) <= tolerance.final
    rough = distance(streams(name, kind, torch.bfloat16)[-1], expected[f"{kind}/final_bf16"])
    assert tolerance.layers < rough <= tolerance.bfloat16


@torch.inference_mode()
@pytest.mark.parametrize("kind", goldens.MASKS)
@pytest.mark.parametrize("name", [name for name in goldens.NAMES if name != "vanilla"])
def test_every_attention_weight_is_the_other_implementations(name: str, kind: str) -> None:
    model, context = goldens.ranker(name)
    expected, config, weights = goldens.arrays(name, "expected"), model.config, list[Tensor]()
    x, positions = torch.from_numpy(expected["x"]), torch.from_numpy(expected[f"{kind}/positions"])
    mask = goldens.mask_of(kind, context, len(x))[None]

    def watch(seen: Seen) -> None:
        factor, cap, form = config.attention_multiplier, config.attention_cap, config.cap_form
        weights.append(attention_weights(seen.query, seen.key, mask, factor, cap, form)[0])

    model.trunk(x[None], positions[None], mask, watch)
    assert distance(torch.stack(weights), expected[f"{kind}/attention_fp32"]) <= TRUNKS[name].final


@pytest.mark.parametrize(
    ("name", "change", "least"),
    [
        ("gemma", {"activation": "gelu"}, 1e-4),
        ("gemma2", {"attention_cap": None}, 1e-2),
        ("gemma2", {"input_scale": 1.0}, 1e-2),
        ("llama", {"attention_cap": None}, 1e-3),
        ("llama", {"attention_multiplier": 0.125}, 1e-2),
        ("vanilla", {"activation": "gelu_tanh"}, 1e-4),
    ],
)
def test_the_tolerance_tells_wrong_parts_apart(name: str, change: dict[str, object], least: float) -> None:
    """Negative control: one part of another trunk is far outside."""
    model, _ = goldens.ranker(name)
    wrong = Ranker(replace(model.config, **change)).requires_grad_(False)
    wrong.load_state_dict(model.state_dict())
    found = distance(streams(name, "ranking", model=wrong)[-1], goldens.arrays(name, "expected")["ranking/final_fp32"])
    assert found > least > 5 * TRUNKS[name].final


@torch.inference_mode()
@pytest.mark.parametrize("name", goldens.NAMES)
def test_a_candidate_is_alone_with_its_context(name: str) -> None:
    """All candidates on one position: another candidate in the list moves nothing, a change of the context all of them."""
    model, context = goldens.ranker(name)
    expected = goldens.arrays(name, "expected")
    x, positions = torch.from_numpy(expected["x"]), torch.from_numpy(expected["ranking/positions"])
    assert set(positions[context:].tolist()) == {context}
    mask = goldens.mask_of("ranking", context, len(x))

    def rows(changed: int) -> Tensor:
        tokens = x.clone()
        tokens[changed] = tokens[changed].flip(0)  # a constant added would be invisible to LayerNorm
        return goldens.run(model, tokens, positions, mask, torch.float32, final=False)[-1]

    before = goldens.run(model, x, positions, mask, torch.float32, final=False)[-1]
    moved = (rows(context + 2) - before).abs().amax(-1)
    assert moved[context + 2] > 0.01
    assert not torch.cat((moved[: context + 2], moved[context + 3 :])).any()
    assert (rows(0) - before)[context:].abs().amax(-1).min() > 1e-4


class NoGenerator:
    """Of a device that draws nothing."""

    def __init__(self, device: str) -> None:
        assert device == "meta"

    def manual_seed(self, seed: int) -> None:
        """Nothing to seed."""


def test_a_random_ranker_is_for_scores_alone_and_lies_where_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(each.requires_grad for each in random_ranker(random_config()).parameters())
    monkeypatch.setattr(torch, "Generator", NoGenerator)
    ranker = random_ranker(random_config(), device="meta")
    assert all(each.is_meta for each in (*ranker.parameters(), ranker.mask(3, torch.ones(2, 5, device="meta").bool())))


def test_softsign_bounds_what_it_is_given_and_keeps_small_numbers() -> None:
    logits = torch.tensor([-1e6, -80.0, -0.01, 0.0, 0.01, 80.0, 1e6])
    ours = soft_cap(logits, 80.0, "softsign")
    torch.testing.assert_close(
        ours, torch.tensor([-79.9936, -40.0, -0.01, 0.0, 0.01, 40.0, 79.9936]), atol=2e-6, rtol=1e-6
    )
    assert torch.equal(soft_cap(logits, None), logits)


@torch.inference_mode()
def test_every_part_of_phoenix_2026_is_its_definition() -> None:
    """One layer written out once more in float64, from the parts that are known: docs/trunks.md."""
    config = with_preset(random_config(layers=1), "phoenix-2026")
    layer = random_ranker(config, 4).double().trunk.decoder_layers()[0]
    heads, group, width = config.query_heads, config.query_heads // config.kv_heads, config.head_width
    x = torch.randn(9, config.width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = torch.ones(9, 9).tril().bool()
    normal = rms_norm(x, layer.attention_norm, 1e-5).double()
    query, key, value = ((normal @ weight).view(9, -1, width) for weight in (layer.query, layer.key, layer.value))
    query, key = (
        part * (part.square().mean(-1, keepdim=True) + 1e-5) ** -0.5 * scale
        for part, scale in ((query, layer.query_norm), (key, layer.key_norm))
    )
    turn = torch.arange(9)[:, None].double() * 10_000.0 ** (-torch.arange(0, width, 2).double() / width)

    def rotated(part: Tensor) -> Tensor:
        turned = torch.complex(*part.chunk(2, -1)) * torch.polar(torch.ones_like(turn), turn)[:, None]
        return torch.cat((turned.real, turned.imag), -1)

    query, key = rotated(query), rotated(key)
    mixed = torch.zeros(9, heads, width, dtype=torch.float64)
    for head in range(heads):
        logits = query[:, head] @ key[:, head // group].T * 128**0.5 / width
        logits = (logits / (1 + logits.abs() / 80)).masked_fill(~mask, -torch.inf)
        mixed[:, head] = logits.softmax(-1) @ value[:, head // group]
    stream = x + mixed.flatten(1) @ layer.output
    inner = torch.nn.functional.gelu(
        rms_norm(stream, layer.ffn_norm, 1e-5).double() @ layer.ffn_gate, approximate="tanh"
    )
    expected = stream + inner @ layer.ffn_output

    trunk = random_ranker(config, 4).trunk
    actual = trunk(x.float()[None], torch.arange(9)[None], mask[None])[0]
    assert (actual - expected).abs().max() < 2e-5
    assert not hasattr(layer, "ffn_value")
    assert not hasattr(layer, "attention_post_norm")
