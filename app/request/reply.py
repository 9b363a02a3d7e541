"""The model's scores → the reply, as bytes.

A reply of 512 candidates holds over ten thousand numbers, so no candidate is touched in Python: each column is written by
orjson in one go, and the columns are woven together. float32 values keep their shortest form, which reads back exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray

from app.request.codec import Codec
from app.request.validate import Request
from model.inputs import Scores
from model.ranking import combine, magnitudes, offset, order_of
from weights.format.manifest import Manifest

ROWS_IN_A_PIECE = 1024  # about 2 ms


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """What all replies of one checkpoint have in common.

    `scales` float32 `[Z]`: continuous outputs in their units. `before_continuous`: what is written before each of them.
    `head`: what a reply in JSON with every action begins with.
    `codec` writes most replies, if there is one.
    """

    model: dict[str, str]
    action_names: tuple[str, ...]
    continuous_names: tuple[str, ...]
    scales: NDArray[np.float32]
    before_continuous: tuple[bytes, ...]
    head: bytes
    codec: Codec | None = None

    @classmethod
    def of(cls, manifest: Manifest) -> ReplyFormat:
        """From a checkpoint's manifest, without a codec."""
        names = tuple(output.name for output in manifest.continuous)
        model = {"name": manifest.name, "version": manifest.version}
        return cls(
            model=model,
            action_names=manifest.action_names,
            continuous_names=names,
            scales=np.array([output.scale for output in manifest.continuous], np.float32),
            before_continuous=tuple(
                b"%b%b:" % (b"," if place else b'],"continuous":{', orjson.dumps(name))
                for place, name in enumerate(names)
            ),
            head=head_of(manifest.action_names, model=model),
        )


class Asked(Protocol):
    """What the end of a reply needs from its request."""

    history_length: int
    request_id: str | None
    handle: str | None


class Rows(NamedTuple):
    """The columns of a reply's candidates, in the order of the reply.

    `post_id` as they came, or uint64 `[n]`. `score` float64 `[n]`, `rank` int64 `[n]`, `probabilities` float32 `[n, W]` of the
    actions in the reply, `continuous` float32 `[n, Z]` in their units.
    """

    post_id: list[int | str] | NDArray[np.uint64]
    score: NDArray[np.float64]
    rank: NDArray[np.int64]
    probabilities: NDArray[np.float32]
    continuous: NDArray[np.float32]


def names_of(request: Request, form: ReplyFormat) -> tuple[str, ...]:
    """The actions of the reply."""
    names = form.action_names
    return names if request.wanted is None else tuple(names[column] for column in request.wanted)


def combined_of(scores: Scores, request: Request, form: ReplyFormat) -> NDArray[np.float64]:
    """Combined scores, float64 `[C]`."""
    values, weights = scores.probabilities, request.weights
    actions = values.shape[1]
    if len(weights) > actions:
        values = np.concatenate((values, scores.continuous * form.scales), 1)
    combined = combine(values, weights)
    return offset(combined, *magnitudes(weights[:actions])) if request.has_offset else combined


def ranked(
    scores: Scores, request: Request, form: ReplyFormat
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Combined scores, float64 `[C]`; the candidates' places best first, int64 `[C]`; their ranks from 1 on, int64 `[C]`."""
    if form.codec is not None and (found := form.codec.rank(scores, request)) is not None:
        return found
    combined = combined_of(scores, request, form)
    order = order_of(combined)
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(1, len(order) + 1)
    return combined, order, ranks


def rows_of(request: Request, scores: Scores, form: ReplyFormat) -> Rows:
    """The candidates' scores and ranks, with the order and the columns that the request asks for."""
    combined, order, ranks = ranked(scores, request, form)
    ids: Any = request.candidates.post_ids if request.candidates.sent is None else request.echo_ids
    probabilities, continuous = scores.probabilities, scores.continuous * form.scales
    if request.wanted is not None:
        probabilities = probabilities[:, request.wanted]
    if request.top_k is not None:
        best = order[: request.top_k]
        ids = ids[best] if isinstance(ids, np.ndarray) else [ids[index] for index in best]
        combined, ranks = combined[best], ranks[best]
        probabilities, continuous = probabilities[best], continuous[best]
    return Rows(ids, combined, ranks, np.ascontiguousarray(probabilities), continuous)


@dataclass(frozen=True, slots=True)
class Joined:
    """What a reply adds if the candidates were retrieved. `head`: everything before the candidates; `tail`: fields after them;
    `scores` float32 `[C]`: their retrieval scores, best first, in the order of the request."""

    head: bytes
    tail: dict[str, Any]
    scores: NDArray[np.float32]


def render(
    request: Request,
    scores: Scores,
    form: ReplyFormat,
    *,
    history_used: int,
    timings_ms: Mapping[str, float],
    joined: Joined | None = None,
) -> Iterator[bytes]:
    """The JSON reply: objects in pieces of at most `ROWS_IN_A_PIECE` candidates, so that other requests are served in between.

    `timings_ms` is written as it is; the scores must be finite. `joined`: the candidates were retrieved, best first, and there may be
    none.
    """
    head, found = form.head, None
    further: tuple[tuple[bytes, Any], ...] = ()
    if joined is not None:
        head, found = joined.head, joined.scores
    elif request.wanted is not None:
        head = head_of(names_of(request, form), model=form.model)
    end = tail_of(request, history_used, timings_ms, **(joined.tail if joined is not None else {}))
    if form.codec is not None and (written := form.codec.write(request, scores, head, end, found)) is not None:
        return iter((written,))
    rows = rows_of(request, scores, form)
    if request.reply == "columns":
        return iter((head + _columns(rows, form) + end,))
    if found is not None:
        best = order_of(combined_of(scores, request, form))[: request.top_k]
        further = ((b',"retrieval_score":', found[best]), (b',"retrieval_rank":', best + 1))
    return _objects(rows, form, head, end, further)


def _objects(
    rows: Rows, form: ReplyFormat, head: bytes, end: bytes, further: Sequence[tuple[bytes, Any]]
) -> Iterator[bytes]:
    """One object per candidate; `further` columns follow the rank."""
    before, keys = head + b"[", form.before_continuous
    for start in range(0, len(rows.score), ROWS_IN_A_PIECE):
        cut = slice(start, start + ROWS_IN_A_PIECE)
        values = column(rows.continuous[cut].ravel())
        columns = [
            (b'{"post_id":', written_ids(rows.post_id[cut])),
            (b',"score":', column(rows.score[cut])),
            (b',"rank":', column(rows.rank[cut])),
            *((key, column(each[cut])) for key, each in further),
            (b',"probabilities":[', _rows(rows.probabilities[cut])),
            *((key, values[place :: len(keys)]) for place, key in enumerate(keys)),
        ]
        yield before + weave(columns, end=b"}}," if keys else b'],"continuous":{}},')[:-1]
        before = b","
    yield (b"]" if len(rows.score) else head + b"[]") + end


def head_of(names: Sequence[str], **before: Any) -> bytes:
    """The start of a reply, up to its candidates; the fields in `before` come first."""
    return b'%b,"candidates":' % orjson.dumps({**before, "actions": names})[:-1]


def tail_of(request: Asked, history_used: int, timings_ms: Mapping[str, float], **before: Any) -> bytes:
    """The end of a reply, from the comma after its posts; the fields in `before` come first."""
    tail = {
        **before,
        "history_used": history_used,
        "history_dropped": request.history_length - history_used,
        "timings_ms": timings_ms,
    }
    if request.handle is not None:
        tail["context"] = request.handle
    if request.request_id is not None:
        tail["request_id"] = request.request_id
    return b"," + orjson.dumps(tail)[1:]


def _columns(rows: Rows, form: ReplyFormat) -> bytes:
    """One object of arrays."""
    continuous = dict(zip(form.continuous_names, np.ascontiguousarray(rows.continuous.T), strict=True))
    return orjson.dumps(rows._asdict() | {"continuous": continuous}, option=orjson.OPT_SERIALIZE_NUMPY)


def weave(columns: list[tuple[bytes, list[bytes]]], end: bytes) -> bytes:
    """Join the columns row by row: each column's key and value, then `end`."""
    count, stride = len(columns[0][1]), 2 * len(columns) + 1
    pieces = [end] * (count * stride)
    for place, (key, values) in enumerate(columns):
        pieces[2 * place :: stride] = [key] * count
        pieces[2 * place + 1 :: stride] = values
    return b"".join(pieces)


def written_ids(ids: Sequence[int | str] | NDArray[np.uint64]) -> list[bytes]:
    """Each id as JSON."""
    return column(ids) if isinstance(ids, np.ndarray) else [*map(orjson.dumps, ids)]


def column(values: Any) -> list[bytes]:
    """Each number as JSON, or each string of a tuple as JSON without its quotes."""
    if not len(values):
        return []
    written = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
    return written[2:-2].split(b'","') if type(values) is tuple else written[1:-1].split(b",")


def _rows(matrix: NDArray[np.float32]) -> list[bytes]:
    """Each row as JSON without its brackets; a row may be empty."""
    return orjson.dumps(matrix, option=orjson.OPT_SERIALIZE_NUMPY)[2:-2].split(b"],[")
