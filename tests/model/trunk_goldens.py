"""The recorded trunks of other implementations: weights, inputs and hidden states of every layer. Not a test itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.config import ModelConfig
from model.layers import make_recsys_attn_mask
from model.presets import with_preset
from model.ranker import Ranker
from tests.model.builders import random_config

GOLDEN = Path(__file__).parents[1] / "golden/trunks"
NAMES = ("gemma", "gemma2", "llama", "vanilla")
MASKS = ("causal", "ranking")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest absolute differences: fp32 after the final norm and after each layer, bf16 after the final norm. The values are up to 4
    (vanilla 10), between layers up to 28."""

    final: float
    layers: float
    bfloat16: float


TOLERANCES = {
    "gemma": Tolerance(final=1e-5, layers=4e-5, bfloat16=0.15),
    "gemma2": Tolerance(final=1e-5, layers=4e-5, bfloat16=0.15),
    "llama": Tolerance(final=2e-5, layers=4e-5, bfloat16=0.3),
    "vanilla": Tolerance(final=1e-5, layers=1e-5, bfloat16=0.15),
}
LINEAR = {
    "self_attn.q_proj": "query", "self_attn.k_proj": "key", "self_attn.v_proj": "value", "self_attn.o_proj": "output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_value", "mlp.down_proj": "ffn_output",
}  # fmt: skip
PRE_NORM = {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
SANDWICH = {  # here `post_attention_layernorm` is another norm
    "input_layernorm": "attention_norm", "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "ffn_post_norm",
}  # fmt: skip


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
    """A decoder of `transformers`; Gemma stores w where it multiplies with 1 + w."""
    offset = 1.0 if name.startswith("gemma") else 0.0
    for i in range(config.layers):
        for theirs, ours in LINEAR.items():
            yield f"trunk.layers.{i}.{ours}", weights[f"model.layers.{i}.{theirs}.weight"].T
        for theirs, ours in (SANDWICH if name == "gemma2" else PRE_NORM).items():
            yield f"trunk.layers.{i}.{ours}", weights[f"model.layers.{i}.{theirs}.weight"] + offset
    yield "heads.norm", weights["model.norm.weight"] + offset


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


@torch.inference_mode()
def run(model: Ranker, x: Tensor, positions: Tensor, mask: Tensor, dtype: torch.dtype, final: bool) -> list[Tensor]:
    """x `[T, D]` through the trunk: the stream after each layer, the last one normed if `final`. Each fp32 `[T, D]`."""
    streams: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda module, inputs, output: streams.append(output))
        for layer in model.trunk.layers
    ]
    hidden = model.trunk(x[None].to(dtype), positions[None], mask[None])
    for hook in hooks:
        hook.remove()
    last = model.heads.norm(hidden) if final else hidden
    return [stream[0].float() for stream in [*streams, last]]


def mask_of(kind: str, context: int, length: int) -> Tensor:
    """The mask of one of `MASKS`."""
    return make_recsys_attn_mask(length, length if kind == "causal" else context)
