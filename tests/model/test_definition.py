"""The plain model: its operations against their formulas, its trunks against what other implementations computed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from model.dense import candidate_attention
from model.layers import activate, attention, attention_weights, make_recsys_attn_mask, rms_norm, rope_tables, rotate
from model.names import checkpoint_parameters
from model.ranker import Ranker, by_feature, candidate_features, history_features
from tests.model import trunk_goldens as goldens
from tests.model.builders import random_config, random_ranker, random_request
from weights.checkpoint import Checkpoint, load_any

ROOT = Path(__file__).resolve().parents[2]

# operations


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
    expected = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(rotate(x, cos, sin).double(), expected, atol=1e-4, rtol=0)


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
        one, shared = query[:, :, head : head + 1], key[:, :, head // 2 : head // 2 + 1]
        alone = attention(one, shared, shared, mask, 0.125, 30.0)
        torch.testing.assert_close(grouped[:, :, head : head + 1], alone)


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


def test_gate_is_the_tanh_gelu_not_erf() -> None:
    x = torch.tensor([[1.7]])
    expected = 0.5 * 1.7 * (1 + math.tanh(math.sqrt(2 / math.pi) * (1.7 + 0.044715 * 1.7**3)))
    erf = 0.5 * 1.7 * (1 + math.erf(1.7 / math.sqrt(2)))
    actual = activate(x, "gelu_tanh").item()
    assert abs(actual - expected) < 1e-6 < abs(actual - erf)
    assert abs(activate(x, "gelu").item() - erf) < 1e-6
    assert abs(activate(x, "silu").item() - 1.7 / (1 + math.exp(-1.7))) < 1e-6


# names and features


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


def test_a_state_is_loaded_into_a_model_and_into_what_contains_it() -> None:
    ranker = random_ranker(random_config())
    state = ranker.state_dict()
    assert {"heads.norm", "heads.actions", "trunk.layers.1.query", "trunk.layers.0.ffn_gate"} <= set(state)
    other = Ranker(ranker.config)
    other.load_state_dict(state)
    assert all(torch.equal(one, two) for one, two in zip(ranker.parameters(), other.parameters(), strict=True))
    outer = torch.nn.ModuleDict({"model": Ranker(ranker.config)})
    outer.load_state_dict({f"model.{name}": tensor for name, tensor in state.items()})
    assert [name.removeprefix("model.") for name in outer.state_dict()] == list(state)
    with pytest.raises(RuntimeError, match="Unexpected"):
        other.load_state_dict(state | {"trunk.layers.0.qk_norm": torch.zeros(3)})


@pytest.mark.parametrize("changes", [{}, {"has_dwell": False}, {"has_post_age": False}], ids=str)
def test_features_lie_in_the_published_order(changes: dict[str, bool]) -> None:
    """The published concatenation: hash embeddings, actions, surface and dwell; hash embeddings, surface and age."""
    config = random_config(**changes)
    history = ["post", "author", "actions", "surface", *(["dwell"] if config.has_dwell else [])]
    candidate = ["post", "author", "surface", *(["post_age"] if config.has_post_age else [])]
    assert (list(history_features(config)), list(candidate_features(config))) == (history, candidate)
    ranker = random_ranker(config)
    rows = by_feature(ranker.tokens.history_projection, history_features(config))
    assert torch.equal(torch.cat(list(rows.values())), ranker.tokens.history_projection)
    assert torch.equal(rows["surface"], ranker.tokens.history_projection[5 * 64 : 6 * 64])


def test_random_weights_differ_from_each_other_and_need_no_gradient() -> None:
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


@torch.inference_mode()
@pytest.mark.parametrize("kind", goldens.MASKS)
@pytest.mark.parametrize("name", [name for name in goldens.NAMES if name != "vanilla"])
def test_every_attention_weight_is_the_other_implementations(name: str, kind: str) -> None:
    model, context = goldens.ranker(name)
    expected, config = goldens.arrays(name, "expected"), model.config
    x, positions = torch.from_numpy(expected["x"]), torch.from_numpy(expected[f"{kind}/positions"])
    mask = goldens.mask_of(kind, context, len(x))[None]
    hidden, rope = model.trunk.with_positions(x[None], positions[None])
    for layer, recorded in zip(model.trunk.decoder_layers(), expected[f"{kind}/attention_fp32"], strict=True):
        query, key = layer.attention.query_and_key(layer.attention_norm(hidden), rope)
        weights = attention_weights(query, key, mask, config.attention_multiplier, config.attention_cap)[0]
        assert distance(weights, recorded) <= goldens.TOLERANCES[name].final
        hidden = layer(hidden, rope, mask)


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

FIELDS = [{}, {"context_attention": "bidirectional"}, {"right_anchored": True}, {"query_heads": 2}]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
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


def test_the_position_of_a_slot_moves_the_attention_in_sequential_mode_alone() -> None:
    config = random_config()
    ranker = random_ranker(config, seed=3)
    context, candidates = random_request(config, 9, 5, seed=7)
    alone = candidates.chunk(3, 4)
    shared = candidate_attention(ranker, context, candidates)
    np.testing.assert_allclose(shared[:, :, 3:4], candidate_attention(ranker, context, alone), atol=1e-6)
    sequential = candidate_attention(ranker, context, candidates, "sequential")
    assert np.abs(sequential[:, :, 3] - shared[:, :, 3]).max() > 1e-4
