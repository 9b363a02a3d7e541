"""The plain model: its mask and names, its trunks against what other implementations computed, and what explains its scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from model.dense import candidate_attention
from model.layers import make_recsys_attn_mask
from model.names import checkpoint_parameters
from model.ranker import Ranker
from tests.model import trunk_goldens as goldens
from tests.model.builders import random_config, random_ranker, random_request
from weights.checkpoint import Checkpoint, load_any

ROOT = Path(__file__).resolve().parents[2]


def test_mask_is_the_picture() -> None:
    picture = """10000
                 11000
                 11100
                 11110
                 11101"""
    expected = torch.tensor([[mark == "1" for mark in line.strip()] for line in picture.splitlines()])
    assert torch.equal(make_recsys_attn_mask(5, 3), expected)
    expected[:3, :3] = True
    assert torch.equal(make_recsys_attn_mask(5, 3, bidirectional=True), expected)


@pytest.mark.parametrize("name", ["demo", "demo-towers"])
def test_parameters_have_the_names_of_the_checkpoints_in_use(name: str) -> None:
    """Those of the files that were written before the model had modules for its layers."""
    loaded = load_any(ROOT / "weights" / name)
    model = loaded.ranker if isinstance(loaded, Checkpoint) else loaded.towers
    state, named = model.state_dict(), dict(checkpoint_parameters(model))
    assert list(state) == list(named)
    assert set(named) == set(loaded.manifest.tensors)
    for file in (ROOT / "weights" / name).glob("*.safetensors"):
        with safe_open(file, "pt") as stored:
            for tensor in stored.keys():  # noqa: SIM118
                assert torch.equal(stored.get_tensor(tensor), state[tensor]), tensor


def test_random_weights_all_differ_and_need_no_gradient() -> None:
    """Equal rows would hide every wrong look-up from the tests that use them."""
    for name, parameter in checkpoint_parameters(random_ranker(random_config())):
        spread, mean = parameter.std().item(), parameter.mean().item()
        assert abs(mean - (1.0 if name.endswith("norm") else 0.0)) < spread, name
        assert not parameter.requires_grad


# trunks of other implementations


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
    expected, tolerance = goldens.arrays(name, "expected"), goldens.TOLERANCES[name]
    *layers, final = streams(name, kind)
    assert distance(torch.stack(layers), expected[f"{kind}/hidden_fp32"]) <= tolerance.layers
    assert distance(final, expected[f"{kind}/final_fp32"]) <= tolerance.final
    rough = distance(streams(name, kind, torch.bfloat16)[-1], expected[f"{kind}/final_bf16"])
    assert tolerance.layers < rough <= tolerance.bfloat16


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
    wrong = Ranker(replace(model.config, **change)).requires_grad_(False)  # type: ignore[arg-type]
    wrong.load_state_dict(model.state_dict())
    found = distance(streams(name, "ranking", model=wrong)[-1], goldens.arrays(name, "expected")["ranking/final_fp32"])
    assert found > least > 5 * goldens.TOLERANCES[name].final


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


# attention of candidates, to explain scores


@pytest.mark.parametrize("fields", [{}, {"right_anchored": True, "context_attention": "bidirectional"}], ids=str)
def test_attention_rows_sum_to_one_and_padding_gets_nothing(fields: dict[str, object]) -> None:
    config = random_config(**fields)
    ranker = random_ranker(config, seed=3).requires_grad_(True)
    context, candidates = random_request(config, 19, 7, seed=5)
    context.post_ids[4] = 0
    weights = candidate_attention(ranker, context, candidates)
    assert weights.shape == (config.layers, config.query_heads, 7, 21)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    assert not weights[..., 5].any(), "an event of padding"
    assert (np.delete(weights, 5, -1) > 0).all()
    assert weights.std() > 1e-3, "weights that are not all alike"


@torch.inference_mode()
def test_attention_explains_the_very_update_that_the_model_makes() -> None:
    """A candidate's update in the first layer, made again from these rows and the values, is the one that the layer adds."""
    config = random_config(layers=1)
    ranker, request = random_ranker(config, seed=3), random_request(config, 19, 7, seed=6)
    updates: list[Tensor] = []
    layer = ranker.trunk.decoder_layers()[0]
    layer.attention.register_forward_hook(lambda module, inputs, output: updates.extend((inputs[0][0], output[0])))
    weights = torch.from_numpy(candidate_attention(ranker, *request))[0]
    normed, added = updates
    value = layer.attention.value(normed).unflatten(-1, (config.kv_heads, -1)).repeat_interleave(2, 1)
    for row in range(7):
        keys = [*range(20), 20 + row]
        mixed = torch.einsum("ns,snk->nk", weights[:, row], value[keys]).flatten()
        torch.testing.assert_close(layer.attention.output(mixed), added[20 + row], atol=1e-5, rtol=0)


def test_a_slot_position_moves_attention_in_sequential_mode_only() -> None:
    config = random_config()
    ranker = random_ranker(config, seed=3)
    context, candidates = random_request(config, 9, 5, seed=7)
    alone = candidates.chunk(3, 4)
    shared = candidate_attention(ranker, context, candidates)
    np.testing.assert_allclose(shared[:, :, 3:4], candidate_attention(ranker, context, alone), atol=1e-6)
    sequential = candidate_attention(ranker, context, candidates, "sequential")
    assert np.abs(sequential[:, :, 3] - shared[:, :, 3]).max() > 1e-4
