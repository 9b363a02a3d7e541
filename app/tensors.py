"""Tensors of the Open Inference Protocol ↔ the columns of a ranking. Their data is JSON, or binary after the JSON.

A tensor has the name of its field in the columns form of `/rank`; `INPUTS` and `OUTPUTS` are all there are. What other servers of the
protocol ignore is ignored here too. What would change a number silently is refused: an unknown tensor, another shape or datatype.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np
import orjson
from msgspec.json import Decoder
from numpy.typing import NDArray

from app import DISTRIBUTION, schema
from app.errors import InvalidRequest
from app.features import NO_MASK, CheckedRequest, ReplyOptions, bits_of, columns_of, ids_of
from app.interface import Ranked
from app.replies import Placement, names_of, rows_of
from app.schema import NO_USER, TWO_USERS, InferParameters, InferRequest, InputTensor, WantedOutput
from app.settings import Limits
from app.vocabulary import Vocabulary
from model.config import MAX_DWELL_SECONDS, ModelConfig
from model.inputs import Candidates, Context, age_bucket
from weights.format.manifest import Manifest
from weights.text_ids import IdKind
from weights.values import (
    Problem,
    problem_of_actions,
    problem_of_codes,
    problem_of_dwells,
    problem_of_score_weights,
    problem_of_surfaces,
    problem_of_times,
)

LENGTH_HEADER = "Inference-Header-Content-Length"
"""How many bytes of a body are JSON; binary data follows them."""


class Spec(NamedTuple):
    """What a tensor is. `datatype`: the protocol's name; `ID` is `UINT64` or `BYTES`, by the checkpoint's kind of ids. `axes`: what each
    axis counts: `1`, `C` candidates, `H` history items, `A` actions, `Z` continuous outputs, `Q` content codes. `problem`: what is wrong
    with its values."""

    datatype: str
    axes: str
    problem: Callable[[NDArray[Any]], Problem | None] = lambda values: None


INPUTS: Mapping[str, Spec] = {
    "user_id": Spec("ID", "1"),
    "candidates.post_id": Spec("ID", "C"),
    "candidates.author_id": Spec("ID", "C"),
    "candidates.product_surface": Spec("INT64", "C"),
    "candidates.created_at": Spec("INT64", "C", problem_of_times),
    "candidates.codes": Spec("INT64", "CQ"),
    "history.post_id": Spec("ID", "H"),
    "history.author_id": Spec("ID", "H"),
    "history.actions": Spec("FP32", "HA", problem_of_actions),
    "history.product_surface": Spec("INT64", "H"),
    "history.dwell_time": Spec("FP32", "H", problem_of_dwells),
    "history.codes": Spec("INT64", "HQ"),
    "weights": Spec("FP64", "A", problem_of_score_weights),
}
OUTPUTS: Mapping[str, Spec] = {
    "post_id": Spec("ID", "C"),
    "score": Spec("FP64", "C"),
    "rank": Spec("INT64", "C"),
    "propensity": Spec("FP64", "C"),
    "probabilities": Spec("FP32", "CA"),
    "continuous": Spec("FP32", "CZ"),
}
DRAWN = "propensity"
"""Only where the ranks are drawn at random."""
MASKED = "history.actions"
"""May also be `UINT64` words, `[H]` or `[H, W]`: bit a of a row is action a."""

DTYPES: Mapping[str, np.dtype[Any]] = {
    "UINT64": np.dtype("<u8"),
    "INT64": np.dtype("<i8"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(object),  # of str
}
DATATYPES = {dtype: name for name, dtype in DTYPES.items()}

REQUEST = Decoder(InferRequest)
_INTEGERS, _NUMBERS = Decoder(list[int | list[int]]), Decoder(list[float | list[float]])
_JSON: Mapping[str, tuple[Decoder[Any], str]] = {
    "UINT64": (_INTEGERS, "Q"),
    "INT64": (_INTEGERS, "q"),
    "FP32": (_NUMBERS, "d"),
    "FP64": (_NUMBERS, "d"),
    "BYTES": (Decoder(list[str | list[str]]), ""),
}
"""How JSON data of each datatype is read, and the type code of an `array` of it."""
NO_DATA = "must have either data or the parameter binary_data_size"
NO_FIT = "must describe, in their order, exactly the binary data that follows the JSON"


def spoken(specs: Mapping[str, Spec], ids: IdKind) -> dict[str, Spec]:
    """These tensors, with the datatype that ids of this kind have."""
    kind = "BYTES" if ids == "text" else "UINT64"
    return {name: spec._replace(datatype=kind) if spec.datatype == "ID" else spec for name, spec in specs.items()}


# --- Requests --------------------------------------------------------------------------------------------------------------------------


class Tensor(NamedTuple):
    """One input as it came. `data`: little-endian bytes in row-major order, or JSON where `is_json`."""

    datatype: str
    shape: list[int]
    data: memoryview
    is_json: bool


@dataclass(frozen=True, slots=True)
class TensorRequest:
    """A request of bounded size whose tensors are not read yet. `outputs`: those that are wanted, each with whether its data is binary.
    `candidates` and `history`: how many, by the shapes."""

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, bool]
    parameters: InferParameters
    request_id: str | None
    model_name: str | None
    candidates: int
    history: int

    @property
    def timeout_seconds(self) -> float | None:
        """How long the caller waits, None where the body does not say."""
        return None if self.parameters.timeout is None else self.parameters.timeout / 1e6


def read(body: bytes, length: str | None, limits: Limits) -> TensorRequest:
    """Decode and check what holds for every checkpoint. `length`: the value of `LENGTH_HEADER`, where the caller sent it.

    Raises MalformedJson, TooLarge or InvalidRequest.
    """
    text = body if length is None else body[: _json_bytes(length, len(body))]
    request = schema.read(REQUEST, text, limits)
    parameters = request.parameters or InferParameters()
    inputs = _with_data(request.inputs, memoryview(body)[len(text) :])
    _check_names(inputs, parameters)
    sizes = request.sizes()
    if not sizes["candidates"]:
        raise InvalidRequest("candidates", "must not be empty")
    possible = [*OUTPUTS] if parameters.explore_temperature is not None else [name for name in OUTPUTS if name != DRAWN]
    outputs = _chosen_outputs(request.outputs or [], possible, is_binary=bool(parameters.binary_data_output))
    return TensorRequest(inputs, outputs, parameters, request.id or None, request.model_name, **sizes)


def _json_bytes(length: str, most: int) -> int:
    if not (length.isascii() and length.isdigit() and len(length) <= 12 and int(length) <= most):
        raise InvalidRequest(LENGTH_HEADER, "must be the length in bytes of the JSON that the body begins with")
    return int(length)


def _with_data(inputs: Sequence[InputTensor], rest: memoryview) -> dict[str, Tensor]:
    """Each input by its name with its own data: from the JSON, or the next piece of the rest. JSON `null` is no data."""
    tensors: dict[str, Tensor] = {}
    place = 0
    for number, tensor in enumerate(inputs):
        if tensor.name not in INPUTS:
            raise InvalidRequest(f"inputs[{number}].name", f"must be one of {', '.join(INPUTS)}")
        if tensor.name in tensors:
            raise InvalidRequest(f"inputs[{number}].name", "repeats the name of an earlier tensor")
        size = None if tensor.parameters is None else tensor.parameters.binary_data_size
        data = memoryview(tensor.data)
        is_json = bytes(data[:5]) not in (b"", b"null")
        if is_json == (size is not None):
            raise InvalidRequest(f"inputs[{number}]", NO_DATA)
        if size is not None:
            data, place = rest[place : place + size], place + size
        tensors[tensor.name] = Tensor(tensor.datatype, tensor.shape, data, is_json)
    if place != len(rest):
        raise InvalidRequest("inputs", NO_FIT)
    return tensors


def _check_names(inputs: Mapping[str, Tensor], parameters: InferParameters) -> None:
    """Raise InvalidRequest for a tensor that is missing, or that is there beside what stands in its place."""
    has_history = any(name.startswith("history.") for name in inputs)
    if parameters.context is not None and (has_history or "user_id" in inputs):
        raise InvalidRequest("parameters.context", TWO_USERS)
    if parameters.context is None and "user_id" not in inputs:
        raise InvalidRequest("user_id", NO_USER)
    for part in ("candidates", "history") if has_history else ("candidates",):
        for name in (f"{part}.post_id", f"{part}.author_id"):
            if name not in inputs:
                raise InvalidRequest(name, "is required")
    if parameters.weights is not None and "weights" in inputs:
        raise InvalidRequest("parameters.weights", "must not be given together with the tensor weights")


def _chosen_outputs(outputs: Sequence[WantedOutput], possible: Sequence[str], *, is_binary: bool) -> dict[str, bool]:
    """The outputs that are wanted, by default all that are possible, each with whether it is binary. Raises InvalidRequest."""
    chosen: dict[str, bool] = {}
    for output in outputs:
        own = None if output.parameters is None else output.parameters.binary_data
        if output.name not in possible or output.name in chosen:
            raise InvalidRequest("outputs", f"must name some of {', '.join(possible)}, each once")
        chosen[output.name] = is_binary if own is None else own
    return chosen or dict.fromkeys(possible, is_binary)


def check(request: TensorRequest, vocabulary: Vocabulary, config: ModelConfig, name: str = "") -> CheckedRequest:
    """Check a request against the checkpoint with this vocabulary and configuration. Raises InvalidRequest.

    `name`: what the ranking is called where the request has no id.
    """
    parameters, reader = request.parameters, _Reader(request, vocabulary)
    count, posts = request.candidates, reader.array("candidates.post_id", request.candidates)
    created_at = reader.array("candidates.created_at", count)
    candidates = Candidates(
        post_ids=reader.ids("candidates.post_id", posts),
        author_ids=reader.ids("candidates.author_id"),
        surfaces=reader.surfaces("candidates.product_surface", count),
        age_buckets=age_bucket(parameters.impression_ts, created_at, config),
        codes=reader.codes("candidates.codes", count),
    )
    options = _options(request, reader, name)
    return CheckedRequest(
        vocabulary,
        parameters.context or _context(request, reader, config),
        candidates,
        posts.tolist() if vocabulary.ids == "text" else posts,
        created_at,
        parameters.impression_ts,
        options,
    )


def _context(request: TensorRequest, reader: _Reader, config: ModelConfig) -> Context:
    """The user and the newest `history_length` history items."""
    count = request.history
    whole = Context(
        user_id=int(reader.ids("user_id")[0]),
        post_ids=reader.ids("history.post_id"),
        author_ids=reader.ids("history.author_id"),
        actions=reader.by_action(MASKED, count),
        surfaces=reader.surfaces("history.product_surface", count),
        dwell_seconds=np.minimum(reader.array("history.dwell_time", count), np.float32(MAX_DWELL_SECONDS)),
        codes=reader.codes("history.codes", count),
    )
    first = max(0, count - config.history_length)
    return whole.rows(np.arange(first, count), dropped=first) if first else whole  # a view would keep the whole history


def _options(request: TensorRequest, reader: _Reader, name: str) -> ReplyOptions:
    parameters, vocabulary = request.parameters, reader.vocabulary
    if "weights" in request.inputs:
        weights = reader.by_action("weights")
    else:
        weights = vocabulary.weights if parameters.weights is None else vocabulary.sets[parameters.weights]
    actions = parameters.actions_wanted
    return ReplyOptions(
        weights=weights,
        top_k=parameters.top_k,
        actions=None if actions is None else reader.columns("actions_wanted", actions),
        has_offset=parameters.score == "offset",
        request_id=request.request_id,
        temperature=parameters.explore_temperature,
        name=request.request_id or name,
    )


class _Reader:
    """Reads the tensors of one request with one checkpoint's vocabulary. Each method raises InvalidRequest."""

    def __init__(self, request: TensorRequest, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._inputs = request.inputs
        self._specs = spoken(INPUTS, vocabulary.ids)
        named = request.parameters.actions
        self._actions = [*range(len(vocabulary.action_names))] if named is None else self.columns("actions", named)
        self._sizes = {"1": 1, "C": request.candidates, "H": request.history, "Q": vocabulary.code_levels}
        self._sizes |= {"A": len(self._actions), "W": -(-len(self._actions) // 64)}

    def columns(self, parameter: str, names: str) -> list[int]:
        """The columns of actions whose names are separated by commas."""
        return columns_of(names.split(",") if names else [], self.vocabulary.index, f"parameters.{parameter}")

    def array(self, name: str, count: int | None = None) -> NDArray[Any]:
        """A tensor in its dtype and shape. With `count` it may be missing, and is that many zeros."""
        spec = self._specs[name]
        if name not in self._inputs:
            assert count is not None
            return np.zeros(count, DTYPES[spec.datatype])
        tensor = self._inputs[name]
        if tensor.datatype != spec.datatype:
            raise InvalidRequest(name, f"must be of the datatype {spec.datatype}")
        return self._checked(name, tensor, spec)

    def ids(self, name: str, sent: NDArray[Any] | None = None) -> NDArray[np.uint64]:
        """Ids as the model reads them, uint64; `sent`: the tensor, where it was read already. Without the tensor there are none."""
        if name not in self._inputs:
            return np.zeros(0, np.uint64)
        values = self.array(name) if sent is None else sent
        return ids_of(values.tolist(), "text", name) if values.dtype.kind == "O" else values

    def surfaces(self, name: str, count: int) -> NDArray[np.int64]:
        """Rows of the surfaces' table, 0 where the tensor is missing."""
        values = self.array(name, count)
        if (problem := problem_of_surfaces(values, self.vocabulary.product_surfaces)) is not None:
            raise InvalidRequest(f"{name}[{problem[0]}]", problem[1])
        return values

    def codes(self, name: str, count: int) -> NDArray[np.int64]:
        """Content codes, int64 `[count, Q]`; zeros where the tensor is missing, and for a checkpoint that reads none."""
        levels, values = self.vocabulary.code_levels, self.vocabulary.code_values
        if name not in self._inputs:
            return np.zeros((count, levels), np.int64)
        if not levels:  # any number of levels is checked, and ignored
            self._sizes["Q"] = min(self._inputs[name].shape[-1:], default=0)
        codes = self.array(name)
        if (problem := problem_of_codes(codes, levels, values)) is not None:
            raise InvalidRequest(f"{name}[{problem[0]}]", problem[1])
        return codes if levels else np.zeros((count, 0), np.int64)

    def by_action(self, name: str, count: int | None = None) -> NDArray[Any]:
        """A tensor whose last axis is all actions of the checkpoint, 0 for those that it does not name; `[count, A]` zeros if missing."""
        width = len(self.vocabulary.action_names)
        if name not in self._inputs:
            return np.zeros((count or 0, width), np.float32)
        is_mask = name == MASKED and self._inputs[name].datatype == "UINT64"
        values = self._unmasked(self._inputs[name]) if is_mask else self.array(name)
        if self._actions == [*range(width)]:
            return values
        all_actions = np.zeros((*values.shape[:-1], width), values.dtype)
        all_actions[..., self._actions] = values
        return all_actions

    def _unmasked(self, tensor: Tensor) -> NDArray[np.float32]:
        """The dense form of masks."""
        words, width = self._sizes["W"], len(self._actions)
        axes = "H" if len(tensor.shape) == 1 and words == 1 else "HW"
        bits = bits_of(self._checked(MASKED, tensor, Spec("UINT64", axes)).reshape(self._sizes["H"], words), 64 * words)
        if bits[:, width:].any():
            raise InvalidRequest(MASKED, NO_MASK.format(width))
        return bits[:, :width]

    def _checked(self, name: str, tensor: Tensor, spec: Spec) -> NDArray[Any]:
        shape = tuple(tensor.shape)
        if len(spec.axes) == 1 and len(shape) == 2 and shape[1] == 1:  # as codecs of tables write a column
            shape = shape[:1]
        if shape != tuple(self._sizes[axis] for axis in spec.axes):
            axes = ", ".join(spec.axes)
            raise InvalidRequest(name, f"must have the shape [{axes}], with the same sizes as the other tensors")
        array = _from_json(name, tensor, shape) if tensor.is_json else _from_bytes(name, tensor, shape)
        if (problem := spec.problem(array)) is not None:
            raise InvalidRequest(f"{name}[{problem[0]}]", problem[1])
        return array


def _from_bytes(name: str, tensor: Tensor, shape: tuple[int, ...]) -> NDArray[Any]:
    dtype, count = DTYPES[tensor.datatype], math.prod(shape)
    if tensor.datatype == "BYTES":
        return _texts(name, tensor.data, count)
    if len(tensor.data) != count * dtype.itemsize:
        raise InvalidRequest(name, f"must hold {dtype.itemsize} bytes for each value, as many values as its shape says")
    return np.array(np.frombuffer(tensor.data, dtype).reshape(shape))  # a copy: aligned, and the body may go


def _texts(name: str, data: memoryview, count: int) -> NDArray[Any]:
    """Texts, each after its length in 4 bytes."""
    texts: list[str] = []
    place = 0
    with suppress(UnicodeDecodeError):
        while len(texts) < count and place + 4 <= len(data):
            start, place = place + 4, place + 4 + int.from_bytes(data[place : place + 4], "little")
            texts.append(str(data[start:place], "utf-8"))
        if len(texts) == count and place == len(data):
            return np.array(texts, object)
    raise InvalidRequest(name, "must hold texts in UTF-8, each after its length in 4 bytes, as many as its shape says")


def _from_json(name: str, tensor: Tensor, shape: tuple[int, ...]) -> NDArray[Any]:
    """An array of JSON's, flat or nested as the shape is."""
    decoder, code = _JSON[tensor.datatype]
    with suppress(msgspec.DecodeError, OverflowError, TypeError, RecursionError):
        values = decoder.decode(tensor.data)
        if len(tensor.shape) == 2 and {*map(type, values)} == {list} and {*map(len, values)} == {tensor.shape[1]}:
            values = [*chain.from_iterable(values)]
        if len(values) == math.prod(shape):
            return _array(values, code, shape, DTYPES[tensor.datatype])
    raise InvalidRequest(name, f"must hold an array of {tensor.datatype} values, as many as its shape says")


def _array(values: list[Any], code: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Raises OverflowError or TypeError for a value that does not fit. Beyond float32 it is infinite, which is refused later."""
    if code:
        with np.errstate(over="ignore"):
            return np.asarray(array(code, values)).reshape(shape).astype(dtype)
    if not {*map(type, values)} <= {str}:
        raise TypeError
    return np.array(values, object)


# --- Replies ---------------------------------------------------------------------------------------------------------------------------


def render(
    request: TensorRequest,
    checked: CheckedRequest,
    ranked: Ranked,
    placement: Placement,
    timings_ms: Mapping[str, float],
) -> tuple[bytes, bytes]:
    """Return the JSON of a reply, and the binary data of the outputs that are to have it. The scores must be finite."""
    rows, vocabulary = rows_of(checked, ranked.scores, placement), checked.vocabulary
    binary: list[bytes] = []
    outputs: list[dict[str, Any]] = []
    for name, is_binary in request.outputs.items():
        values = getattr(rows, name)
        values = np.array(values, object) if isinstance(values, list) else np.ascontiguousarray(values)
        output: dict[str, Any] = {"name": name, "datatype": DATATYPES[values.dtype], "shape": values.shape}
        if is_binary:
            binary.append(_raw(values))
            output["parameters"] = {"binary_data_size": len(binary[-1])}
        else:
            output["data"] = values.tolist() if values.dtype.kind == "O" else values.ravel()
        outputs.append(output)
    parameters: dict[str, Any] = {
        "actions": ",".join(names_of(checked)),
        "continuous": ",".join(vocabulary.continuous_names),
        "history_used": ranked.history_used,
        "history_dropped": ranked.history_dropped,
        **{f"{stage}_ms": milliseconds for stage, milliseconds in timings_ms.items()},
    }
    if ranked.handle:
        parameters["context"] = ranked.handle
    if warnings := checked.warnings():
        parameters["warnings"] = " ".join(warnings)
    head = {
        "model_name": vocabulary.model["name"],
        "model_version": vocabulary.model["version"],
        "parameters": parameters,
    }
    named = {} if request.request_id is None else {"id": request.request_id}
    return orjson.dumps(head | named | {"outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY), b"".join(binary)


def _raw(values: NDArray[Any]) -> bytes:
    """An output's values as binary data."""
    if values.dtype.kind != "O":
        return values.tobytes()
    return b"".join(len(text).to_bytes(4, "little") + text for text in map(str.encode, values.tolist()))


def describe(manifest: Manifest) -> dict[str, Any]:
    """Return the protocol's metadata of a model: its tensors, -1 where a size is the request's. `parameters` name the columns."""
    continuous = [output.name for output in manifest.continuous]
    sizes = {"1": 1, "A": len(manifest.action_names), "Z": len(continuous), "Q": manifest.config.code_levels}

    def described(specs: Mapping[str, Spec]) -> list[dict[str, Any]]:
        return [
            {"name": name, "datatype": spec.datatype, "shape": [sizes.get(axis, -1) for axis in spec.axes]}
            for name, spec in spoken(specs, manifest.ids).items()
            if manifest.config.code_levels or "Q" not in spec.axes
        ]

    return {
        "name": manifest.name,
        "versions": [manifest.version],
        "platform": DISTRIBUTION,
        "inputs": described(INPUTS),
        "outputs": described(OUTPUTS),
        "parameters": {"actions": ",".join(manifest.action_names), "continuous": ",".join(continuous)},
    }
