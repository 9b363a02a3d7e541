"""Scores → the bytes and headers of a reply.

A reply of 512 candidates holds over ten thousand numbers, so no candidate is touched in Python: orjson writes each column in one go, and
the columns are woven together. float32 values keep their shortest form, which reads back exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from app.features import CheckedRequest
from app.interface import Ranked, ServedModel
from app.telemetry.exchange import Exchange
from app.vocabulary import Vocabulary
from model.exploration import draw_order, gumbel_noise
from model.inputs import Scores
from model.ranking import combine, magnitudes, offset, order_of

JSON = "application/json"  # the media type of a reply

Ids = Sequence[int | str] | NDArray[np.uint64]
"""Post ids as they are echoed."""


class Rows(NamedTuple):
    """The columns of a reply's candidates, in the order of the reply.

    `post_id` `[n]`; `score` float64 `[n]`; `rank` int64 `[n]`, 1 is best; `probabilities` float32 `[n, W]` of the actions in the reply;
    `continuous` float32 `[n, Z]` in their units; `propensity` float64 `[n]`, None where the ranks are not drawn.
    """

    post_id: Ids
    score: NDArray[np.float64]
    rank: NDArray[np.int64]
    probabilities: NDArray[np.float32]
    continuous: NDArray[np.float32]
    propensity: NDArray[np.float64] | None


class Placement(NamedTuple):
    """Where each candidate stands. `scores` float64 `[C]`, made of the probabilities and of `continuous`, float32 `[C, Z]`, the continuous
    outputs in their units; `order` int64 `[C]`: the candidates' places, best first; `ranks` int64 `[C]`, 1 is best; `propensities` float64
    `[C]`: the probability of each rank given those above it, None where the ranks are not drawn."""

    scores: NDArray[np.float64]
    continuous: NDArray[np.float32]
    order: NDArray[np.int64]
    ranks: NDArray[np.int64]
    propensities: NDArray[np.float64] | None


def names_of(checked: CheckedRequest) -> tuple[str, ...]:
    """Return the actions in the reply."""
    names, columns = checked.vocabulary.action_names, checked.options.actions
    return names if columns is None else tuple(names[column] for column in columns)


def combined_of(checked: CheckedRequest, scores: Scores, continuous: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the combined scores, float64 `[C]`. `continuous`: the outputs of `scores` in their units."""
    values, weights = scores.probabilities, checked.options.weights
    actions = values.shape[1]
    if len(weights) > actions:
        values = np.concatenate((values, continuous), 1)
    combined = combine(values, weights)
    return offset(combined, *magnitudes(weights[:actions])) if checked.options.has_offset else combined


def placement_of(checked: CheckedRequest, scores: Scores) -> Placement:
    """Rank the candidates: by score, or drawn where the request wants that."""
    options, continuous = checked.options, scores.continuous * checked.vocabulary.scales
    combined = combined_of(checked, scores, continuous)
    propensities = None
    if options.temperature is None:
        order = order_of(combined)
    else:
        noise = gumbel_noise(options.name, checked.candidates.post_ids)
        order, propensities = draw_order(combined, options.temperature, noise)
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(1, len(order) + 1)
    return Placement(combined, continuous, order, ranks, propensities)


def rows_of(checked: CheckedRequest, scores: Scores, placement: Placement) -> Rows:
    """Return scores and ranks of the candidates, in the order and with the columns that the request wants."""
    combined, continuous, order, ranks, propensities = placement
    post_ids, options, probabilities = checked.post_ids, checked.options, scores.probabilities
    if options.actions is not None:
        probabilities = probabilities[:, options.actions]
    if options.top_k is not None:
        best = order[: options.top_k]
        post_ids = post_ids[best] if isinstance(post_ids, np.ndarray) else [post_ids[place] for place in best]
        combined, ranks = combined[best], ranks[best]
        probabilities, continuous = probabilities[best], continuous[best]
        propensities = None if propensities is None else propensities[best]
    return Rows(post_ids, combined, ranks, np.ascontiguousarray(probabilities), continuous, propensities)


def rank_reply(checked: CheckedRequest, ranked: Ranked, timings_ms: Mapping[str, float]) -> tuple[bytes, Placement]:
    """Return the JSON reply to a ranking, and where each candidate stands. The scores must be finite."""
    placement = placement_of(checked, ranked.scores)
    rows, vocabulary = rows_of(checked, ranked.scores, placement), checked.vocabulary
    write = columns if checked.options.reply == "columns" else objects
    head = head_of(names_of(checked), model=vocabulary.model)
    return head + write(rows, vocabulary) + tail_of(ranked, checked, timings_ms), placement


def context_reply(
    ranked: Ranked, request_id: str | None, vocabulary: Vocabulary, timings_ms: Mapping[str, float]
) -> bytes:
    """Return the JSON reply to a request for a context."""
    return orjson.dumps({"model": vocabulary.model} | _end_of(ranked, request_id, timings_ms))


def head_of(names: Sequence[str], **before: Any) -> bytes:
    """Return the start of a reply, up to its candidates. `names`: of the actions in it; the fields in `before` come first."""
    return b'%b,"candidates":' % orjson.dumps({**before, "actions": names})[:-1]


def tail_of(ranked: Ranked, checked: CheckedRequest, timings_ms: Mapping[str, float], **before: Any) -> bytes:
    """Return the end of a reply, from the comma behind its candidates. The fields in `before` come first."""
    end = {**before, **_end_of(ranked, checked.options.request_id, timings_ms)}
    if warnings := checked.warnings():
        end["warnings"] = warnings
    return b"," + orjson.dumps(end)[1:]


def _end_of(ranked: Ranked, request_id: str | None, timings_ms: Mapping[str, float]) -> dict[str, Any]:
    end: dict[str, Any] = {
        "history_used": ranked.history_used,
        "history_dropped": ranked.history_dropped,
        "timings_ms": timings_ms,
    }
    if ranked.handle:
        end["context"] = ranked.handle
    if request_id is not None:
        end["request_id"] = request_id
    return end


def objects(rows: Rows, vocabulary: Vocabulary, further: Sequence[tuple[bytes, NDArray[Any]]] = ()) -> bytes:
    """Return an array of one object a candidate. `further`: keys, as `,"name":`, and columns that follow the rank."""
    if not len(rows.score):
        return b"[]"
    names = vocabulary.continuous_names
    quantities = column(rows.continuous.ravel())
    keys = [b"%b%b:" % (b"," if place else b'],"continuous":{', orjson.dumps(name)) for place, name in enumerate(names)]
    woven = weave(
        [
            (b'{"post_id":', _written(rows.post_id)),
            (b',"score":', column(rows.score)),
            (b',"rank":', column(rows.rank)),
            *([] if rows.propensity is None else [(b',"propensity":', column(rows.propensity))]),
            *((key, column(values)) for key, values in further),
            (b',"probabilities":[', _rows(rows.probabilities)),
            *((key, quantities[place :: len(keys)]) for place, key in enumerate(keys)),
        ],
        end=b"}}," if keys else b'],"continuous":{}},',
    )
    return b"[%b]" % woven[:-1]


def columns(rows: Rows, vocabulary: Vocabulary) -> bytes:
    """Return one object of arrays."""
    quantities = np.ascontiguousarray(rows.continuous.T)
    continuous = dict(zip(vocabulary.continuous_names, quantities, strict=True))
    arrays = rows._asdict() | {"continuous": continuous}
    if rows.propensity is None:
        del arrays["propensity"]
    return orjson.dumps(arrays, option=orjson.OPT_SERIALIZE_NUMPY)


def weave(columns: Sequence[tuple[bytes, Sequence[bytes]]], end: bytes) -> bytes:
    """Join columns row by row: each column's key and value, then `end`."""
    count, stride = len(columns[0][1]), 2 * len(columns) + 1
    pieces = [end] * (count * stride)
    for place, (key, values) in enumerate(columns):
        pieces[2 * place :: stride] = [key] * count
        pieces[2 * place + 1 :: stride] = values
    return b"".join(pieces)


def column(values: NDArray[Any] | tuple[str, ...]) -> list[bytes]:
    """Return each number as JSON, or each decimal string of a tuple without its quotes."""
    if not len(values):
        return []
    written = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
    return written[2:-2].split(b'","') if isinstance(values, tuple) else written[1:-1].split(b",")


def _written(ids: Ids) -> list[bytes]:
    """Each id as JSON."""
    if isinstance(ids, np.ndarray):
        return column(ids)
    written = orjson.dumps(ids)[1:-1].split(b",")
    return written if len(written) == len(ids) else [*map(orjson.dumps, ids)]  # some ids contain commas


def _rows(matrix: NDArray[np.float32]) -> list[bytes]:
    """Each row as JSON without its brackets; a row may be empty."""
    return orjson.dumps(matrix, option=orjson.OPT_SERIALIZE_NUMPY)[2:-2].split(b"],[")


def timings_of(stages: Mapping[str, float]) -> dict[str, float]:
    """Return seconds of stages as milliseconds with three decimals, as replies have them."""
    return {stage: round(seconds * 1e6) / 1e3 for stage, seconds in stages.items()}


def work_timings(exchange: Exchange) -> dict[str, float]:
    """Return milliseconds by stage for the reply's body, which leaves out how long the call was read, and waited for the corpus."""
    return timings_of({stage: seconds for stage, seconds in exchange.stages.items() if stage not in ("read", "corpus")})


def headers_of(model: ServedModel, ranked: Ranked, exchange: Exchange) -> dict[str, str]:
    """Return the headers of a reply with scores, and note for the log what they say."""
    return headers(model.manifest.version, ranked.cache, exchange, ranked.handle)


def headers(version: str, cache: str, exchange: Exchange, handle: str = "") -> dict[str, str]:
    """Return headers that name the version, how much of the context was cached (`hit`, `prefix`, `miss`), and where the time went;
    `handle` names the context. Version and cache are noted for the log."""
    exchange.version, exchange.cache = version, cache
    fields = {
        "X-Model-Version": version,
        "X-Context-Cache": cache,
        "Server-Timing": ", ".join([f"{stage};dur={seconds * 1000:.3f}" for stage, seconds in exchange.stages.items()]),
    }
    return fields | {"X-Context": handle} if handle else fields
