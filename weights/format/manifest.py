"""Parses `manifest.json`, which describes a checkpoint, strictly and writes it canonically. Reads no weights."""

from __future__ import annotations

import hashlib
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from model.config import MAX_FACTOR, ConfigError, ModelConfig, RetrievalConfig
from weights.errors import CheckpointError
from weights.text_ids import IdKind

FORMAT_VERSION = 1
RETRIEVAL = {"model": "retrieval"}  # in the manifest of a retrieval model (two towers), absent from a ranker's
MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 16 * 2**20
MAX_SCORE_WEIGHT = 1e9  # the same limit as for a weight in a request
ID_KINDS: tuple[IdKind, ...] = ("uint64", "text")

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")  # goes unescaped into headers, metric labels and logs
_ACTION = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")  # never a number: a decimal string in a request is an index
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}\.safetensors")  # no separator, no leading dot
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ContinuousOutput:
    """One continuous head: the model's 0 … 1 times `scale` is a value in `unit` (`s`, or an empty string for a plain number)."""

    name: str
    scale: float
    unit: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", float(self.scale))


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of the checkpoint: SHA-256 of its content in hex, and its length in bytes."""

    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The file, dtype (`float32` or `bfloat16`) and shape of a tensor."""

    file: str
    dtype: str
    shape: tuple[int, ...]


class Document(ABC):
    """Base of all manifests, which are written with their digest: the SHA-256 of the canonical content, which includes every file's
    digest. Subclasses are dataclasses with `digest`; `dtypes` are the dtypes that their tensors may have."""

    __slots__ = ()
    name: str
    version: str
    ids: IdKind
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    digest: str
    dtypes: ClassVar[Sequence[str]] = ("float32", "bfloat16")

    @abstractmethod
    def _content(self) -> dict[str, Any]:
        """All that the digest covers."""

    def _entries(self) -> dict[str, Any]:
        """Files and tensors as in the content, sorted by name."""
        listed: dict[str, Mapping[str, Any]] = {"files": self.files, "tensors": self.tensors}
        return {key: {name: asdict(each) for name, each in sorted(entries.items())} for key, entries in listed.items()}

    def _sign(self) -> None:
        """Set the digest, and a short one as `version` if that is empty. Raises CheckpointError for invalid fields."""
        if not self.version:
            object.__setattr__(self, "version", content_digest(self._content())[:12])
        for what in ("name", "version"):
            if not _LABEL.fullmatch(label := getattr(self, what)):
                raise CheckpointError(
                    f"{what} {label[:100]!r} must be 1 to 100 letters, digits, dots, dashes, underscores or plus signs, and start "
                    "with a letter or digit"
                )
        if self.ids not in ID_KINDS:
            raise CheckpointError(f"has ids that are {str(self.ids)[:40]!r}; they are one of {', '.join(ID_KINDS)}")
        for name, entry in self.tensors.items():
            if entry.file not in self.files:
                raise CheckpointError(f"tensor {name} is said to lie in {entry.file}, which is not among the files")
        object.__setattr__(self, "digest", content_digest(self._content()))

    def to_json(self) -> bytes:
        """The exact content of `manifest.json`."""
        return signed(self._content())

    @classmethod
    def _read(cls, values: Mapping[str, Any], keys: dict[str, type]) -> dict[str, Any]:
        """The constructor arguments in `values`: these `keys` and the common ones. Raises CheckpointError for other keys or formats."""
        if (found := values.get("format_version")) != FORMAT_VERSION:
            raise CheckpointError(f"has format version {str(found)[:40]}, this build reads {FORMAT_VERSION}")
        every = {"format_version": int, "name": str, "version": str, "files": dict, "tensors": dict, "digest": str}
        check_keys(values, every | keys | ({"ids": str} if "ids" in values else {}), "")
        read = {key: value for key, value in values.items() if key not in ("format_version", "digest")}
        read["version"] = read["version"] or "-"  # refused as a label: a written manifest always has a version
        read["files"] = {name: _file_entry(name, item) for name, item in values["files"].items()}
        read["tensors"] = {name: _tensor_entry(name, item, cls.dtypes) for name, item in values["tensors"].items()}
        return read

    def _check_written(self, raw: bytes, digest: str) -> None:
        """Raises CheckpointError if `raw`, which states `digest`, differs from what this manifest would write."""
        if digest != self.digest:
            raise CheckpointError(
                f"says its digest is {digest[:64]!r}, but its content has {self.digest}: it was changed after it was written"
            )
        if raw != self.to_json():
            raise CheckpointError("differs from the form in which it was written: it was changed afterwards")


@dataclass(frozen=True, slots=True)
class Manifest(Document):
    """Everything about a checkpoint except its numbers. Raises CheckpointError for fields that contradict each other.

    `action_names` are in output order, one per action of `config`; `continuous` one per continuous output. `score_weights`
    maps some action names to the default weights of the combined score. `digest` is the SHA-256 of the canonical content,
    which includes every file's digest: it identifies the checkpoint. An empty `version` becomes a short digest. `ids` is the kind of
    ids that callers use for users, posts and authors; a manifest without it means `uint64`. `training`: what was decided from the log that
    it was trained on, any JSON object; empty where that is not known.
    """

    name: str
    version: str
    config: ModelConfig
    action_names: tuple[str, ...]
    continuous: tuple[ContinuousOutput, ...]
    score_weights: dict[str, float]
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    ids: IdKind = "uint64"
    training: dict[str, Any] = field(default_factory=dict)
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        try:
            weights = {name: float(weight) for name, weight in self.score_weights.items()}
        except (OverflowError, TypeError, ValueError) as error:
            raise CheckpointError("a score weight is no number, or too large") from error
        object.__setattr__(self, "score_weights", weights)
        _check_outputs(self)
        self._sign()

    def _content(self) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            **(RETRIEVAL if isinstance(self.config, RetrievalConfig) else {}),
            **({} if self.ids == "uint64" else {"ids": self.ids}),
            "name": self.name,
            "version": self.version,
            "architecture": self.config.to_dict(),
            "action_names": list(self.action_names),
            "continuous": [asdict(output) for output in self.continuous],
            "score_weights": self.score_weights,
            **({"training": self.training} if self.training else {}),
            **self._entries(),
        }

    @classmethod
    def from_json(cls, raw: bytes) -> Manifest:
        """Parse what `to_json` wrote. Raises CheckpointError for anything else: unknown keys, wrong types, one changed byte."""
        values = parse_json_object(raw)
        is_retrieval = "model" in values
        if is_retrieval and values.pop("model") != RETRIEVAL["model"]:
            raise CheckpointError("is of a kind of model that this build does not know")
        keys: dict[str, type] = {"architecture": dict, "action_names": list, "continuous": list, "score_weights": dict}
        keys |= {"training": dict} if "training" in values else {}
        read = cls._read(values, keys)
        try:
            config = (RetrievalConfig if is_retrieval else ModelConfig).from_dict(read.pop("architecture"))
        except (ConfigError, OverflowError, TypeError, ValueError) as error:
            raise CheckpointError(f"describes a model that cannot be built: {error}") from error
        for name, weight in values["score_weights"].items():
            if type(weight) not in (int, float):
                raise CheckpointError(f"score weight {name[:64]!r} must be a number")
        read["action_names"] = tuple(read["action_names"])
        read["continuous"] = tuple(_continuous(item) for item in read["continuous"])
        manifest = cls(**read, config=config)
        manifest._check_written(raw, values["digest"])
        return manifest


def signed(content: Mapping[str, Any]) -> bytes:
    """A manifest's content with its digest, as written to disk: UTF-8, one line per tensor and file."""
    return (_render({**content, "digest": content_digest(content)}) + "\n").encode()


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """Parse strict JSON: one UTF-8 object, no duplicate keys, no NaN or infinity. Raises CheckpointError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("an object has the same key twice")
        return dict(pairs)

    def refuse(text: str) -> float:
        raise ValueError(f"{text[:40]} is no finite number")

    def finite(text: str) -> float:
        number = float(text)
        return number if math.isfinite(number) else refuse(text)

    try:
        values = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse, parse_float=finite)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is not valid JSON ({str(error)[:120]})") from error
    if not isinstance(values, dict):
        raise CheckpointError("must hold a JSON object")
    return values


def check_keys(values: Mapping[str, Any], expected: Mapping[str, type], where: str) -> None:
    """Check that there are exactly these keys with exactly these types (a bool is not an int). Raises CheckpointError."""
    unknown, missing = sorted(set(values) - set(expected)), sorted(set(expected) - set(values))
    if unknown or missing:
        problems = [f"unknown keys {', '.join(unknown)[:200]}"] if unknown else []
        problems += [f"no {', '.join(missing)}"] if missing else []
        raise CheckpointError(f"{where + ' ' if where else ''}has {' and '.join(problems)}")
    for key, kind in expected.items():
        if type(values[key]) is not kind:
            raise CheckpointError(f"{where + '.' if where else ''}{key} must be a JSON {_JSON_NAMES[kind]}")


_JSON_NAMES = {int: "integer", float: "number with a fraction", str: "string", dict: "object", list: "array"}


def _check_outputs(manifest: Manifest) -> None:
    names, config = manifest.action_names, manifest.config
    for name in names:
        if not isinstance(name, str) or not _ACTION.fullmatch(name):
            raise CheckpointError(
                f"action name {str(name)[:64]!r} must be letters, digits and underscores, a letter first"
            )
    if len(names) != config.actions or len(set(names)) != len(names):
        raise CheckpointError(f"needs {config.actions} different action names, got {len(set(names))} in {len(names)}")
    outputs = [output.name for output in manifest.continuous]
    if len(outputs) != config.continuous_actions or len(set(outputs)) != len(outputs):
        raise CheckpointError(f"needs {config.continuous_actions} different continuous outputs, got {len(outputs)}")
    for output in manifest.continuous:
        if not _ACTION.fullmatch(output.name) or len(output.unit) > 16:
            raise CheckpointError(f"continuous output {output.name[:64]!r} has a bad name or unit")
        if (
            not 1 / MAX_FACTOR <= output.scale <= MAX_FACTOR
        ):  # replies are scaled in float32 after the check that they are finite
            raise CheckpointError(
                f"continuous output {output.name} must have a scale in {1 / MAX_FACTOR:g} … {MAX_FACTOR:g}, got {output.scale!r}"
            )
    for name, weight in manifest.score_weights.items():
        if name not in names:
            raise CheckpointError(f"score weight {name[:64]!r} belongs to no action of this checkpoint")
        if not abs(weight) <= MAX_SCORE_WEIGHT:
            raise CheckpointError(
                f"score weight of {name} must be at most {MAX_SCORE_WEIGHT:g} either way, got {weight!r}"
            )


def _continuous(item: Any) -> ContinuousOutput:
    if not isinstance(item, dict):
        raise CheckpointError("continuous must hold objects")
    check_keys(item, {"name": str, "scale": float, "unit": str}, "continuous")
    return ContinuousOutput(**item)


def _file_entry(name: str, item: Any) -> FileEntry:
    if not _FILE.fullmatch(name):
        raise CheckpointError(
            f"names a file {name[:100]!r}, which is not a plain *.safetensors name inside the directory"
        )
    if not isinstance(item, dict):
        raise CheckpointError(f"files.{name} must be an object")
    check_keys(item, {"sha256": str, "bytes": int}, f"files.{name}")
    if not _SHA256.fullmatch(item["sha256"]) or item["bytes"] < 0:
        raise CheckpointError(f"files.{name} holds no SHA-256 in lower-case hex or a negative length")
    return FileEntry(**item)


def _tensor_entry(name: str, item: Any, dtypes: Sequence[str]) -> TensorEntry:
    where = f"tensors.{name[:100]}"
    if not isinstance(item, dict):
        raise CheckpointError(f"{where} must be an object")
    check_keys(item, {"file": str, "dtype": str, "shape": list}, where)
    if item["dtype"] not in dtypes:
        raise CheckpointError(f"{where}.dtype must be one of {', '.join(dtypes)}, got {item['dtype'][:40]!r}")
    if any(type(size) is not int or not 0 < size < 2**40 for size in item["shape"]):
        raise CheckpointError(f"{where}.shape must hold positive integers")
    return TensorEntry(item["file"], item["dtype"], tuple(item["shape"]))


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
