"""Decoder directories as `transformers` writes them: what we read computes what `transformers` computes, or is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from model.layers import ranking_mask
from model.ranker import Ranker
from model.tolerances import TRUNKS
from tests import trunk_goldens
from tests.model.builders import random_config
from weights.errors import CheckpointError
from weights.published.decoder import Decoder, decoder_fields

TYPES = ("gemma", "gemma2", "llama")
SHAPES: dict[str, dict[str, Any]] = {
    "gemma": {"num_key_value_heads": 1, "head_dim": 24, "intermediate_size": 136},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 37, "intermediate_size": 88},
    "llama": {"num_key_value_heads": 4, "intermediate_size": 104, "rope_theta": 500.0},
}
COMMON = {
    "vocab_size": 11,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
CONTEXT, CANDIDATES = 9, 6


def written(kind: str, out: Path) -> Any:
    """A random model of this type in `out`; it returns the model itself. Norm scales lie where trained ones do."""
    transformers = pytest.importorskip("transformers", reason="the dev extra's transformers is not installed")
    prefix = {"gemma": "Gemma", "gemma2": "Gemma2", "llama": "Llama"}[kind]
    config = getattr(transformers, f"{prefix}Config")(**COMMON | SHAPES[kind])
    torch.manual_seed(len(kind))
    model = getattr(transformers, f"{prefix}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.7, 1.3).sub_(0.0 if kind == "llama" else 1.0)
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(out)
    return model


@pytest.fixture(scope="module", params=TYPES)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    out = tmp_path_factory.mktemp(request.param)
    return request.param, written(request.param, out), out


def ranker(directory: Path) -> Ranker:
    """A ranker with the directory's trunk and final norm."""
    opened = Decoder(directory)
    model = Ranker(replace(random_config(), **opened.fields)).requires_grad_(False)
    model.load_state_dict(opened.tensors(), strict=False)
    return model


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_decoder_ranks_as_transformers_does(decoder: tuple[str, Any, Path], dtype: torch.dtype) -> None:
    """Its own forward with our mask, and all candidates on one position, is isolated ranking."""
    kind, theirs, directory = decoder
    ours, tokens = ranker(directory), CONTEXT + CANDIDATES
    x = torch.randn(1, tokens, COMMON["hidden_size"], generator=torch.Generator().manual_seed(5)) * 0.3
    positions = torch.arange(tokens).clamp(max=CONTEXT)
    mask = ranking_mask(CONTEXT, CANDIDATES, bidirectional=False)
    scale = ours.config.input_scale
    model = copy.deepcopy(theirs.model).to(dtype)
    additive = torch.zeros(tokens, tokens, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)[None, None]
    seen = {"full_attention": additive, "sliding_attention": additive} if kind == "gemma2" else additive
    out = model(
        inputs_embeds=(x * scale).to(dtype),
        attention_mask=seen,
        position_ids=positions[None],
        output_hidden_states=True,
    )
    *layers, final = trunk_goldens.run(ours, x[0], positions, mask, dtype, final=True)
    tolerance = TRUNKS[kind]
    limit = tolerance.final if dtype is torch.float32 else tolerance.bfloat16
    assert (final - out.last_hidden_state[0].float()).abs().max() <= limit
    assert final.abs().max() > 1
    if dtype is torch.float32:
        between = [stream[0] for stream in out.hidden_states[1:-1]]
        assert len(between) == 2
        assert all((a - b).abs().max() <= tolerance.layers for a, b in zip(layers, between, strict=False))


def test_a_decoder_in_several_files_is_the_same(decoder: tuple[str, Any, Path], tmp_path: Path) -> None:
    _, theirs, directory = decoder
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    whole, parts = Decoder(directory).tensors(), Decoder(tmp_path).tensors()
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


LLAMA = {
    "model_type": "llama", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "rms_norm_eps": 1e-6,
    "intermediate_size": 104, "hidden_act": "silu", "rope_theta": 10_000.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'; known are gemma, gemma2, llama"),
        ({"hidden_act": "relu"}, "its activation is 'relu'; known are"),
        ({"attention_bias": True}, "attention_bias is set; a trunk has biases everywhere or nowhere"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "its RoPE is scaled"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "its RoPE is scaled"),
        ({"hidden_size": None}, "hidden_size must be a positive number, got None"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a positive number, got True"),
        ({"model_type": "gemma2", "head_dim": 12}, "query_pre_attn_scalar must be a positive number, got None"),
    ],
)
def test_a_configuration_that_no_trunk_has_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        decoder_fields(LLAMA | change)


def test_the_legacy_gelu_of_gemma_is_the_approximation() -> None:
    """As transformers reads it; a Llama with `gelu` means the exact one."""
    gemma = LLAMA | {"model_type": "gemma", "head_dim": 12, "hidden_act": "gelu"}
    assert decoder_fields(gemma)["activation"] == "gelu_tanh"
    assert decoder_fields(LLAMA | {"hidden_act": "gelu"})["activation"] == "gelu"


def test_tensors_that_are_missing_or_unknown_are_named(tmp_path: Path) -> None:
    stored = trunk_goldens.decoder_directory("llama", tmp_path)
    assert "heads.norm" in Decoder(tmp_path).tensors()
    save_file(stored | {"model.layers.0.self_attn.q_norm.weight": torch.ones(12)}, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"holds tensor layers.0.self_attn.q_norm.weight, which this trunk has no place"
    ):
        Decoder(tmp_path).tensors()
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks tensor layers.1.mlp.up_proj.weight \(1 missing in all\)"):
        Decoder(tmp_path).tensors()


def test_a_directory_that_is_no_decoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        Decoder(tmp_path)
    trunk_goldens.decoder_directory("llama", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../secret.safetensors"}}')
    with pytest.raises(CheckpointError, match="no weight_map of plain file names"):
        Decoder(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(CheckpointError, match=r"model.safetensors is no safetensors file"):
        Decoder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors is not there"):
        Decoder(tmp_path)
