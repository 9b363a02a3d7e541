"""Lays a model's weights out for the kernel: strips of columns, small features already projected. Runs once, at load."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from struct import Struct

import torch
from torch import Tensor
from torch.nn import functional

from model.batch import hash_functions, slot_period
from model.config import CandidatePositions, HashSpec, ModelConfig
from model.layers import Linear, rope_tables
from model.ranker import Heads, Ranker, TokenBuilder, by_feature, candidate_features, history_features
from model.retrieval.towers import Towers
from model.trunk import DecoderLayer

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
    (Int64, "surfaces age_buckets history_length positions code_levels code_values"),
    (Int64, "candidate_position candidate_slots"),
    (Float, "attention_multiplier attention_cap norm_epsilon input_scale"),
    (Pointer, "layer"),
    (Entity, "user post author"),
    (Pointer, "user_projection history_projection candidate_projection"),
    (Pointer, "action_tokens history_surfaces candidate_surfaces dwell_input dwell_output post_ages"),
    (Pointer, "history_codes candidate_codes"),
    (Pointer, "final_norm heads cosines sines"),
)
ContextJob = structure(
    "ContextJob",
    (Int64, "rows start blocks has_user first_position"),
    (UInt64, "user_id"),
    (Pointer, "keys positions post_ids author_ids surfaces actions dwell_seconds codes outputs"),
)
CandidateJob = structure("CandidateJob", (Int64, "rows first first_slot keys_count blocks context"), (Pointer, "keys"))
STRUCTS = (Layer, Entity, Model, ContextJob, CandidateJob)  # mirrored in layout.h, compared with it at load
KERNEL_TAKES: dict[str, tuple[object, ...]] = {
    "norm": ("rms",), "positions": ("rope",), "activation": ("gelu_tanh", "silu"), "gated": (True,), "biases": (False,),
}  # fmt: skip


def refusal(config: ModelConfig) -> str | None:
    """Why the kernel does not support an architecture, as a sentence; None if it does."""
    others = [name for name, taken in KERNEL_TAKES.items() if getattr(config, name) not in taken]
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

    def keep(self, tensor: Tensor) -> int:
        """The tensor's address."""
        self.tensors.append(tensor)
        return tensor.data_ptr()


@torch.inference_mode()
def pack(
    model: Ranker | Towers, dtype: torch.dtype, strip: int, candidate_positions: CandidatePositions = "shared"
) -> Packed:
    """The kernel's model in `dtype` (torch.float32 or torch.bfloat16). The embedding tables are pointed at, not copied.

    `strip`: how many columns the kernel reads together. Of `Towers` only the user tower is packed: contexts, no candidates or heads.
    Raises EngineError unless all tables are float32 or all bfloat16.
    """
    config, tables, packed = model.config, model.tables, Packed(Model())
    layers = [_layer(layer, config, dtype, strip) for layer in model.trunk.decoder_layers()]
    packed.layers = (Layer * config.layers)(*(Layer(**_addresses(layer, packed)) for layer in layers))
    tensors = _rope(config) | _context_tokens(model.tokens, strip)
    if isinstance(model, Ranker):
        tensors |= _candidate_tokens(model.tokens, strip) | _heads(model.heads, config, strip)
    packed.model = Model(
        width=config.width,
        layers=config.layers,
        query_heads=config.query_heads,
        kv_heads=config.kv_heads,
        head_width=config.head_width,
        ffn_width=config.ffn_width,
        actions=config.actions,
        continuous=config.continuous_actions,
        tables_bf16=tables.dtype() is torch.bfloat16,
        bidirectional=config.context_attention == "bidirectional",
        silu=config.activation == "silu",
        surfaces=config.product_surfaces,
        age_buckets=config.post_age_buckets,
        history_length=config.history_length,
        positions=len(tensors["cosines"]),
        code_levels=config.token_levels,
        code_values=config.token_values,
        candidate_position=config.candidate_position,
        candidate_slots=slot_period(config, candidate_positions),
        attention_multiplier=config.attention_multiplier,
        attention_cap=config.attention_cap or 0.0,
        norm_epsilon=config.norm_epsilon,
        input_scale=config.input_scale,
        layer=ctypes.addressof(packed.layers),
        user=entity(tables.user, config.user_hashes, packed),
        post=entity(tables.post, config.post_hashes, packed),
        author=entity(tables.author, config.author_hashes, packed),
        **_addresses(tensors, packed),
    )
    return packed


def entity(table: Tensor, spec: HashSpec, packed: Packed) -> ctypes.Structure:
    """A table with the hash functions that index it."""
    scales, biases = (packed.keep(torch.from_numpy(values)) for values in hash_functions(spec))
    return Entity(
        table=packed.keep(table.detach().contiguous()),
        scales=scales,
        biases=biases,
        hashes=spec.count,
        modulus=spec.modulus,
        vocab_size=spec.vocab_size,
    )


def _addresses(tensors: dict[str, Tensor], packed: Packed) -> dict[str, int]:
    return {name: packed.keep(tensor) for name, tensor in tensors.items()}


def _layer(layer: DecoderLayer, config: ModelConfig, dtype: torch.dtype, strip: int) -> dict[str, Tensor]:
    """The members of `Layer`. Without a sandwich two norms are left out, and null."""
    width, attention, ffn = round_up(config.width, GRAIN), layer.attention, layer.ffn
    assert ffn.value is not None  # see `refusal`
    qkv = torch.cat((attention.query.weight, attention.key.weight, attention.value.weight), 1)
    norms = {
        "attention_norm": layer.attention_norm,
        "attention_post_norm": layer.attention_post_norm,
        "ffn_norm": layer.ffn_norm,
        "ffn_post_norm": layer.ffn_post_norm,
    }
    scales = {name: pad(norm.scale[None].float(), 1, width) for name, norm in norms.items() if norm is not None}
    return scales | {
        "query_key_value": strips(qkv, width, dtype, strip),
        "output": strips(attention.output.weight, len(attention.output.weight), dtype, strip),
        "gate_value": strips(gate_and_value(ffn.gate.weight, ffn.value.weight), width, dtype, strip),
        "ffn_output": strips(ffn.output.weight, round_up(config.ffn_width, 32), dtype, strip),
    }


def _rope(config: ModelConfig) -> dict[str, Tensor]:
    positions = torch.arange(config.candidate_position + config.candidate_length)
    cosines, sines = rope_tables(positions, config.head_width, config.rope_base)
    return {"cosines": cosines.contiguous(), "sines": sines.contiguous()}


def _context_tokens(tokens: TokenBuilder, strip: int) -> dict[str, Tensor]:
    """Hash embeddings keep a matrix; the small features are projected here, once, into rows to add."""
    feature = by_feature(tokens.history_projection, history_features(tokens.config))
    packed = {
        "user_projection": hash_strips([tokens.user_projection], strip),
        "history_projection": hash_strips([feature["post"], feature["author"]], strip),
        "action_tokens": projected(tokens.action_projection, feature["actions"]),
        "history_surfaces": projected(tokens.surface_table, feature["surface"]),
    }
    if "dwell" in feature:
        packed["dwell_input"] = tokens.dwell_input.detach().contiguous()
        dwell = projected(tokens.dwell_output, feature["dwell"])
        packed["dwell_output"] = strips(dwell, len(dwell), torch.float32, strip)
    if "codes" in feature:
        packed["history_codes"] = projected(tokens.code_table, feature["codes"])
    return packed


def _candidate_tokens(tokens: TokenBuilder, strip: int) -> dict[str, Tensor]:
    """The kernel's arrays for the tokens of candidates, by their names in the kernel."""
    feature = by_feature(tokens.candidate_projection, candidate_features(tokens.config))
    packed = {
        "candidate_projection": hash_strips([feature["post"], feature["author"]], strip),
        "candidate_surfaces": projected(tokens.surface_table, feature["surface"]),
    }
    if "post_age" in feature:
        packed["post_ages"] = projected(tokens.post_age_table, feature["post_age"])
    if "codes" in feature:
        packed["candidate_codes"] = projected(tokens.code_table, feature["codes"])
    return packed


def _heads(heads: Heads, config: ModelConfig, strip: int) -> dict[str, Tensor]:
    width, maps = round_up(config.width, GRAIN), [heads.actions, heads.continuous]
    outputs = torch.cat([head.weight for head in maps if isinstance(head, Linear)], 1)
    return {
        "final_norm": pad(heads.norm.scale[None], 1, width),
        "heads": strips(outputs, width, torch.float32, strip),
    }


def projected(rows: Tensor, projection: Tensor) -> Tensor:
    """A feature's embeddings `[n, in]` times its own rows of a projection `[in, D]`, in fp64: fp32 `[n, padded D]`."""
    product = (rows.double() @ projection.double()).float()
    return pad(product, len(rows), round_up(projection.shape[1], GRAIN)).contiguous()


def hash_strips(projections: Sequence[Tensor], strip: int) -> Tensor:
    """The projections of hash embeddings that lie side by side, in strips."""
    joined = torch.cat(list(projections))
    return strips(joined, len(joined), torch.float32, strip)


def strips(weight: Tensor, depth: int, dtype: torch.dtype, columns: int) -> Tensor:
    """A weight `[in, out]` in strips of `columns` columns, zero-padded to `depth` rows and a multiple of 64 columns.

    bf16 puts two rows of the depth side by side, as the dot-product instructions read them.
    """
    step = 2 if dtype is torch.bfloat16 else 1
    padded = pad(weight, round_up(depth, step), round_up(weight.shape[1], PANEL))
    blocks = padded.view(padded.shape[0] // step, step, padded.shape[1] // columns, columns)
    return blocks.permute(2, 0, 3, 1).to(dtype).contiguous()


def gate_and_value(gate: Tensor, value: Tensor) -> Tensor:
    """`[D, F]` twice to `[D, 64 · ceil(F/32)]`: each panel holds 32 gate columns and the 32 value columns that belong to them."""
    halves = [pad(half, len(half), round_up(half.shape[1], 32)).view(len(half), -1, 32) for half in (gate, value)]
    return torch.cat(halves, -1).flatten(1)


def pad(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Pad with zeros below and to the right, to `[rows, columns]`."""
    return functional.pad(matrix, (0, columns - matrix.shape[1], 0, rows - matrix.shape[0]))


def round_up(number: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-number // step) * step
