"""Reads a Hugging Face decoder (`config.json` and safetensors; Gemma, Gemma 2, Llama) as the trunk of a ranker.

Source: the configuration and modelling files of these three in transformers; docs/trunks.md says how they differ. A language
model's embedding and vocabulary head have no place in a ranker and are left out; anything else unknown is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from weights.errors import CheckpointError, reason_of
from weights.format.manifest import parse_json_object

CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
MODEL_TYPES = ("gemma", "gemma2", "llama")

_LAYER = {
    "query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj", "output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_value": "mlp.up_proj", "ffn_output": "mlp.down_proj",
    "attention_norm": "input_layernorm",
}  # fmt: skip
_PRE_NORM = _LAYER | {"ffn_norm": "post_attention_layernorm"}
_SANDWICH = _LAYER | {  # here `post_attention_layernorm` is another norm than above
    "attention_post_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}  # fmt: skip
_NO_PLACE = re.compile(r"embed_tokens\.weight|lm_head\.weight|layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu"}


class Decoder:
    """An opened decoder directory. Raises CheckpointError, which names file and reason.

    `fields` are the `ModelConfig` fields that it sets; `window` is how far back its windowed layers see, None if all see everything.
    """

    def __init__(self, source: Path) -> None:
        self.source = source
        path = source / CONFIG_FILE
        try:
            values = parse_json_object(path.read_bytes())
            self.model_type = _word(values, "model_type", MODEL_TYPES)
            self.fields = decoder_fields(values)
            self.window = _number(values, "sliding_window", int) if self.model_type == "gemma2" else None
            self._files = self._find_files()
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"{path if path.exists() else source}: {reason_of(error)}.") from error

    def tensors(self) -> dict[str, Tensor]:
        """The trunk's tensors and the final norm, under our names, fp32 `[in, out]`; Gemma's `1 + w` is folded into the scale."""
        names = our_names(self.model_type, self.fields["layers"])
        missing = sorted(set(names) - set(self._files))
        if missing:
            raise CheckpointError(f"{self.source} lacks tensor {missing[0]} ({len(missing)} missing in all).")
        unknown = sorted(name for name in set(self._files) - set(names) if not _NO_PLACE.fullmatch(name))
        if unknown:
            raise CheckpointError(f"{self.source} holds tensor {unknown[0]}, which this trunk has no place for.")
        return {ours: self._read(theirs, ours) for theirs, ours in names.items()}

    def _read(self, name: str, ours: str) -> Tensor:
        file, stored = self._files[name]
        with safe_open(file, "pt") as opened:
            return as_ours(opened.get_tensor(stored), ours, self.model_type)

    def _find_files(self) -> dict[str, tuple[Path, str]]:
        """The file and stored name of each tensor, by its name without the prefix `model.`."""
        files = [self.source / WEIGHTS_FILE]
        if (self.source / INDEX_FILE).exists():
            listed = parse_json_object((self.source / INDEX_FILE).read_bytes()).get("weight_map")
            if not isinstance(listed, dict) or any(Path(str(file)).name != file for file in listed.values()):
                raise CheckpointError(f"{INDEX_FILE} has no weight_map of plain file names")
            files = [self.source / file for file in sorted(set(listed.values()))]
        found: dict[str, tuple[Path, str]] = {}
        for file in files:
            if not file.exists():
                raise CheckpointError(f"{file.name} is not there")
            try:
                with safe_open(file, "pt") as opened:
                    found |= {name.removeprefix("model."): (file, name) for name in opened.keys()}  # noqa: SIM118
            except SafetensorError as error:
                raise CheckpointError(f"{file.name} is no safetensors file ({error})") from error
        return found


def our_names(model_type: str, layers: int) -> dict[str, str]:
    """Map the names of a decoder's trunk and final norm, without the prefix `model.`, to ours."""
    layer = _SANDWICH if model_type == "gemma2" else _PRE_NORM
    names = {
        f"layers.{i}.{theirs}.weight": f"trunk.layers.{i}.{ours}"
        for i in range(layers)
        for ours, theirs in layer.items()
    }
    return names | {"norm.weight": "heads.norm"}


def as_ours(tensor: Tensor, name: str, model_type: str) -> Tensor:
    """Convert a decoder's tensor to our tensor `name`: fp32, matrices `[in, out]`, `1 + w` for Gemma's norm scales."""
    if tensor.ndim == 2:
        return tensor.float().T
    return tensor.float() + (model_type.startswith("gemma") and name.endswith("norm"))


def decoder_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a decoder's `config.json` to `ModelConfig` fields. Raises CheckpointError for anything that a trunk does not support."""
    kind = _word(values, "model_type", MODEL_TYPES)
    width, heads = _number(values, "hidden_size", int), _number(values, "num_attention_heads", int)
    head_width = _number(values, "head_dim", int, width // max(heads, 1) if kind == "llama" else None)
    for name in ("attention_bias", "mlp_bias"):
        if values.get(name):
            raise CheckpointError(f"{name} is set; a trunk has biases everywhere or nowhere")
    fields: dict[str, Any] = {
        "width": width, "layers": _number(values, "num_hidden_layers", int), "query_heads": heads,
        "kv_heads": _number(values, "num_key_value_heads", int, heads), "head_width": head_width,
        "explicit_ffn_width": _number(values, "intermediate_size", int), "activation": _activation(values, kind),
        "norm": "rms", "norm_epsilon": _number(values, "rms_norm_eps", float), "sandwich": kind == "gemma2",
        "positions": "rope", "rope_base": _rope_base(values), "attention_multiplier": max(head_width, 1) ** -0.5,
        "attention_cap": None, "cap_form": "tanh", "qk_norm": False, "gated": True, "biases": False,
        "input_scale": 1.0 if kind == "llama" else width**0.5, "context_attention": "causal",
    }  # fmt: skip
    if kind == "gemma2":
        fields["attention_multiplier"] = _number(values, "query_pre_attn_scalar", float) ** -0.5
        fields["attention_cap"] = _number(values, "attn_logit_softcapping", float)
    return fields


def _activation(values: Mapping[str, Any], kind: str) -> str:
    name = values.get("hidden_activation") or values.get("hidden_act")
    if kind == "gemma" and name == "gelu":
        return "gelu_tanh"  # early Gemma configurations say "gelu", but the weights were trained with the approximation
    if name not in _ACTIVATIONS:
        raise CheckpointError(f"its activation is {str(name)[:40]!r}; known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _rope_base(values: Mapping[str, Any]) -> float:
    """`rope_theta`, which transformers 5 keeps in `rope_parameters`."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise CheckpointError("its RoPE is scaled, which a trunk here cannot be")
    return float(_number(rope if "rope_theta" in rope else values, "rope_theta", float, 10_000.0))


def _number(values: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    value = values.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int) or value <= 0:
        raise CheckpointError(f"{name} must be a positive number, got {str(value)[:40]}")
    return kind(value)


def _word(values: Mapping[str, Any], name: str, known: tuple[str, ...]) -> str:
    value = values.get(name)
    if value not in known:
        raise CheckpointError(f"{name} is {str(value)[:40]!r}; known are {', '.join(known)}")
    return str(value)
