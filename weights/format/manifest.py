"""Reads and writes `manifest.json`, which describes a checkpoint. Reads no weights."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import msgspec
import numpy as np
from msgspec import Meta, Struct

from model.bounds import MAX_FACTOR
from model.config import ConfigError, ModelConfig, RetrievalConfig
from model.ranking import Calibration
from weights.errors import CheckpointError
from weights.git_lfs import pointer_problem
from weights.text_ids import IdKind
from weights.values import action_name_problem, score_weight_problem

TableDtype = Literal["float32", "bfloat16"]

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
EXAMPLE_NAME, NAMES_NAME = "example.json", "names.json"
"""What a checkpoint's directory may hold beside its files: a request, and names behind its ids, which the page of a server shows."""
MAX_OFFSET, MAX_SLOPE = 100, 100
"""Bounds of a calibration: a logit of 100 is a probability of 1 in float32."""
MAX_MANIFEST_BYTES = 16 * 2**20

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")  # goes unescaped into headers, metric labels and logs

if TYPE_CHECKING:
    Config = ModelConfig
else:
    Config = Any  # msgspec would refuse a subclass, such as RetrievalConfig

FileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}\.safetensors\Z")]
"""A plain name inside the directory: no separator, no leading dot."""


Dtype = Literal["float32", "bfloat16", "int64", "int32", "uint8"]


class ContinuousOutput(Struct, frozen=True, forbid_unknown_fields=True):
    """One continuous head: the model's 0 … 1 times `scale` is a value in `unit` (`s`, or an empty string for a plain number)."""

    name: str
    scale: float
    unit: str


class ActionCalibration(Struct, frozen=True, forbid_unknown_fields=True):
    """The probability of an action is `sigmoid(offset + slope · logit)`. The slope is positive."""

    offset: float
    slope: float


class FileEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """One file of the checkpoint: SHA-256 of its content in hex, and its length in bytes."""

    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    bytes: Annotated[int, Meta(ge=0, lt=2**62)]


class TensorEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """The file, dtype and shape of a tensor. A model's are float32, its tables perhaps bfloat16; the integers are a corpus's."""

    file: str
    dtype: Dtype
    shape: tuple[Annotated[int, Meta(gt=0, lt=2**40)], ...]


class Document(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """What all manifests have in common: they are written with their digest, the SHA-256 of their content, which includes the digest of
    every file. `ids` is the kind of ids that callers use for users, posts and authors; a file without it means `uint64`.

    An empty `version` is for `versioned` to fill. Raises CheckpointError for fields that contradict each other.
    """

    name: str
    version: str
    files: dict[FileName, FileEntry]
    tensors: dict[str, TensorEntry]
    ids: IdKind = "uint64"

    def __post_init__(self) -> None:
        for what, label in (("name", self.name), ("version", self.version or "none")):
            if not _LABEL.fullmatch(label):
                raise CheckpointError(
                    f"{what} {label[:100]!r} must be 1 to 100 letters, digits, dots, dashes, underscores or plus signs, and start "
                    "with a letter or digit"
                )
        for name, entry in self.tensors.items():
            if entry.file not in self.files:
                raise CheckpointError(
                    f"tensor {name[:100]} is said to lie in {entry.file[:100]}, which is not among the files"
                )

    def specifics(self) -> dict[str, Any]:
        """The JSON values that only this kind of manifest has."""
        raise NotImplementedError

    @classmethod
    def fields_of(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The fields in a manifest's JSON values, their types not yet checked. Raises CheckpointError for another kind of manifest."""
        raise NotImplementedError

    def content(self) -> dict[str, Any]:
        """The JSON values that the digest covers: all of `manifest.json` but the digest itself."""
        return {
            "format_version": FORMAT_VERSION,
            **({} if self.ids == "uint64" else {"ids": self.ids}),  # so that older checkpoints keep their digests
            "name": self.name,
            "version": self.version,
            **self.specifics(),
            "files": {name: msgspec.to_builtins(entry) for name, entry in sorted(self.files.items())},
            "tensors": {name: msgspec.to_builtins(entry) for name, entry in sorted(self.tensors.items())},
        }

    @cached_property
    def digest(self) -> str:
        """Identifies the checkpoint or corpus: SHA-256 in hex."""
        return content_digest(self.content())

    def versioned(self) -> Self:
        """This manifest; if its version is empty, with the first twelve digits of its digest as the version."""
        return self if self.version else msgspec.structs.replace(self, version=self.digest[:12])

    def to_json(self) -> bytes:
        """The content of `manifest.json`."""
        return signed(self.content())

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """Parse `manifest.json`. Raises CheckpointError for unknown keys, wrong types, and a content that its digest does not fit."""
        if problem := pointer_problem(raw):
            raise CheckpointError(problem)
        values = parse_json_object(raw)
        if (format_version := values.pop("format_version", None)) != FORMAT_VERSION:
            raise CheckpointError(f"has format version {str(format_version)[:40]}, this build reads {FORMAT_VERSION}")
        stated = values.pop("digest", None)
        try:
            document = msgspec.convert(cls.fields_of(values), cls)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"is not as it should be: {error}") from error
        if not document.version or stated != document.digest:
            raise CheckpointError(
                f"says its digest is {str(stated)[:64]!r}, but its content has {document.digest}: it was changed after it was written"
            )
        return document


class Manifest(Document, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Everything about a checkpoint except its numbers.

    `action_names` are in output order, one per action of `config`; `continuous` one per continuous output. `score_weights`
    maps some action names to the default weights of the combined score. `training`: what was decided from the log that it was trained on,
    any JSON object; empty where that is not known. `calibration` corrects the probabilities of some or all actions, by name.
    """

    config: Config
    action_names: tuple[str, ...]
    continuous: tuple[ContinuousOutput, ...]
    score_weights: dict[str, float]
    training: dict[str, Any] = {}
    calibration: dict[str, ActionCalibration] = {}

    def __post_init__(self) -> None:
        Document.__post_init__(self)
        self._check_actions()
        self._check_calibration()
        self._check_continuous()

    @property
    def trained_until_ts(self) -> int | None:
        """The time, Unix seconds, from which on no training of this checkpoint saw anything; None if the manifest does not say."""
        until = self.training.get("until_ts")
        return until if type(until) is int else None

    def _check_actions(self) -> None:
        names = self.action_names
        for name in names:
            if problem := action_name_problem(name):
                raise CheckpointError(f"action name {str(name)[:64]!r} {problem}")
        if len(names) != self.config.actions or len(set(names)) != len(names):
            raise CheckpointError(
                f"needs {self.config.actions} different action names, got {len(set(names))} in {len(names)}"
            )
        for name, weight in self.score_weights.items():
            if name not in names:
                raise CheckpointError(f"score weight {name[:64]!r} belongs to no action of this checkpoint")
            if problem := score_weight_problem(weight):
                raise CheckpointError(f"score weight of {name} {problem}")

    def _check_calibration(self) -> None:
        for name, correction in self.calibration.items():
            if name not in self.action_names:
                raise CheckpointError(f"calibration {name[:64]!r} belongs to no action of this checkpoint")
            if not (abs(correction.offset) <= MAX_OFFSET and 1 / MAX_SLOPE <= correction.slope <= MAX_SLOPE):
                raise CheckpointError(
                    f"calibration of {name} must have an offset within ±{MAX_OFFSET} and a slope in {1 / MAX_SLOPE:g} … {MAX_SLOPE}"
                )

    @cached_property
    def corrections(self) -> Calibration | None:
        """The calibration by action in the order of the outputs; None if there is none."""
        if not self.calibration:
            return None
        identity = ActionCalibration(0.0, 1.0)
        by_output = [self.calibration.get(name, identity) for name in self.action_names]
        return Calibration(
            np.array([correction.offset for correction in by_output]),
            np.array([correction.slope for correction in by_output]),
        )

    def _check_continuous(self) -> None:
        names = [output.name for output in self.continuous]
        if len(names) != self.config.continuous_actions or len(set(names)) != len(names):
            raise CheckpointError(
                f"needs {self.config.continuous_actions} different continuous outputs, got {len(set(names))} in {len(names)}"
            )
        for output in self.continuous:
            if action_name_problem(output.name) or len(output.unit) > 16:
                raise CheckpointError(f"continuous output {output.name[:64]!r} has a bad name or unit")
            if not 1 / MAX_FACTOR <= output.scale <= MAX_FACTOR:
                raise CheckpointError(
                    f"continuous output {output.name} must have a scale in {1 / MAX_FACTOR:g} … {MAX_FACTOR:g}, got {output.scale!r}"
                )

    @cached_property
    def model_digest(self) -> str:
        """Identifies the model alone: its architecture, kind of ids and tensors, without names, version and score weights. SHA-256 in
        hex."""
        content = self.content()
        return content_digest(
            {name: content[name] for name in ("architecture", "files", "tensors")} | {"ids": self.ids}
        )

    def specifics(self) -> dict[str, Any]:
        """See `Document.specifics`. `model` is there for two towers alone."""
        return {
            **({"model": "retrieval"} if isinstance(self.config, RetrievalConfig) else {}),
            "architecture": self.config.to_dict(),
            "action_names": list(self.action_names),
            "continuous": [
                {"name": output.name, "scale": float(output.scale), "unit": output.unit} for output in self.continuous
            ],
            "score_weights": {name: float(weight) for name, weight in self.score_weights.items()},
            **({"training": self.training} if self.training else {}),
            **({"calibration": msgspec.to_builtins(self.calibration)} if self.calibration else {}),
        }

    @classmethod
    def fields_of(cls, values: dict[str, Any]) -> dict[str, Any]:
        """See `Document.fields_of`. `architecture` becomes `config`, of the kind of model that `model` names."""
        if "kind" in values:
            raise CheckpointError(f"describes a {str(values['kind'])[:40]}, not a model: see `corpus --help`")
        kind, architecture = values.pop("model", None), values.pop("architecture", None)
        if kind not in (None, "retrieval"):
            raise CheckpointError("is of a kind of model that this build does not know")
        if not isinstance(architecture, dict):
            raise CheckpointError("has no architecture")
        try:
            config = (RetrievalConfig if kind else ModelConfig).from_dict(architecture)
        except (ConfigError, OverflowError, TypeError, ValueError) as error:
            raise CheckpointError(f"describes a model that cannot be built: {error}") from error
        return values | {"config": config}


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object, without NaN and infinities. Raises CheckpointError."""
    try:
        values = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"is not valid JSON ({str(error)[:120]})") from error
    if not isinstance(values, dict):
        raise CheckpointError("must hold a JSON object")
    return values


def kind_in(raw: bytes) -> Any:
    """What a manifest's JSON names as its kind; None for a checkpoint, which names none, and for what is no JSON object."""
    try:
        return parse_json_object(raw).get("kind")
    except CheckpointError:
        return None


def signed(content: Mapping[str, Any]) -> bytes:
    """A manifest's content with its digest, as written to disk: UTF-8, one line per tensor and file."""
    return (_render({**content, "digest": content_digest(content)}) + "\n").encode()


def content_digest(content: Mapping[str, Any]) -> str:
    """SHA-256 in hex of a manifest's content as JSON with sorted keys and no spaces."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _render(content: Mapping[str, Any]) -> str:
    """JSON with one line per entry of an object of objects, so that a reader and a diff see tensors and files as rows."""
    lines = []
    for key, value in content.items():
        text = json.dumps(value, allow_nan=False)
        if isinstance(value, dict) and value:
            rows = (f"  {json.dumps(name)}: {json.dumps(row, allow_nan=False)}" for name, row in value.items())
            text = "{\n" + ",\n".join(rows) + "\n }"
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}"
