"""Converts the published layout (`config.json`, `model_params.npz`, `embedding_tables.npz`) into a checkpoint.

Nothing is unpickled, and no key or array is ignored unless the caller names it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.config import ConfigError, ContextAttention, HashSpec, ModelConfig, RetrievalConfig
from weights.actions import RELEASED_DWELL_INDEX, continuous_outputs, default_score_weights, released_action_names
from weights.errors import CheckpointError
from weights.format.layout import expected_shapes, is_table
from weights.format.manifest import MANIFEST_NAME, parse_json_object
from weights.format.tensorfile import PIECE_BYTES, is_finite
from weights.format.writer import Labels
from weights.git_lfs import pointer_problem
from weights.published.npz import FLOAT32, NpzFile
from weights.text_ids import IdKind

CONFIG_FILE, PARAMS_FILE, TABLES_FILE = "config.json", "model_params.npz", "embedding_tables.npz"
_MAX_CONFIG_BYTES = 2**20

SIZES = {  # config.json → ModelConfig, integers
    "emb_size": "width", "num_layers": "layers", "num_heads": "query_heads", "key_size": "head_width",
    "history_seq_len": "history_length", "candidate_seq_len": "candidate_length", "num_actions": "actions",
}  # fmt: skip
OPTIONAL = {  # if present, a key overrides ModelConfig's default, which is the release's constant
    "num_kv_heads": ("kv_heads", int),
    "widening_factor": ("widening", float),
    "attn_output_multiplier": ("attention_multiplier", float),
    "product_surface_vocab_size": ("product_surfaces", int),
    "post_age_granularity_mins": ("post_age_granularity_minutes", int),
    "right_anchored_rope": ("right_anchored", bool),
    "context_attention": ("context_attention", str),
}
ENTITIES = {"user": "user_hashes", "item": "post_hashes", "author": "author_hashes"}

_TABLES = {"tables.user": "user_embeddings", "tables.post": "item_embeddings", "tables.author": "author_embeddings"}
_MODEL = {
    "tokens.user_projection": "proj_mat_1", "tokens.candidate_projection": "proj_mat_2",
    "tokens.history_projection": "proj_mat_3", "tokens.action_projection": "action_projection",
    "tokens.surface_table": "product_surface_embedding_table", "tokens.post_age_table": "post_age_embedding_table",
    "tokens.dwell_input": "history_dwell_time_proj1", "tokens.dwell_output": "history_dwell_time_proj2",
    "heads.norm": "rms_norm/scale", "heads.actions": "unembeddings", "heads.continuous": "continuous_unembeddings",
}  # fmt: skip
_TOWER = "phoenix_retrieval_model/~build_candidate_representation/candidate_tower/candidate_tower_projection"
_TOWERS = {"candidate.input": f"{_TOWER}_1", "candidate.output": f"{_TOWER}_2"}
_TRAINING_ONLY = "~/log_temperature"  # of the retrieval model: its scores are plain cosines
_LAYER = {
    "attention_norm": "rms_norm/scale", "query": "multi_head_attention/query/w", "key": "multi_head_attention/key/w",
    "value": "multi_head_attention/value/w", "output": "multi_head_attention/linear/w",
    "attention_post_norm": "rms_norm_1/scale", "ffn_norm": "rms_norm_2/scale", "ffn_gate": "linear/w",
    "ffn_value": "linear_v/w", "ffn_output": "linear_1/w", "ffn_post_norm": "rms_norm_3/scale",
}  # fmt: skip


class PublishedModel:
    """An opened download: its `config` and, under our names, the elements of every tensor. Use as a context manager.

    The arrays tell whether it is a ranker or the two towers of retrieval. `ignore` names config keys and arrays to leave out;
    any other unknown one is refused. Raises CheckpointError.
    """

    def __init__(
        self, source: Path, ignore: Collection[str] = (), context_attention: ContextAttention | None = None
    ) -> None:
        self.source = source
        _recognise(source)
        with ExitStack() as stack:
            self._params = stack.enter_context(NpzFile(source / PARAMS_FILE))
            self._tables = stack.enter_context(NpzFile(source / TABLES_FILE))
            self._is_retrieval = any(name.startswith("phoenix_retrieval_model/") for name in self._params.names)
            self.config, self.shapes = self._read_config(ignore, context_attention)
            self._check_arrays(ignore)
            self._stack = stack.pop_all()

    def __enter__(self) -> PublishedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def pieces(self, name: str) -> Iterator[Tensor]:
        """The float32 elements of tensor `name` in order, in pieces of about 1 MiB."""
        archive = self._tables if is_table(name) else self._params
        published = published_name(name, self._is_retrieval)
        values = torch.from_numpy(archive.array(published, FLOAT32, self.shapes[name])).flatten()
        for piece in values.split(PIECE_BYTES // FLOAT32.itemsize):
            if not is_finite(piece):
                raise CheckpointError(f"{archive.path}: array {published} holds a NaN or an infinity.")
            yield piece

    def _read_config(
        self, ignore: Collection[str], context_attention: ContextAttention | None
    ) -> tuple[ModelConfig, dict[str, tuple[int, ...]]]:
        """Read the architecture and derive the shapes of our tensors."""
        path = self.source / CONFIG_FILE
        try:
            with path.open("rb") as file:
                raw = file.read(_MAX_CONFIG_BYTES + 1)
            if problem := pointer_problem(raw):
                raise CheckpointError(problem)
            if len(raw) > _MAX_CONFIG_BYTES:
                raise CheckpointError("is longer than 1 MiB")
            published_values = parse_json_object(raw)
            if absent := set(ignore).difference(published_values, self._params.names, self._tables.names):
                raise CheckpointError(
                    f"has no key, and the download no array, called {', '.join(sorted(absent))} (--ignore)"
                )
            values = {key: value for key, value in published_values.items() if key not in ignore}
            config = self._retrieval(values) if self._is_retrieval else self._variant(published_config(values))
            if context_attention:
                config = replace(config, context_attention=context_attention)
            return config, expected_shapes(config)
        except (CheckpointError, ConfigError, OSError) as error:
            raise CheckpointError(f"{path}: {str(error).rstrip('.')}.") from error

    def _variant(self, config: ModelConfig) -> ModelConfig:
        """Tell the January from the May variant: the projections' shapes give the inputs, the continuous head's shape its outputs."""
        self._check_layers(config)
        width = config.width
        entity = (config.post_hashes.count + config.author_hashes.count) * width
        head = published_name("heads.continuous")
        return replace(
            config,
            has_dwell=self._rows("tokens.history_projection") == entity + 3 * width,
            has_post_age=self._rows("tokens.candidate_projection") == entity + 2 * width,
            continuous_actions=sum(self._params.header(head)[0][-1:]) if head in self._params.names else 0,
        )

    def _rows(self, name: str) -> int:
        shape, _ = self._params.header(published_name(name))
        return shape[0] if shape else 0

    def _retrieval(self, values: dict[str, Any]) -> RetrievalConfig:
        """The two towers, with the candidate's projections unless `enable_linear_proj` is false."""
        projects = _number(values, "enable_linear_proj", bool) if "enable_linear_proj" in values else True
        config = published_config({key: value for key, value in values.items() if key != "enable_linear_proj"})
        self._check_layers(config)
        fields = {name: getattr(config, name) for name in config.to_dict()}
        return RetrievalConfig(**fields, linear_projection=projects)

    def _check_layers(self, config: ModelConfig) -> None:
        if config.layers > len(self._params.names):
            raise CheckpointError(
                f"num_layers is {config.layers}, but {PARAMS_FILE} has {len(self._params.names)} arrays"
            )

    def _check_arrays(self, ignore: Collection[str]) -> None:
        """Refuse missing, misshapen and unknown arrays before a byte is written."""
        ignorable = {_TRAINING_ONLY, *ignore} if self._is_retrieval else set(ignore)
        for archive, tables in ((self._params, False), (self._tables, True)):
            shapes_by_name = {
                published_name(name, self._is_retrieval): shape
                for name, shape in self.shapes.items()
                if is_table(name) == tables
            }
            for name, shape in shapes_by_name.items():
                stored_shape, dtype = archive.header(name)
                if dtype != FLOAT32:
                    raise CheckpointError(f"{archive.path}: array {name} holds {dtype.str}; only float32 is read.")
                if stored_shape != shape:
                    raise CheckpointError(
                        f"{archive.path}: array {name} has shape {list(stored_shape)}, {CONFIG_FILE} asks {list(shape)}."
                    )
            unknown = sorted(set(archive.names) - set(shapes_by_name) - ignorable)
            if unknown:
                raise CheckpointError(
                    f"{archive.path} holds arrays for which this model has no place: {', '.join(unknown)[:300]}; leaving them "
                    "out could change the scores, so name each with --ignore if it is meant to be left out."
                )


def published_name(name: str, is_retrieval: bool = False) -> str:
    """The array of the download that holds our tensor `name`."""
    if name in _TABLES:
        return _TABLES[name]
    if name in _TOWERS:
        return _TOWERS[name]
    if name in _MODEL:
        return f"phoenix_{'retrieval_' if is_retrieval else ''}model/{_MODEL[name]}"
    layer, parameter = name.removeprefix("trunk.layers.").split(".")
    return f"transformer/decoder_layer_{layer}/{_LAYER[parameter]}"


def published_config(values: Mapping[str, Any]) -> ModelConfig:
    """Convert `config.json` to a ModelConfig of the January variant; the arrays give the rest. Raises CheckpointError, ConfigError."""
    entity_keys = {f"{entity}_vocab_size" for entity in ENTITIES} | {f"num_{entity}_hashes" for entity in ENTITIES}
    readable_keys = {*SIZES, *OPTIONAL, *entity_keys, "hash_params"}
    unknown = sorted(set(values) - readable_keys)
    if unknown:
        raise CheckpointError(
            f"has keys that this build does not know: {', '.join(unknown)[:300]}; a key can change the maths, so name each "
            "with --ignore if it is meant to be left out"
        )
    arguments: dict[str, Any] = {name: _number(values, key, int) for key, name in SIZES.items()}
    arguments["kv_heads"] = arguments["query_heads"]
    for key, (name, kind) in OPTIONAL.items():
        if key in values:
            arguments[name] = _number(values, key, kind)
    for entity, name in ENTITIES.items():
        arguments[name] = _hashes(values, entity)
    return ModelConfig(**arguments)


def _number(values: Mapping[str, Any], key: str, kind: type) -> Any:
    if key not in values:
        raise CheckpointError(f"lacks {key}")
    value = values[key]
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        raise CheckpointError(f"{key} must be of type {kind.__name__}, got {str(value)[:60]!r}")
    return value


def _hashes(values: Mapping[str, Any], entity: str) -> HashSpec:
    """The hash functions of one entity, from `hash_params`; `num_*_hashes`, if given, must agree."""
    parameters = values.get("hash_params")
    expected = {f"{other}_{field}" for other in ENTITIES for field in ("hash_scales", "biases", "modulus")}
    if not isinstance(parameters, Mapping) or set(parameters) != expected:
        raise CheckpointError(f"hash_params must hold exactly {', '.join(sorted(expected))}")
    scales, biases = (parameters[f"{entity}_{field}"] for field in ("hash_scales", "biases"))
    for numbers in (scales, biases):
        if not isinstance(numbers, list) or any(type(number) is not int for number in numbers):
            raise CheckpointError(f"hash_params of {entity} must be lists of integers")
    modulus = _number(parameters, f"{entity}_modulus", int)
    spec = HashSpec(tuple(scales), tuple(biases), modulus, _number(values, f"{entity}_vocab_size", int))
    count = _number(values, f"num_{entity}_hashes", int) if f"num_{entity}_hashes" in values else spec.count
    if count != spec.count:
        raise CheckpointError(f"num_{entity}_hashes is {count}, but hash_params holds {spec.count} functions")
    return spec


def _recognise(source: Path) -> None:
    """Raises CheckpointError with a hint if `source` is not the directory of one model."""
    if not source.is_dir():
        raise CheckpointError(f"{source} is not a directory; name the ranker or retrieval directory of the download.")
    if (source / MANIFEST_NAME).exists():
        raise CheckpointError(f"{source} is a checkpoint of this project already; it needs no import.")
    missing = [name for name in (CONFIG_FILE, PARAMS_FILE, TABLES_FILE) if not (source / name).is_file()]
    if missing and (source / "ranker" / CONFIG_FILE).exists():
        raise CheckpointError(
            f"{source} holds several models; import the ranker, {source / 'ranker'}, and retrieval by itself."
        )
    if missing:
        raise CheckpointError(f"{source} is not the published layout: it lacks {', '.join(missing)}.")


def labels_for(
    config: ModelConfig,
    name: str,
    version: str = "",
    action_names: Sequence[str] | None = None,
    score_weights: Mapping[str, float] | None = None,
    ids: IdKind = "uint64",
) -> Labels:
    """Labels for a published checkpoint; those not given default to what is known about the release. Raises CheckpointError."""
    names = tuple(action_names or released_action_names(config.actions))
    weights = default_score_weights(names) if score_weights is None else score_weights
    if isinstance(config, RetrievalConfig):
        weights = {}  # a retrieval score is a cosine, without weights
    outputs = continuous_outputs(config.continuous_actions, RELEASED_DWELL_INDEX)
    return Labels(name, names, outputs, weights, version, ids)
