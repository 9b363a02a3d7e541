"""The model's scores → the reply, as bytes. Not for HTTP.

A reply of 512 candidates holds over ten thousand numbers, so no candidate is touched in Python: each column is written by
orjson in one go, and the columns are woven together. float32 values keep their shortest form, which reads back exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from app.request.validate import Request
from model.inputs import Scores
from weights.format.manifest import Manifest

ROWS_IN_A_PIECE = 1024  # about 2 ms


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """What all replies of one checkpoint have in common.

    `scales` float32 `[Z]`: continuous outputs in their units. `before_continuous`: what is written before each of them.
    """

    model: dict[str, str]
    action_names: tuple[str, ...]
    scales: NDArray[np.float32]
    before_continuous: tuple[bytes, ...]

    @classmethod
    def of(cls, manifest: Manifest) -> ReplyFormat:
        """From a checkpoint's manifest."""
        names = [orjson.dumps(output.name) for output in manifest.continuous]
        return cls(
            model={"name": manifest.name, "version": manifest.version},
            action_names=manifest.action_names,
            scales=np.array([output.scale for output in manifest.continuous], np.float32),
            before_continuous=tuple(
                b"%b%b:" % (b"," if place else b'],"continuous":{', name) for place, name in enumerate(names)
            ),
        )


def combine(probabilities: NDArray[np.float32], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Σ weight × probability, float64 `[C]`, from `[C, A]` and `[A]`.

    Added action by action, as running sums are: a matrix product, or a sum of numpy's, would let a candidate's last bits
    depend on how many others there are.
    """
    products = np.multiply(probabilities, weights + 0.0, dtype=np.float64)  # −0 would show in a score of 0
    return np.add.accumulate(products, axis=1)[:, -1].copy()


def order_of(scores: NDArray[np.float64]) -> NDArray[np.intp]:
    """Indices best first; equal scores keep their order."""
    return np.argsort(-scores, kind="stable")


@dataclass(frozen=True, slots=True)
class Joined:
    """What a reply adds where the candidates were retrieved: `head` stands in place of the model, `tail` follows the candidates,
    `columns` have a key and a value `[C]` for each of them."""

    head: Mapping[str, Any]
    tail: Mapping[str, Any]
    columns: Sequence[tuple[bytes, NDArray[Any]]]


def render(
    request: Request,
    scores: Scores,
    form: ReplyFormat,
    *,
    history_used: int,
    timings_ms: dict[str, float],
    joined: Joined | None = None,
) -> Iterator[bytes]:
    """The JSON reply, in pieces of at most `ROWS_IN_A_PIECE` candidates, so that other requests are served in between.

    `timings_ms` is written as it is; the scores must be finite.
    """
    further = [] if joined is None else list(joined.columns)
    combined = combine(scores.probabilities, request.weights)
    order = order_of(combined)
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(1, len(order) + 1)
    echo_ids: list[int | str] = request.echo_ids
    probabilities, continuous = scores.probabilities, scores.continuous * form.scales
    names = form.action_names
    if request.wanted is not None:
        probabilities, names = probabilities[:, request.wanted], tuple(names[column] for column in request.wanted)
    if request.top_k is not None:
        best = order[: request.top_k]
        echo_ids = [echo_ids[index] for index in best]
        combined, ranks = combined[best], ranks[best]
        probabilities, continuous = probabilities[best], continuous[best]
        further = [(key, values[best]) for key, values in further]
    head = orjson.dumps({**({"model": form.model} if joined is None else joined.head), "actions": names})
    tail: dict[str, Any] = {
        **({} if joined is None else joined.tail),
        "history_used": history_used,
        "history_dropped": len(request.history) - history_used,
        "timings_ms": timings_ms,
    }
    if request.request_id is not None:
        tail["request_id"] = request.request_id
    before = b'%b,"candidates":[' % head[:-1]
    for start in range(0, len(combined), ROWS_IN_A_PIECE):
        cut = slice(start, start + ROWS_IN_A_PIECE)
        columns = [(key, values[cut]) for key, values in further]
        yield before + _candidates(
            echo_ids[cut], combined[cut], ranks[cut], columns, probabilities[cut], continuous[cut], form
        )
        before = b","
    yield b"%b],%b" % (b"" if len(combined) else before, orjson.dumps(tail)[1:])


def _candidates(
    echo_ids: list[int | str],
    scores: NDArray[np.float64],
    ranks: NDArray[np.int64],
    further: Sequence[tuple[bytes, NDArray[Any]]],
    probabilities: NDArray[np.float32],
    continuous: NDArray[np.float32],
    form: ReplyFormat,
) -> bytes:
    """One object a candidate, comma between them."""
    keys, values = form.before_continuous, column(continuous.ravel())
    columns = [
        (b'{"post_id":', column(echo_ids)),
        (b',"score":', column(scores)),
        (b',"rank":', column(ranks)),
        *((key, column(values)) for key, values in further),
        (b',"probabilities":[', _rows(probabilities)),
        *((key, values[place :: len(keys)]) for place, key in enumerate(keys)),
    ]
    return weave(columns, end=b"}}," if keys else b'],"continuous":{}},')[:-1]


def weave(columns: list[tuple[bytes, list[bytes]]], end: bytes) -> bytes:
    """For each row every column's key and value, then `end`."""
    count, stride = len(columns[0][1]), 2 * len(columns) + 1
    pieces = [end] * (count * stride)
    for place, (key, values) in enumerate(columns):
        pieces[2 * place :: stride] = [key] * count
        pieces[2 * place + 1 :: stride] = values
    return b"".join(pieces)


def column(values: list[int | str] | NDArray[Any]) -> list[bytes]:
    """Each value as JSON. Ids are digits, so no string holds a comma."""
    return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",") if len(values) else []


def _rows(matrix: NDArray[np.float32]) -> list[bytes]:
    """Each row as JSON without its brackets; a row may be empty."""
    return orjson.dumps(np.ascontiguousarray(matrix), option=orjson.OPT_SERIALIZE_NUMPY)[2:-2].split(b"],[")
