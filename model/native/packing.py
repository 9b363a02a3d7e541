"""Lays a model's weights out for the kernel: strips of columns, small features already projected. Runs once, at load."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from struct import Struct

import torch
from torch import Tensor
from torch.nn import functional

from model.batch import hash_functions, slot_period
from model.config import CandidatePositions, HashSpec, ModelConfig
from model.layers import rope_tables
from model.ranker import Ranker
from model.retrieval.towers import Towers

GRAIN, PANEL = 16, 64
Int64, UInt64, Pointer, Float = ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_float


def structure(name: str, *kinds: tuple[type, str]) -> type[ctypes.Structure]:
    """A C struct: C types, each with the names of the members that have it."""
    members = [(member, kind) for kind, names in kinds for member in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": members})


Layer = structure(
    "Layer",
    (Pointer, "attention_norm attention_post_norm ffn_norm ffn_post_norm query_key_value output gate_value ffn_output"),
)
Entity = structure("Entity", (Pointer, "table scales biases"), (Int64, "hashes modulus vocab_size"))
Model = structure(
    "Model",
    (Int64, "width layers query_heads kv_heads head_width ffn_width actions continuous tables_bf16 bidirectional silu"),
    (Int64, "surfaces age_buckets history_length positions"),
    (Int64, "candidate_position candidate_slots"),
    (Float, "attention_multiplier attention_cap norm_epsilon input_scale"),
    (Pointer, "layer"),
    (Entity, "user post author"),
    (Pointer, "user_projection history_projection candidate_projection"),
    (Pointer, "action_tokens history_surfaces candidate_surfaces dwell_input dwell_output post_ages"),
    (Pointer, "final_norm heads cosines sines"),
)
ContextJob = structure(
    "ContextJob",
    (Int64, "rows start blocks has_user first_position"),
    (UInt64, "user_id"),
    (Pointer, "keys positions post_ids author_ids surfaces actions dwell_seconds outputs"),
)
CandidateJob = structure("CandidateJob", (Int64, "rows first first_slot keys_count blocks context"), (Pointer, "keys"))
KERNEL_TAKES: dict[str, tuple[object, ...]] = {
    "norm": ("rms",), "positions": ("rope",), "cap_form": ("tanh",), "activation": ("gelu_tanh", "silu"), "gated": (True,),
    "biases": (False,), "qk_norm": (False,),
}  # fmt: skip
STRUCTS = (Layer, Entity, Model, ContextJob, CandidateJob)  # mirrored in layout.h, compared with it at load


def refusal(config: ModelConfig) -> str | None:
    """Why the kernel does not support an architecture, as a sentence; None if it does."""
    others = [name for name, known in KERNEL_TAKES.items() if getattr(config, name) not in known]
    return f"the native kernel does not know this trunk's {', '.join(others)}" if others else None


def writer(struct: type[ctypes.Structure]) -> Callable[..., bytes]:
    """A function that packs a job from its 64-bit members in order, in a fifth of the time of a ctypes object."""
    letters = {Int64: "q", UInt64: "Q", Pointer: "Q"}
    return Struct("".join(letters[field[1]] for field in struct._fields_)).pack


CONTEXT_JOB, CANDIDATE_JOB = writer(ContextJob), writer(CandidateJob)


@dataclass(slots=True)
class Packed:
    """The C model and the tensors its pointers point into, which must live as long as it does."""

    model: ctypes.Structure
    tensors: list[Tensor] = field(default_factory=list)
    layers: ctypes.Array[ctypes.Structure] | None = None


def round_up(number: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-number // step) * step


def strips(weight: Tensor, depth: int, dtype: torch.dtype, columns: int) -> Tensor:
    """A weight `[in, out]` in strips of `columns` columns, zero-padded to `depth` rows and a multiple of 64 columns.

    bf16 puts two rows of the depth side by side, as the dot-product instructions read them.
    """
    step = 2 if dtype is torch.bfloat16 else 1
    padded = pad(weight, round_up(depth, step), round_up(weight.shape[1], PANEL))
    blocks = padded.view(padded.shape[0] // step, step, padded.shape[1] // columns, columns)
    return blocks.permute(2, 0, 3, 1).to(dtype).contiguous()


def pad(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Pad with zeros below and to the right, to `[rows, columns]`."""
    return functional.pad(matrix, (0, columns - matrix.shape[1], 0, rows - matrix.shape[0]))


def gate_and_value(gate: Tensor, value: Tensor) -> Tensor:
    """`[D, F]` twice to `[D, 64 · ceil(F/32)]`: each panel holds 32 gate columns and the 32 value columns that belong to them."""
    halves = [pad(half, len(half), round_up(half.shape[1], 32)).view(len(half), -1, 32) for half in (gate, value)]
    return torch.cat(halves, -1).flatten(1)


@torch.inference_mode()
def pack(
    model: Ranker | Towers, dtype: torch.dtype, strip: int, candidate_positions: CandidatePositions = "shared"
) -> Packed:
    """The kernel's model in `dtype` (torch.float32 or torch.bfloat16). The embedding tables are pointed at, not copied.

    `strip`: how many columns the kernel reads together. Of `Towers` only the user tower is packed: contexts, no candidates or heads.
    """
    config, tokens = model.config, model.tokens
    width = round_up(config.width, GRAIN)
    packed = Packed(Model())

    def keep(tensor: Tensor) -> int:
        packed.tensors.append(tensor)
        return tensor.data_ptr()

    packed.layers = (Layer * config.layers)(*_layers(model, dtype, strip, keep))
    cosines, sines = rope_tables(
        torch.arange(config.candidate_position + config.candidate_length), config.head_width, config.rope_base
    )
    values: dict[str, object] = {
        "width": config.width, "layers": config.layers, "query_heads": config.query_heads, "kv_heads": config.kv_heads,
        "head_width": config.head_width, "ffn_width": config.ffn_width, "actions": config.actions,
        "continuous": config.continuous_actions, "tables_bf16": model.tables.user.dtype is torch.bfloat16,
        "bidirectional": config.context_attention == "bidirectional", "silu": config.activation == "silu",
        "surfaces": config.product_surfaces, "age_buckets": config.post_age_buckets, "history_length": config.history_length,
        "positions": len(cosines), "attention_multiplier": config.attention_multiplier, "attention_cap": config.attention_cap or 0.0,
        "norm_epsilon": config.norm_epsilon, "input_scale": config.input_scale, "layer": ctypes.addressof(packed.layers),
        "candidate_position": config.candidate_position, "candidate_slots": slot_period(config, candidate_positions),
        "user": entity(model.tables.user, config.user_hashes, keep),
        "post": entity(model.tables.post, config.post_hashes, keep),
        "author": entity(model.tables.author, config.author_hashes, keep),
        "user_projection": keep(strips(tokens.user_projection, len(tokens.user_projection), torch.float32, strip)),
        "cosines": keep(cosines.contiguous()), "sines": keep(sines.contiguous()),
    }  # fmt: skip
    if isinstance(model, Ranker):
        heads = model.heads
        outputs = torch.cat([heads.actions, *([heads.continuous] if config.continuous_actions else [])], 1)
        values["final_norm"] = keep(pad(heads.norm[None], 1, width))
        values["heads"] = keep(strips(outputs, width, torch.float32, strip))
    for name, tensor in _features(model, strip):
        values[name] = keep(tensor)
    for name, value in values.items():
        setattr(packed.model, name, value)
    return packed


def entity(table: Tensor, spec: HashSpec, keep: Callable[[Tensor], int]) -> ctypes.Structure:
    """A table with the hash functions that index it."""
    functions = (keep(torch.from_numpy(values)) for values in hash_functions(spec))
    return Entity(keep(table.detach().contiguous()), *functions, spec.count, spec.modulus, spec.vocab_size)


def _layers(
    model: Ranker | Towers, dtype: torch.dtype, strip: int, keep: Callable[[Tensor], int]
) -> Iterator[ctypes.Structure]:
    config = model.config
    width, ffn = round_up(config.width, GRAIN), round_up(config.ffn_width, 32)
    for layer in model.trunk.decoder_layers():
        names = ("attention_norm", "attention_post_norm", "ffn_norm", "ffn_post_norm")
        norms = (getattr(layer, name, None) for name in names)  # without a sandwich there are two
        weights = (
            strips(torch.cat((layer.query, layer.key, layer.value), 1), width, dtype, strip),
            strips(layer.output, len(layer.output), dtype, strip),
            strips(gate_and_value(layer.ffn_gate, layer.ffn_value), width, dtype, strip),
            strips(layer.ffn_output, ffn, dtype, strip),
        )
        yield Layer(
            *(None if norm is None else keep(pad(norm[None].float(), 1, width)) for norm in norms), *map(keep, weights)
        )


def _features(model: Ranker | Towers, strip: int) -> Iterator[tuple[str, Tensor]]:
    """The projections, split: hash embeddings keep a matrix; the small features are projected here, once, into rows to add."""
    config, tokens = model.config, model.tokens
    width, padded = config.width, round_up(config.width, GRAIN)
    entity = (config.post_hashes.count + config.author_hashes.count) * width

    def project(rows: Tensor, projection: Tensor, feature: int) -> Tensor:
        slice_ = projection[entity + feature * width : entity + (feature + 1) * width]
        return pad((rows.double() @ slice_.double()).float(), len(rows), padded).contiguous()

    history = tokens.history_projection
    yield "history_projection", strips(history[:entity], entity, torch.float32, strip)
    yield "action_tokens", project(tokens.action_projection, history, 0)
    yield "history_surfaces", project(tokens.surface_table, history, 1)
    if config.has_dwell:
        yield "dwell_input", tokens.dwell_input.detach().contiguous()
        yield "dwell_output", project(tokens.dwell_output, history, 2)
    if not isinstance(model, Ranker):
        return
    candidate = tokens.candidate_projection
    yield "candidate_projection", strips(candidate[:entity], entity, torch.float32, strip)
    yield "candidate_surfaces", project(tokens.surface_table, candidate, 0)
    if config.has_post_age:
        yield "post_ages", project(tokens.post_age_table, candidate, 1)
