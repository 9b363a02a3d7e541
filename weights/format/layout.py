"""Lists the tensors of an architecture's checkpoint and the file of each. Opens no file."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from model.config import ModelConfig, RetrievalConfig
from model.ranker import Ranker
from model.retrieval.towers import Towers
from weights.errors import CheckpointError
from weights.format.manifest import MANIFEST_NAME, Manifest, TensorEntry

PARAMS_FILE = "params.safetensors"


def is_table(name: str) -> bool:
    """Whether a tensor is an embedding table, which may be bf16, has its own file, and is mapped instead of read."""
    return name.startswith("tables.")


def file_of(name: str) -> str:
    """The file that holds tensor `name`."""
    return f"{name}.safetensors" if is_table(name) else PARAMS_FILE


def empty_model(config: ModelConfig) -> Ranker | Towers:
    """The model on the meta device: names and shapes without memory. Raises CheckpointError if it cannot be built."""
    try:
        with torch.device("meta"):
            return Towers(config) if isinstance(config, RetrievalConfig) else Ranker(config)
    except (RuntimeError, OverflowError, TypeError, ValueError) as error:
        raise CheckpointError(f"describes a model that cannot be built: {str(error).splitlines()[0][:200]}") from error


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of a checkpoint with this architecture, in order: those of the model's `state_dict()`."""
    return {name: tuple(tensor.shape) for name, tensor in empty_model(config).state_dict().items()}


def model_for(manifest: Manifest) -> Ranker | Towers:
    """Build the empty model of a manifest and check that the listed tensors fit it. Raises CheckpointError."""
    # before building anything: every layer has at least one tensor, so a forged layer count stops here
    if manifest.config.layers > len(manifest.tensors):
        raise CheckpointError(f"{MANIFEST_NAME} lists fewer tensors than the architecture has layers")
    try:
        model = empty_model(manifest.config)
    except CheckpointError as error:
        raise CheckpointError(f"{MANIFEST_NAME} {error}") from error
    check_tensors(manifest.tensors, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    return model


def check_tensors(listed: Mapping[str, TensorEntry], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Check names, shapes and dtypes against the architecture. Raises CheckpointError."""
    missing, unknown = sorted(set(expected) - set(listed)), sorted(set(listed) - set(expected))
    if missing or unknown:
        what = f"lacks tensor {missing[0]}" if missing else f"lists tensor {unknown[0]}, unknown to the architecture"
        raise CheckpointError(f"{MANIFEST_NAME} {what} ({len(missing)} missing, {len(unknown)} unknown in all)")
    for name, entry in listed.items():
        if entry.shape != expected[name]:
            raise CheckpointError(
                f"{entry.file} has tensor {name} of shape {list(entry.shape)}, the architecture asks for {list(expected[name])}"
            )
        kind, dtypes = ("tables", ("float32", "bfloat16")) if is_table(name) else ("parameters", ("float32",))
        if entry.dtype not in dtypes:
            raise CheckpointError(
                f"{entry.file} has tensor {name} as {entry.dtype}; {kind} must be {' or '.join(dtypes)}"
            )
    tables = [(entry.dtype, name, entry.file) for name, entry in sorted(listed.items()) if is_table(name)]
    for table in tables:
        if table[0] != tables[0][0]:
            one, another = (f"{name} is {dtype} in {file}" for dtype, name, file in (tables[0], table))
            raise CheckpointError(f"{one} and {another}: all tables must have one dtype")
