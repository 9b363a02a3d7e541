"""Named tensors → a checked `Request`, and scores → named tensors: what the Open Inference Protocol carries, over HTTP and gRPC.

A tensor has the name of its field in the array form of the JSON request. Not for bytes on a wire: see `inference`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, get_type_hints

import numpy as np
from numpy.typing import NDArray

from app.errors import MAX_PROBLEMS, InvalidRequest
from app.request.ids import read_ids, texts_of
from app.request.reply import ReplyFormat, names_of, rows_of
from app.request.rules import NO_MASK, Rule, bounds_told, known_names, parts_of, rule_of
from app.request.schema import NOBODY, TWO_USERS, Candidate, HistoryItem, Id, Weights
from app.request.validate import NUMBERS, Posts, Request, bits_of
from app.request.vocabulary import Vocabulary
from model.inputs import Scores
from weights.format.manifest import Manifest
from weights.text_ids import IdKind

DTYPES: dict[str, np.dtype[Any]] = {
    "UINT64": np.dtype("<u8"),
    "INT64": np.dtype("<i8"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(object),  # of str
}
DATATYPES = {dtype: name for name, dtype in DTYPES.items()}

MOST_ROWS = 2**31 - 1  # on an axis, whatever the others are: no product of two overflows where it is one of bytes
Spec = tuple[str, tuple[str, ...]]  # datatype; what each axis counts
Input = tuple[Any, Spec]  # declared type, spec


def _input(hint: Any, *axes: str) -> Input:
    _, metas = parts_of(hint)
    datatype, *further = next(meta.extra["tensor"] for meta in metas if meta.extra and "tensor" in meta.extra)
    return hint, (datatype, (*axes, *further))


def _inputs() -> dict[str, Input]:
    """Each tensor by its name: ids first, then matrices, then the rest."""
    found = {"user_id": _input(Id, "1")}
    for struct, part, axis in ((Candidate, "candidates", "C"), (HistoryItem, "history", "H")):
        hints = get_type_hints(struct, include_extras=True)
        own = [(f"{part}.{name}", _input(hint, axis)) for name, hint in hints.items()]
        found |= sorted(own, key=lambda entry: (entry[1][1][0] != "UINT64", -len(entry[1][1][1])))
    return found | {"weights": _input(Weights)}


_INPUTS = _inputs()
INPUTS: dict[str, Spec] = {name: spec for name, (_, spec) in _INPUTS.items()}
OUTPUTS: dict[str, Spec] = {
    "post_id": ("UINT64", ("C",)),
    "score": ("FP64", ("C",)),
    "rank": ("INT64", ("C",)),
    "probabilities": ("FP32", ("C", "A")),
    "continuous": ("FP32", ("C", "Z")),
}
MASKED = "history.actions"
"""May be UINT64 words, `[H]` or `[H, W]`: bit a of them all is action a."""
REQUIRED = ("candidates.post_id", "candidates.author_id")


def spoken(specs: Mapping[str, Spec], ids: IdKind) -> dict[str, Spec]:
    """These tensors with the datatype that ids of this kind have."""
    kind = "BYTES" if ids == "text" else "UINT64"
    return {name: (kind if datatype == "UINT64" else datatype, axes) for name, (datatype, axes) in specs.items()}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input as it came. `data`: little-endian bytes in row-major order, or a JSON array."""

    name: str
    datatype: str
    shape: Sequence[int]
    data: bytes | memoryview | list[Any]


@dataclass(frozen=True, slots=True)
class Tensors:
    """A request whose tensors are not yet checked. `reply`: the wanted outputs, each with whether its data is binary."""

    inputs: Sequence[Tensor]
    parameters: Mapping[str, Any]
    reply: dict[str, bool]
    request_id: str | None

    @property
    def timeout_seconds(self) -> float | None:
        """How long the caller waits."""
        return self.parameters["timeout"] / 1e6 if "timeout" in self.parameters else None

    @property
    def user_id(self) -> int | str:
        """The user's id, 0 if it cannot be read."""
        tensor = next((tensor for tensor in self.inputs if tensor.name == "user_id"), None)
        data: Any = b"" if tensor is None else tensor.data
        if not isinstance(data, list):
            is_text = tensor is not None and tensor.datatype == "BYTES"
            return bytes(data[4:]).decode(errors="replace") if is_text else int.from_bytes(data[:8], "little")
        return data[0] if data and type(data[0]) in (int, str) else 0

    @property
    def handle(self) -> str | None:
        """As in `Request`."""
        return self.parameters.get("context")

    def count(self, name: str) -> int:
        """The number of items in `candidates` or `history`, by the tensor's shape."""
        return next((tensor.shape[0] for tensor in self.inputs if tensor.name == f"{name}.post_id" and tensor.shape), 0)


def check(tensors: Tensors, vocabulary: Vocabulary) -> Request:
    """Check names, datatypes, shapes, sizes and values. Raises InvalidRequest with the first ten problems."""
    checks = _Checks(vocabulary, tensors.parameters)
    columns = checks.read(tensors.inputs, tensors.handle)
    for name, (hint, _) in _INPUTS.items():
        if name in columns and columns[name].dtype.kind != "u":
            checks.refuse_beyond(name, columns[name], rule_of(hint, vocabulary))
    parameters = tensors.parameters
    if "weights" in columns and "weights" in parameters:
        checks.problems.append(("parameters.weights", "names weights, and a tensor of weights is there as well"))
    if checks.problems:
        raise InvalidRequest(checks.problems)
    sent = columns["candidates.post_id"].tolist() if vocabulary.ids == "text" else None
    columns |= {name: read_ids(column.tolist(), "text") for name, column in columns.items() if column.dtype.kind == "O"}
    history, candidates = _posts("history", columns), _posts("candidates", columns)
    candidates.sent = sent
    weights, width = vocabulary.weights, len(vocabulary.action_names)
    if "weights" in parameters:
        weights = vocabulary.sets[parameters["weights"]]
    elif "weights" in columns:
        weights = _spread(columns["weights"], checks.actions, (width,), "f8")
    return Request(
        int(columns["user_id"][0]) if "user_id" in columns else 0,
        history,
        _spread(columns.get("history.actions"), checks.actions, (len(history), width), "f4"),
        columns.get("history.dwell_time", np.zeros(len(history))).astype(np.float64),
        len(history),
        candidates,
        weights,
        parameters.get("top_k"),
        checks.wanted,
        tensors.request_id,
        tensors.reply,
        tensors.handle,
        parameters.get("score") == "offset",
        {name: columns.get(f"candidates.{name}", np.zeros(len(candidates), np.int64)) for name in NUMBERS},
        parameters.get("impression_ts", 0),
    )


class _Checks:
    """Checks one request's tensors and collects the problems. `actions`: the columns that its action axis stands for."""

    def __init__(self, vocabulary: Vocabulary, parameters: Mapping[str, Any]) -> None:
        self.problems: list[tuple[str, str]] = []
        self._index, self._names = vocabulary.index, vocabulary.rule("names", lambda: known_names(vocabulary))
        self._specs = spoken(INPUTS, vocabulary.ids)
        every = list(range(len(vocabulary.action_names)))
        self.actions = self._columns("actions", parameters["actions"]) if "actions" in parameters else every
        wanted = parameters.get("actions_wanted")
        self.wanted = None if wanted is None else self._columns("actions_wanted", wanted)
        self._sizes = {"1": 1, "A": len(self.actions), "W": -(-len(self.actions) // 64)}

    def _columns(self, name: str, text: str) -> list[int]:
        names = text.split(",", len(self._index)) if text else []
        wrong = [*islice(self._names.wrong([names]), 1)]
        self.problems += [(f"parameters.{name}", sentence) for _, _, sentence in wrong]
        return [] if wrong else [self._index[action] for action in names]

    def read(self, tensors: Sequence[Tensor], handle: str | None) -> dict[str, NDArray[Any]]:
        """Each known tensor as an array of its dtype and shape. With a context handle, user and history tensors are a problem."""
        columns: dict[str, NDArray[Any]] = {}
        for place, tensor in enumerate(tensors):
            if len(self.problems) >= MAX_PROBLEMS:
                break
            if tensor.name not in INPUTS:
                self.problems.append((f"inputs[{place}].name", f"must be one of {', '.join(INPUTS)}"))
            elif tensor.name in columns:
                self.problems.append((f"inputs[{place}].name", "repeats the name of an earlier tensor"))
            else:
                column = self._array(tensor)
                if isinstance(column, str):
                    self.problems.append((tensor.name, column))
                else:
                    columns[tensor.name] = column
        sent = {tensor.name for tensor in tensors}
        has_history = any(name.startswith("history.") for name in sent)
        required = (*REQUIRED, "history.post_id", "history.author_id") if has_history else REQUIRED
        self.problems += [("user_id", NOBODY)] if handle is None and "user_id" not in sent else []
        self.problems += [(name, "is required") for name in required if name not in sent]
        if handle is not None and (has_history or "user_id" in sent):
            self.problems.append(("parameters.context", TWO_USERS))
        if "candidates.post_id" in columns and not len(columns["candidates.post_id"]):
            self.problems.append(("candidates", "must not be empty"))
        return columns

    def _array(self, tensor: Tensor) -> NDArray[Any] | str:
        """The tensor's array, or what is wrong with it."""
        datatype, axes = self._specs[tensor.name]
        if is_mask := tensor.name == MASKED and tensor.datatype == "UINT64":
            datatype, axes = "UINT64", ("H", "W")[: 1 if len(tensor.shape) == 1 and self._sizes["W"] == 1 else 2]
        if tensor.datatype != datatype:
            return f"must be of the datatype {datatype}"
        shape = tuple(tensor.shape)
        letters = f"[{', '.join(axes)}]"
        if len(shape) != len(axes) or not all(0 <= size <= MOST_ROWS for size in shape):
            return f"must have the shape {letters}"
        for axis, size in zip(axes, shape, strict=True):
            if self._sizes.setdefault(axis, size) != size:
                return f"must have the shape {letters}, as long on each axis as other tensors are"
        dtype, count = DTYPES[datatype], math.prod(shape)
        if isinstance(tensor.data, list):
            found = _from_json(tensor.data, dtype, shape)
        elif datatype == "BYTES":
            found = texts_of(tensor.data, count)
        elif len(tensor.data) != count * dtype.itemsize:
            return f"must hold {dtype.itemsize} bytes a value, as many as its shape says"
        else:
            found = np.array(np.frombuffer(tensor.data, dtype).reshape(shape))  # a copy: aligned, and the body may go
        return self._unmasked(found) if is_mask and not isinstance(found, str) else found

    def _unmasked(self, words: NDArray[np.uint64]) -> NDArray[np.float32] | str:
        """The dense form of masks, or what is wrong with them."""
        width = len(self.actions)
        bits = bits_of(words.reshape(len(words), -1 if len(words) else 1), 64 * self._sizes["W"])
        return NO_MASK.format(width) if bits[:, width:].any() else bits[:, :width]

    def refuse_beyond(self, name: str, values: NDArray[Any], rule: Rule) -> None:
        """Record values outside the bounds, NaN included, and texts that are not ids."""
        if values.dtype.kind == "O":
            self.problems += [
                (f"{name}[{place}]", text) for place, _, text in islice(rule.wrong(values.tolist()), MAX_PROBLEMS)
            ]
            return
        assert rule.bounds is not None
        low, high = rule.bounds
        if values.dtype == np.float32:
            high = min(high, float(np.finfo(np.float32).max))
        good = (values >= low) & (values <= high)
        if good.all():
            return
        sentence = bounds_told(low, high, whole=values.dtype.kind == "i")
        for place in np.argwhere(~good)[:MAX_PROBLEMS].tolist():
            self.problems.append((name + "".join(f"[{index}]" for index in place), sentence))


def _from_json(values: list[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any] | str:
    """An array of JSON's, flat or nested as the shape is."""
    if (
        len(shape) == 2
        and len(values) == shape[0]
        and all(type(row) is list and len(row) == shape[1] for row in values)
    ):
        values = list(chain.from_iterable(values))
    if dtype.kind == "O" and len(values) == math.prod(shape) and set(map(type, values)) <= {str}:
        return np.array(values, object)
    kinds = {int, float} if dtype.kind == "f" else {int}
    if dtype.kind != "O" and len(values) == math.prod(shape) and set(map(type, values)) <= kinds:
        with suppress(OverflowError), np.errstate(over="ignore"):  # beyond float32 it is infinite, and refused
            return np.asarray(array({"f": "d", "u": "Q", "i": "q"}[dtype.kind], values)).reshape(shape).astype(dtype)
    return f"must hold an array of {DATATYPES[dtype]} values, as many as its shape says"


def raw_of(array: NDArray[Any]) -> bytes:
    """An output's values as binary data."""
    if array.dtype.kind != "O":
        return array.tobytes()
    return b"".join(len(text).to_bytes(4, "little") + text for text in map(str.encode, array.tolist()))


def _posts(name: str, columns: Mapping[str, NDArray[Any]]) -> Posts:
    post_ids = columns.get(f"{name}.post_id", np.zeros(0, np.uint64))
    author_ids = columns.get(f"{name}.author_id", post_ids)
    return Posts(post_ids, author_ids, columns.get(f"{name}.product_surface", np.zeros(len(post_ids), np.int64)))


def _spread(values: NDArray[Any] | None, columns: list[int], shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Spread values of the actions in `columns` over an array with all actions on its last axis; 0 elsewhere."""
    if values is not None and columns == list(range(shape[-1])):
        return values
    found = np.zeros(shape, dtype)
    if values is not None:
        found[..., columns] = values
    return found


def wanted_outputs(named: Sequence[tuple[str, bool]], is_binary: bool) -> dict[str, bool]:
    """The named outputs, else all, each with whether its data is binary. Raises InvalidRequest for unknown or repeated ones."""
    wanted = {name: binary or is_binary for name, binary in named} or dict.fromkeys(OUTPUTS, is_binary)
    if not wanted.keys() <= OUTPUTS.keys() or len(named) > len(wanted):
        raise InvalidRequest([("outputs", f"must name some of {', '.join(OUTPUTS)}, each once")])
    return wanted


def outputs_of(
    request: Request, scores: Scores, form: ReplyFormat, history_used: int, timings_ms: Mapping[str, float]
) -> tuple[dict[str, str | int | float], list[tuple[str, bool, NDArray[Any]]]]:
    """What a reply says besides its tensors: names of their columns, how much of the history was seen, where the time went. Then each
    wanted output: its name, whether its data is binary, and its array."""
    assert not isinstance(request.reply, str)
    rows = rows_of(request, scores, form)
    parameters: dict[str, str | int | float] = {
        "actions": ",".join(names_of(request, form)),
        "continuous": ",".join(form.continuous_names),
        "history_used": history_used,
        "history_dropped": request.history_length - history_used,
        **{f"{stage}_ms": milliseconds for stage, milliseconds in timings_ms.items()},
    }
    if request.handle is not None:
        parameters["context"] = request.handle
    columns = rows._asdict()
    if isinstance(rows.post_id, list):
        columns["post_id"] = np.array(rows.post_id, object)
    outputs = request.reply.items()
    return parameters, [(name, is_binary, np.ascontiguousarray(columns[name])) for name, is_binary in outputs]


def describe_model(manifest: Manifest) -> dict[str, Any]:
    """The protocol's metadata of a model: its tensors, -1 where a size is the request's. `parameters` name the columns."""
    continuous = [output.name for output in manifest.continuous]
    sizes = {"1": 1, "A": len(manifest.action_names), "Z": len(continuous)}

    def described(specs: Mapping[str, Spec]) -> list[dict[str, Any]]:
        return [
            {"name": name, "datatype": datatype, "shape": [sizes.get(axis, -1) for axis in axes]}
            for name, (datatype, axes) in specs.items()
        ]

    return {
        "name": manifest.name,
        "versions": [manifest.version],
        "platform": "phoenix-ranking-server",
        "inputs": described(spoken(INPUTS, manifest.ids)),
        "outputs": described(spoken(OUTPUTS, manifest.ids)),
        "parameters": {"actions": ",".join(manifest.action_names), "continuous": ",".join(continuous)},
    }
