"""What an explanation leaves out of a request, and its reply: changes of scores, and shares of attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from app import features, replies
from app.errors import ContextUnknown, InvalidRequest
from app.features import CheckedRequest
from app.interface import Ranked
from app.schema import ExplainRequest
from app.vocabulary import Vocabulary
from model.config import ModelConfig
from model.inputs import Candidates, Context, Scores

MAX_EXPLAINED = 32
"""Candidates that one request explains."""
MAX_EXPLAINED_EVENTS = 256
"""Newest history items that an explanation leaves out, one at a time."""

Floats = NDArray[np.floating[Any]]
Numbers = tuple[NDArray[np.float64], NDArray[np.float32]]
"""Scores `[n]` and probabilities `[n, W]` of the candidates to explain."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request that was checked against one checkpoint, and what is left out of it.

    The model sees the newest `window` events. `history`: the user with one event more, which the model sees when a newer one is left out.
    `events`: how many of the newest events are left out, one at a time; `event_ids`: their post ids, as the reply has them. `explained`:
    places of the candidates to explain, int64 `[n]`.
    """

    checked: CheckedRequest
    history: Context
    window: int
    events: int
    explained: NDArray[np.int64]
    event_ids: Sequence[str]

    @classmethod
    def of(
        cls, request: ExplainRequest, cached: Context | None, vocabulary: Vocabulary, config: ModelConfig
    ) -> Question:
        """Check a request; `cached`: the context that its handle names. Raises InvalidRequest, and ContextUnknown where the context lacks
        what is needed: an older event that would move into sight, or the texts of ids."""
        if cached is not None and (cached.dropped or vocabulary.ids == "text"):
            raise ContextUnknown
        checked = features.check(request, vocabulary, replace(config, history_length=config.history_length + 1))
        if cached is None:
            assert isinstance(checked.context, Context)
            history, sent = checked.context, features.sent_history_ids(request)
        else:
            history, sent = cached, cached.post_ids.tolist()
        events = min(len(history), config.history_length, MAX_EXPLAINED_EVENTS)
        return cls(
            checked=checked,
            history=history,
            window=config.history_length,
            events=events,
            explained=_places(request, checked.candidates, vocabulary),
            event_ids=[*map(str, sent[len(sent) - events :])],
        )

    @property
    def context(self) -> Context:
        """What the model sees."""
        return self.history.last(self.window)

    @property
    def places(self) -> NDArray[np.int64]:
        """Places of the left-out events in the request's history, int64 `[e]`, oldest first."""
        count = self.history.dropped + len(self.history)
        return np.arange(count - self.events, count)

    def contexts(self) -> Iterator[Context]:
        """The contexts without each event, then without the user, then without user and history. Not to be cached."""
        history, context = self.history, self.context
        every = np.arange(len(history))
        for row in every[len(history) - self.events :]:
            yield replace(history.rows(np.delete(every, row)).last(self.window), is_kept=False)
        yield replace(context, user_id=0, is_kept=False)
        yield replace(context.first(0), user_id=0, is_kept=False)

    @property
    def left_out(self) -> int:
        """How many `contexts` there are."""
        return self.events + 2

    def groups(self, *, slots_matter: bool) -> list[Candidates]:
        """The candidates to explain: together, or one by one if a score depends on the slot."""
        if slots_matter:
            return [self.checked.candidates.chunk(place, place + 1) for place in self.explained.tolist()]
        return [self.checked.candidates.rows(self.explained)]


def _places(request: ExplainRequest, candidates: Candidates, vocabulary: Vocabulary) -> NDArray[np.int64]:
    """For each post id to explain, the place of the first candidate that has it, int64 `[n]`. Raises InvalidRequest."""
    first = {post: place for place, post in reversed([*enumerate(candidates.post_ids.tolist())])}
    explained = features.ids_of(request.explain, vocabulary.ids, "explain").tolist()
    for number, post in enumerate(explained):
        if post not in first:
            raise InvalidRequest(f"explain[{number}]", "must be the post_id of a candidate")
    return np.array([first[post] for post in explained], np.int64)


def render(
    question: Question,
    ranked: Ranked,
    without: Sequence[Scores],
    attention: NDArray[np.float32],
    timings_ms: Mapping[str, float],
) -> Iterator[bytes]:
    """Yield the JSON reply, a candidate at a time. `ranked` has all candidates; `without` those to explain, for each of
    `Question.contexts`; `attention` is `[L, N, n, 1 + history_used + 1]`."""
    checked, explained, options = question.checked, question.explained, question.checked.options
    whole = replace(checked, options=replace(options, top_k=None, actions=None))  # all candidates, all actions
    rows = replies.rows_of(whole, ranked.scores, replies.placement_of(whole, ranked.scores))
    names = replies.names_of(checked)
    columns = [*range(len(names))] if options.actions is None else options.actions
    own = rows.score[explained], rows.probabilities[explained][:, columns]
    rest = [(replies.placement_of(whole, scores).scores, scores.probabilities[:, columns]) for scores in without]
    yield (
        _json(
            {
                "model": checked.vocabulary.model,
                "actions": names,
                "events": {"place": question.places, "post_id": question.event_ids},
            }
        )[:-1]
        + b',"candidates":['
    )
    for row, place in enumerate(explained.tolist()):
        candidate = {
            "post_id": checked.post_ids[place],
            "score": rows.score[place],
            "rank": rows.rank[place],
            "probabilities": own[1][row],
            "change": _changes(own, rest, row),
            "attention": _shares(attention[:, :, row], question.events, is_alone=len(explained) == 1),
        }
        yield (b"," if row else b"") + _json(candidate)
    yield b"]" + replies.tail_of(ranked, checked, timings_ms)


def _changes(own: Numbers, rest: Sequence[Numbers], row: int) -> dict[str, Any]:
    """What each thing changes: the numbers with it minus those without it."""
    scores, columns = (np.array([own[part][row] - without[part][row] for without in rest]) for part in (0, 1))
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
    """One candidate's attention weights `[L, N, 1 + h + 1]` by layer and head, and for the newest events the mean over heads. With every
    head's events where one candidate is explained: of 32 candidates they would be megabytes."""
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
