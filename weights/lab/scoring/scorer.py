"""Turns a table of impressions into a table of scores, as `/rank` gives them. `run` handles files and partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from model.config import ModelConfig
from model.create import EngineOptions, cache_budget, create_engine, find_device
from model.engine import EngineError, Item
from model.ranking import combine
from weights.actions import weight_vector
from weights.checkpoint import Checkpoint
from weights.errors import CheckpointError
from weights.lab.training.examples import Examples
from weights.lab.training.log import HASHES, IDS_KEY, aligned, log_of
from weights.tables import ID_TYPES
from weights.text_ids import IdKind

BATCH_TOKENS = 8192

NAMING = ("request_id", "user_id", "post_id")
TEXT_NAMING = NAMING[1:]
"""Those that are texts where ids are texts."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """The requests to score of a log named `where`. `requests`: in the order of their forwards. `is_kept`: whether the cache keeps a
    request's context, because the same user's next request begins with the same event. `rows` of the log, in the same order."""

    where: str
    examples: Examples
    requests: NDArray[np.int64]
    is_kept: NDArray[np.bool_]
    rows: NDArray[np.int64]


class Scorer:
    """One checkpoint with a warm engine. Used by one thread; `close` it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: EngineOptions,
        actions: Sequence[str] | None = None,
        batch_tokens: int = BATCH_TOKENS,
    ) -> None:
        """`actions`: the actions whose probabilities are wanted; all if None. `batch_tokens`: most candidates and events in a forward of
        several requests; no bit of a score depends on it.

        Raises CheckpointError for an action that the checkpoint lacks, EngineError if the engine cannot run here.
        """
        self.manifest = checkpoint.manifest
        names = self.manifest.action_names
        chosen = names if actions is None else tuple(actions)
        if unknown := sorted(set(chosen) - set(names)):
            raise CheckpointError(f"{checkpoint.path} has no action {unknown[0]}: it has {', '.join(names)}.")
        self._chosen = [names.index(name) for name in chosen]
        self._scales = np.array([output.scale for output in self.manifest.continuous], np.float32)
        self._weights = weight_vector(self.manifest.score_weights, names)
        self._batch_tokens = batch_tokens
        cache_bytes = _cache_bytes(self.manifest.config, options, batch_tokens)
        self.engine = create_engine(checkpoint.ranker, replace(options, cache_bytes=cache_bytes))
        self.engine.warm_up()

    def schema(self, ids: IdKind) -> pa.Schema:
        """Schema of `score_table`'s result: ids of this kind, `score`, the wanted actions' probabilities, continuous outputs in their
        units. Integers for a checkpoint with texts are the hashes of texts, as in the log, and the metadata says so."""
        names = self.manifest.action_names
        kinds = [("request_id", pa.uint64()), *((name, ID_TYPES[ids]) for name in TEXT_NAMING)]
        kinds.append(("score", pa.float64()))
        kinds += [(f"p.{names[column]}", pa.float32()) for column in self._chosen]
        kinds += [(output.name, pa.float32()) for output in self.manifest.continuous]
        return pa.schema(
            [pa.field(name, kind, nullable=False) for name, kind in kinds],
            metadata={"checkpoint": self.manifest.digest, "version": self.manifest.version}
            | ({} if ids == self.manifest.ids else {IDS_KEY: HASHES}),
        )

    def score_table(self, table: pa.Table, since_ts: int = 0, where: str = "The table") -> pa.Table:
        """Score the requests of a log from `since_ts` on, by time, then request; the log's columns are in docs/training.md.

        The table must hold all earlier engagements of a user, which are the history, and keep the log's order of impressions shown
        together, in which events of equal time are read. Raises TableError or EngineError, which name the log `where`.
        """
        return self.score(self.prepare(table, since_ts, where))

    def prepare(self, table: pa.Table, since_ts: int = 0, where: str = "The table") -> Prepared:
        """The first half of `score_table`. It needs no engine, so any thread may call it."""
        config = self.manifest.config
        log = log_of(table, where, self.manifest.ids, config.product_surfaces)
        examples = Examples(aligned(log, self.manifest.action_names), config)
        requests = np.flatnonzero(examples.times >= since_ts)
        requests = requests[_waves(examples, requests, self._batch_tokens)]
        counts = examples.stops[requests] - examples.starts[requests]
        offsets = np.cumsum(counts) - counts
        rows = np.repeat(examples.starts[requests] - offsets, counts) + np.arange(counts.sum())
        return Prepared(where, examples, requests, _is_continued(examples, requests), rows)

    def score(self, prepared: Prepared, progress: Callable[[int], None] = lambda rows: None) -> pa.Table:
        """The second half of `score_table`. `progress` is called with the number of rows scored so far."""
        log, rows, actions, done = prepared.examples.log, prepared.rows, len(self._chosen), 0
        score = np.empty(len(rows), np.float64)
        outputs = np.empty((actions + len(self._scales), len(rows)), np.float32)  # in the order of the forwards
        for items in batches(prepared, self._batch_tokens):
            parts, stop = [outcome.scores for outcome in self.engine.forward(items)], done
            for scores in parts:
                if not scores.is_finite():
                    request = log.request_id[rows[stop]]
                    raise EngineError(f"{prepared.where}: request {request} gives scores that are not numbers")
                stop += len(scores)
            if (corrections := self.manifest.corrections) is None:
                probabilities = np.concatenate([scores.probabilities for scores in parts])
            else:
                probabilities = corrections.probabilities(np.concatenate([scores.logits for scores in parts]))
            score[done:stop] = combine(probabilities, self._weights)
            outputs[:actions, done:stop] = probabilities.T[self._chosen]
            outputs[actions:, done:stop] = (np.concatenate([scores.continuous for scores in parts]) * self._scales).T
            done = stop
            progress(done)
        schema = self.schema("text" if log.texts else "uint64")
        place = np.full(len(log), -1)
        place[rows] = np.arange(len(rows))
        is_scored = place >= 0
        place = place[is_scored]  # in the order of the log
        named = [
            log.texts.of(getattr(log, name)) if log.texts and name in TEXT_NAMING else pa.array(getattr(log, name))
            for name in NAMING
        ]
        columns = [
            column.filter(pa.array(is_scored)).cast(schema.field(name).type)
            for name, column in zip(NAMING, named, strict=True)
        ]
        return pa.table(columns + [pa.array(column[place]) for column in (score, *outputs)], schema=schema)

    def close(self) -> None:
        """Free the engine."""
        self.engine.close()


def _cache_bytes(config: ModelConfig, options: EngineOptions, batch_tokens: int) -> int:
    """Cache size: what the options allow, at most four forwards' contexts in float32: a user's next request is in the next forward."""
    token_bytes = 2 * 4 * config.layers * config.kv_heads * config.head_width
    return min(cache_budget(options.cache_bytes, find_device(options.device)), 4 * batch_tokens * token_bytes)


def batches(prepared: Prepared, batch_tokens: int = BATCH_TOKENS) -> Iterator[list[Item]]:
    """Yield the requests in batches, one per forward."""
    examples, items, tokens = prepared.examples, list[Item](), 0
    columns = (examples.starts, examples.stops, examples.history_lengths)
    bounds = (column[prepared.requests].tolist() for column in columns)
    for index, is_kept, start, stop, events in zip(
        prepared.requests.tolist(), prepared.is_kept.tolist(), *bounds, strict=True
    ):
        if items and tokens + stop - start + events > batch_tokens:
            yield items
            items, tokens = [], 0
        items.append(Item(examples.context(index, is_kept), examples.candidates(slice(start, stop))))
        tokens += stop - start + events
    if items:
        yield items


def _waves(examples: Examples, requests: NDArray[np.int64], batch_tokens: int) -> NDArray[np.intp]:
    """Reorder requests given in time order: for as many users as fill a forward, each one's first request, then each one's second …

    A request then finds the beginning of its context in the engine's cache: the user's last request was in an earlier forward.
    """
    if not len(requests):
        return np.zeros(0, np.intp)
    _, user, counts = np.unique(examples.users[requests], return_inverse=True, return_counts=True)
    by_user = np.argsort(user, kind="stable")
    turn = np.empty(len(user), np.int64)
    turn[by_user] = np.arange(len(user)) - np.repeat(np.cumsum(counts) - counts, counts)
    tokens = examples.config.history_length + (examples.stops - examples.starts)[requests].mean()
    return np.lexsort((user, turn, user // max(1, int(batch_tokens / tokens))))


def _is_continued(examples: Examples, requests: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether the same user's next request has a history that begins with the same event."""
    by_user = np.lexsort((requests, examples.users[requests]))
    user, oldest = examples.users[requests[by_user]], examples.oldest[requests[by_user]]
    continued = np.zeros(len(requests), np.bool_)
    continued[by_user[:-1]] = (user[1:] == user[:-1]) & (oldest[1:] == oldest[:-1])
    return continued
