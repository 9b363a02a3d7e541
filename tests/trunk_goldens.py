"""The recorded trunks of other implementations: weights, inputs and hidden states of every layer. Not a test itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from model.config import ModelConfig
from model.layers import ranking_mask
from model.presets import with_preset
from model.ranker import Ranker
from model.trunk import normed
from tests.model.builders import random_config
from weights.published.decoder import as_ours, our_names

GOLDEN = Path(__file__).parent / "golden/trunks"
NAMES = ("gemma", "gemma2", "llama", "vanilla")
MASKS = ("causal", "ranking")


def arrays(name: str, file: str) -> dict[str, np.ndarray[Any, Any]]:
    """One file of a golden."""
    with np.load(GOLDEN / name / f"{file}.npz", allow_pickle=False) as stored:
        return dict(stored)


def ranker(name: str) -> tuple[Ranker, int]:
    """A ranker whose trunk and final norm are the golden's, and the length of its context."""
    weights = {key: torch.from_numpy(value) for key, value in arrays(name, "weights").items()}
    facts = json.loads((GOLDEN / name / "preset.json").read_text())
    first = "layers.0.linear1.weight" if name == "vanilla" else "model.layers.0.mlp.gate_proj.weight"
    ffn_width, width = weights[first].shape
    queries = width if name == "vanilla" else weights["model.layers.0.self_attn.q_proj.weight"].shape[0]
    shape = random_config(
        width=width, layers=facts["layers"], query_heads=facts["heads"], kv_heads=facts["kv_heads"],
        head_width=queries // facts["heads"], history_length=facts["context"] - 1,
    )  # fmt: skip
    config = replace(with_preset(shape, name), attention_multiplier=facts["multiplier"], explicit_ffn_width=ffn_width)
    model = Ranker(config).requires_grad_(False)
    named = dict(vanilla_tensors(weights, config) if name == "vanilla" else decoder_tensors(weights, config, name))
    missing, unknown = model.load_state_dict(named, strict=False)
    assert not unknown
    assert not [key for key in missing if key.startswith("trunk.")]
    return model, facts["context"]


def decoder_tensors(weights: Mapping[str, Tensor], config: ModelConfig, name: str) -> Iterator[tuple[str, Tensor]]:
    for theirs, ours in our_names(name, config.layers).items():
        yield ours, as_ours(weights[f"model.{theirs}"], ours, name)


def vanilla_tensors(weights: Mapping[str, Tensor], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """`torch.nn.TransformerEncoder`'s."""
    names = {"self_attn.out_proj": "output", "linear1": "ffn_gate", "linear2": "ffn_output"}
    for i in range(config.layers):
        theirs, ours = f"layers.{i}", f"trunk.layers.{i}"
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            parts = weights[f"{theirs}.self_attn.in_proj_{kind}"].chunk(3)
            for part, name in zip(parts, ("query", "key", "value"), strict=True):
                yield f"{ours}.{name}{suffix}", part.T if suffix == "" else part
            for their_name, name in names.items():
                tensor = weights[f"{theirs}.{their_name}.{kind}"]
                yield f"{ours}.{name}{suffix}", tensor.T if suffix == "" else tensor
            yield f"{ours}.attention_norm{suffix}", weights[f"{theirs}.norm1.{kind}"]
            yield f"{ours}.ffn_norm{suffix}", weights[f"{theirs}.norm2.{kind}"]


def decoder_directory(name: str, out: Path, **changes: Any) -> dict[str, Tensor]:
    """A golden as a Hugging Face decoder in `out`, with changes to its `config.json`; it returns the stored tensors."""
    weights = {key: torch.from_numpy(value) for key, value in arrays(name, "weights").items()}
    facts = json.loads((GOLDEN / name / "preset.json").read_text())
    ffn_width, width = weights["model.layers.0.mlp.gate_proj.weight"].shape
    head_dim = weights["model.layers.0.self_attn.q_proj.weight"].shape[0] // facts["heads"]
    values = {
        "model_type": name, "hidden_size": width, "num_hidden_layers": facts["layers"], "intermediate_size": ffn_width,
        "num_attention_heads": facts["heads"], "num_key_value_heads": facts["kv_heads"], "head_dim": head_dim,
        "rms_norm_eps": 1e-5 if name == "llama" else 1e-6, "rope_theta": 10_000.0,
        "hidden_act": "silu" if name == "llama" else "gelu_pytorch_tanh",
    }  # fmt: skip
    if name == "gemma2":
        values |= {
            "query_pre_attn_scalar": facts["multiplier"] ** -2,
            "attn_logit_softcapping": 50.0,
            "sliding_window": 4096,
        }
    out.mkdir(exist_ok=True)
    (out / "config.json").write_text(json.dumps(values | changes))
    stored = weights | {"model.embed_tokens.weight": torch.zeros(3, width), "lm_head.weight": torch.zeros(3, width)}
    save_file({key: tensor.contiguous() for key, tensor in stored.items()}, out / "model.safetensors")
    return stored


@torch.inference_mode()
def run(model: Ranker, x: Tensor, positions: Tensor, mask: Tensor, dtype: torch.dtype, final: bool) -> list[Tensor]:
    """x `[T, D]` through the trunk: the stream after each layer, the last one normed if `final`. Each fp32 `[T, D]`."""
    streams: list[Tensor] = []
    hidden = model.trunk(
        x[None].to(dtype), positions[None], mask[None],
        lambda seen: streams.append(seen.stream + seen.attention_update + seen.ffn_update),
    )  # fmt: skip
    last = normed(model.heads, "norm", hidden, model.config) if final else hidden
    return [stream[0].float() for stream in [*streams, last]]


def mask_of(kind: str, context: int, length: int) -> Tensor:
    return ranking_mask(
        length if kind == "causal" else context, 0 if kind == "causal" else length - context, bidirectional=False
    )
