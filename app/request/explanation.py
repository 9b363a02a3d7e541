"""What an explanation leaves out of a request, and its reply as bytes: changes of scores and shares of attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from app.errors import ContextUnknown
from app.request import features, reply
from app.request.reply import ReplyFormat
from app.request.validate import Posts, Request
from model.config import ModelConfig
from model.inputs import Candidates, Context, Scores
from weights.format.manifest import Manifest

Floats = NDArray[np.floating[Any]]
Numbers = tuple[NDArray[np.float64], NDArray[np.float32]]
"""Scores `[n]` and probabilities `[n, W]` of the candidates to explain."""


@dataclass(frozen=True, slots=True)
class Question:
    """A valid request with the places of the candidates to explain, int64 `[n]`, and of the history items to leave out, int64 `[e]`:
    the newest of those that the model sees, oldest first."""

    request: Request
    explained: NDArray[np.int64]
    events: NDArray[np.int64]

    @classmethod
    def of(cls, request: Request, explained: NDArray[np.int64], config: ModelConfig, most_events: int) -> Question:
        """From a checked request; leaves out at most `most_events` events."""
        events = min(request.history_length, config.history_length, most_events)
        return cls(request, explained, np.arange(request.history_length - events, request.history_length))

    def contexts(self, config: ModelConfig) -> Iterator[Context]:
        """The contexts without each event, then without the user, then without user and history. Not to be cached."""
        whole = features.context_of(self.request, config)
        for place in self.events.tolist():
            yield replace(features.context_of(_without_event(self.request, place), config), is_kept=False)
        yield replace(whole, user_id=0, is_kept=False)
        yield replace(whole.first(0), user_id=0, is_kept=False)

    def candidates(self, config: ModelConfig, *, slots_matter: bool) -> list[Candidates]:
        """The candidates to explain: one group, or one each if a score depends on the slot."""
        every = features.candidates_of(self.request, config)
        if slots_matter:
            return [every.chunk(place, place + 1) for place in self.explained.tolist()]
        return [every.rows(self.explained)]


def with_context(request: Request, context: Context, manifest: Manifest) -> Request:
    """A request that named this context by its handle, with its user and history filled in. Raises ContextUnknown if the context lacks
    what is needed: an older event that enters the window when another is left out, or the texts of ids."""
    if context.dropped or manifest.ids == "text":
        raise ContextUnknown
    return replace(
        request,
        user_id=context.user_id,
        history=Posts(context.post_ids, context.author_ids, context.surfaces),
        actions=context.actions,
        dwell_seconds=context.dwell_seconds.astype(np.float64),
        history_length=len(context),
        handle=None,
    )


def _without_event(request: Request, place: int) -> Request:
    history = request.history
    ids, authors, surfaces = history.post_ids, history.author_ids, history.surfaces
    return replace(
        request,
        history=Posts(np.delete(ids, place), np.delete(authors, place), np.delete(surfaces, place)),
        actions=np.delete(request.actions, place, 0),
        dwell_seconds=np.delete(request.dwell_seconds, place),
    )


def render(
    question: Question,
    scores: Scores,
    without: Sequence[Scores],
    attention: NDArray[np.float32],
    form: ReplyFormat,
    *,
    history_used: int,
    timings_ms: dict[str, float],
) -> Iterator[bytes]:
    """The JSON reply, a candidate at a time. `scores` are of all candidates, `without` of those to explain, by what was left out as
    `Question.contexts` has it; `attention` is `[L, N, n, 1 + history_used + 1]`."""
    request, places = question.request, question.explained
    wanted = list(range(len(form.action_names))) if request.wanted is None else request.wanted
    ranked = reply.rows_of(replace(request, top_k=None, wanted=None), scores, form)
    ids, events = request.echo_ids, question.events.tolist()
    own = ranked.score[places], scores.probabilities[places][:, wanted]
    rest = [(reply.combined_of(each, request, form), each.probabilities[:, wanted]) for each in without]
    history = request.history.sent or request.history.post_ids.tolist()
    head: dict[str, Any] = {
        "model": form.model,
        "actions": [form.action_names[column] for column in wanted],
        "events": {
            "place": question.events,
            "post_id": [str(history[place]) for place in events],
        },
    }
    yield _json(head)[:-1] + b',"candidates":['
    for row, place in enumerate(places.tolist()):
        candidate = {
            "post_id": ids[place],
            "score": ranked.score[place],
            "rank": ranked.rank[place],
            "probabilities": own[1][row],
            "change": _changes(own, rest, row),
            "attention": _shares(attention[:, :, row], len(question.events), is_alone=len(places) == 1),
        }
        yield (b"," if row else b"") + _json(candidate)
    yield b"]" + reply.tail_of(request, history_used, timings_ms)


def _changes(own: Numbers, rest: Sequence[Numbers], row: int) -> dict[str, Any]:
    """What each thing changes: the numbers with it minus those without it."""
    scores, columns = (np.array([own[part][row] - each[part][row] for each in rest]) for part in (0, 1))
    *_, user, everything = range(len(rest))

    def one(score: Any, probabilities: Floats) -> dict[str, Any]:
        return {"score": score, "probabilities": probabilities}

    left = scores[everything] - scores[:everything].sum()
    left_columns = columns[everything].astype(np.float64) - columns[:everything].sum(0, dtype=np.float64)
    return {
        "events": one(scores[:user], columns[:user]),
        "user": one(scores[user], columns[user]),
        "everything": one(scores[everything], columns[everything]),
        "not_covered": one(left, left_columns.astype(np.float32)),
    }


def _shares(weights: NDArray[np.float32], events: int, *, is_alone: bool) -> dict[str, Floats]:
    """Of one candidate's attention weights `[L, N, 1 + h + 1]`: by layer and head, and for the newest events the mean over heads.
    With every head's events where one candidate is explained: of 32 candidates they would be megabytes."""
    history = weights[:, :, 1:-1]
    newest = history[:, :, history.shape[2] - events :]
    return {
        "user": weights[:, :, 0],
        "history": history.sum(-1),
        "itself": weights[:, :, -1],
        "events": newest.mean(1),
    } | ({"heads": newest} if is_alone else {})


def _json(value: dict[str, Any]) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY, default=np.ascontiguousarray)  # it takes no views
