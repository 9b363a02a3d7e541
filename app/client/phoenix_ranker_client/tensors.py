"""The binary wire: a request as named tensors, a ranking out of them. The Open Inference Protocol's body, posted to `/rank`."""

from __future__ import annotations

import operator
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from phoenix_ranker_client.messages import Ranked, Ranking, RankingRequest

MEDIA_TYPE = "application/octet-stream"
LENGTH = "inference-header-content-length"
CODES = {"UINT64": "Q", "INT64": "q", "FP32": "f", "FP64": "d"}
MAX_SECONDS = 1e30  # fits a float32; the service cuts off longer dwell times anyway


def can_carry(request: RankingRequest) -> bool:
    """Whether the ids are numbers. Texts need JSON, and where every id is a string, decimal ones may be texts as well."""
    posts: list[Any] = [*request.candidates, *request.history]
    ids = [request.user_id, *(value for post in posts for value in (post.post_id, post.author_id))]
    texts = [value for value in ids if isinstance(value, str)]
    return len(texts) < len(ids) and all(map(str.isdecimal, texts))


def write(request: RankingRequest) -> tuple[bytes, dict[str, str]]:
    """A request's body and headers. Raises ValueError, TypeError or OverflowError for a value that does not fit its column."""
    candidates, history = request.candidates, request.history if request.context is None else ()
    columns: dict[str, tuple[str, Sequence[Any]]] = {
        "candidates.post_id": ("UINT64", [_id(candidate.post_id) for candidate in candidates]),
        "candidates.author_id": ("UINT64", [_id(candidate.author_id) for candidate in candidates]),
        "candidates.product_surface": ("INT64", [candidate.product_surface for candidate in candidates]),
        "candidates.created_at": ("INT64", [candidate.created_at for candidate in candidates]),
    }
    if request.context is None:
        columns |= {
            "user_id": ("UINT64", [_id(request.user_id)]),
            "history.post_id": ("UINT64", [_id(event.post_id) for event in history]),
            "history.author_id": ("UINT64", [_id(event.author_id) for event in history]),
            "history.product_surface": ("INT64", [event.product_surface for event in history]),
            "history.dwell_time": ("FP32", [min(event.dwell_time, MAX_SECONDS) for event in history]),
        }
    shapes = {name: [len(values)] for name, (_, values) in columns.items()}
    parameters: dict[str, Any] = {"binary_data_output": True}
    weights = None if isinstance(request.weights, str) else request.weights
    names = list(dict.fromkeys([*(action for event in history for action in event.actions), *(weights or ())]))
    if names or weights is not None:
        parameters["actions"] = _joined(names)
        if request.context is None:
            columns["history.actions"] = ("FP32", _matrix(request, names))
            shapes["history.actions"] = [len(history), len(names)]
    if weights is not None:
        columns["weights"] = ("FP64", [weights.get(name, 0.0) for name in names])
        shapes["weights"] = [len(names)]
    elif request.weights is not None:
        parameters["weights"] = request.weights
    for name in ("top_k", "impression_ts", "context", "score"):
        if (value := getattr(request, name)) is not None:
            parameters[name] = value
    if request.actions_wanted is not None:
        parameters["actions_wanted"] = _joined(request.actions_wanted)
    inputs, data = [], []
    for name, (datatype, values) in columns.items():
        if bool in map(type, values):
            raise TypeError(f"{name} must hold numbers, and neither True nor False")
        data.append(_little(array(CODES[datatype], values)).tobytes())
        size = {"binary_data_size": len(data[-1])}
        inputs.append({"name": name, "datatype": datatype, "shape": shapes[name], "parameters": size})
    text = orjson.dumps({"inputs": inputs, "parameters": parameters})
    return b"".join([text, *data]), {"content-type": MEDIA_TYPE, "accept": MEDIA_TYPE, LENGTH: str(len(text))}


def read(request: RankingRequest, headers: Mapping[str, str], content: bytes) -> Ranking:
    """The ranking in the reply to this request. Raises LookupError, ValueError or TypeError if the reply has another form."""
    length = int(headers[LENGTH])
    header, place = orjson.loads(content[:length]), length
    columns: dict[str, Any] = {}
    for output in header["outputs"]:
        size = output["parameters"]["binary_data_size"]
        column = array(CODES[output["datatype"]])
        column.frombytes(content[place : place + size])
        columns[output["name"]] = _little(column).tolist()
        place += size
    said = header["parameters"]
    actions, quantities = _names(said["actions"]), _names(said["continuous"])
    as_sent = {int(candidate.post_id): candidate.post_id for candidate in request.candidates}
    rows = zip(
        columns["post_id"],
        columns["score"],
        columns["rank"],
        _rows(columns["probabilities"], len(actions), len(columns["rank"])),
        _rows(columns["continuous"], len(quantities), len(columns["rank"])),
        strict=True,
    )
    return Ranking(
        header["model_name"],
        header["model_version"],
        actions,
        [
            Ranked(as_sent[post], score, rank, probabilities, dict(zip(quantities, continuous, strict=True)))
            for post, score, rank, probabilities, continuous in rows
        ],
        said["history_used"],
        said["history_dropped"],
        {name.removesuffix("_ms"): value for name, value in said.items() if name.endswith("_ms")},
        said.get("context", ""),
    )


def _matrix(request: RankingRequest, names: Sequence[str]) -> list[float]:
    """The action values, one row per event, flattened; 1 for an action that is named without a value."""
    places = {name: place for place, name in enumerate(names)}
    cells = [0.0] * (len(request.history) * len(names))
    for row, event in enumerate(request.history):
        for action in event.actions:
            value = event.actions[action] if isinstance(event.actions, Mapping) else 1.0
            cells[row * len(names) + places[action]] = value
    return cells


def _id(value: int | str) -> int:
    """An id as a number. Raises ValueError or TypeError for what JSON requests refuse too: a fraction, a sign, white space."""
    if isinstance(value, str | bool) and str(int(value)) != str(value):
        raise ValueError("an id must be an integer, or its decimal string without leading zeros")
    return operator.index(int(value) if isinstance(value, str) else value)


def _joined(names: Sequence[str]) -> str:
    if any(not name or "," in name for name in names):
        raise ValueError("a name must not be empty, and have no comma")
    return ",".join(names)


def _rows(values: Sequence[float], width: int, count: int) -> list[list[float]]:
    return [list(values[row * width : (row + 1) * width]) for row in range(count)]


def _names(text: str) -> list[str]:
    return text.split(",") if text else []


def _little(column: array[Any]) -> array[Any]:
    """The column in little-endian order, swapped in place if needed."""
    if sys.byteorder == "big":
        column.byteswap()
    return column
