"""A table of impressions → a table of scores, as `/rank` gives them. Not for files, partitions or what a job remembers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from model.create import EngineOptions, create_engine
from model.engine import EngineError, Item, Outcome
from model.inputs import Scores
from model.ranking import combine
from weights.checkpoint import Checkpoint
from weights.errors import CheckpointError
from weights.training.examples import Examples
from weights.training.log import aligned, log_of

BATCH_CANDIDATES = 2048
"""A forward takes requests until it has so many candidates. No bit of a score depends on it."""

NAMING = ("request_id", "user_id", "post_id")


@dataclass(slots=True)
class _Forward:
    """A forward on its way: the requests' rows of the log, and what becomes of them."""

    rows: list[NDArray[np.int64]]
    outcomes: Future[Sequence[Outcome]]


class Scorer:
    """One checkpoint with a warm engine. Used by one thread; `close` it."""

    def __init__(self, checkpoint: Checkpoint, options: EngineOptions, actions: Sequence[str] | None = None) -> None:
        """`actions`: whose probabilities are wanted, all where None.

        Raises CheckpointError for one that the checkpoint lacks, EngineError where the engine cannot run here.
        """
        self.manifest = checkpoint.manifest
        names = self.manifest.action_names
        wanted = names if actions is None else tuple(actions)
        if unknown := sorted(set(wanted) - set(names)):
            raise CheckpointError(f"{checkpoint.path} has no action {unknown[0]}: it has {', '.join(names)}.")
        self._wanted = [names.index(name) for name in wanted]
        self._weights = np.array([self.manifest.score_weights.get(name, 0.0) for name in names])
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")  # an engine belongs to one thread
        self.engine = self._thread.submit(create_engine, checkpoint.ranker, options).result()
        self._thread.submit(self.engine.warm_up).result()

    @property
    def schema(self) -> pa.Schema:
        """Of what `score_table` returns: who and what, `score`, the wanted actions' probabilities, continuous outputs in their units."""
        names = self.manifest.action_names
        return pa.schema(
            [pa.field(name, pa.uint64()) for name in NAMING]
            + [pa.field("score", pa.float64())]
            + [pa.field(f"p.{names[column]}", pa.float32()) for column in self._wanted]
            + [pa.field(output.name, pa.float32()) for output in self.manifest.continuous],
            metadata={"checkpoint": self.manifest.digest, "version": self.manifest.version},
        )

    def score_table(
        self,
        table: pa.Table,
        since_ts: int = 0,
        where: str = "The table",
        progress: Callable[[int], None] = lambda rows: None,
    ) -> pa.Table:
        """Score the requests of a log from `since_ts` on, by time, then request; the log's columns are in docs/training.md.

        All earlier engagements of a user have to be in the table, since they are the history, and what was shown together in the order
        of the log, since events of one time are read in it. `progress` is told how many rows are scored. Raises LogError or EngineError,
        whose sentences call the log `where`.
        """
        examples = Examples(aligned(log_of(table, where), self.manifest.action_names), self.manifest.config)
        log, wanted = examples.log, np.flatnonzero(examples.times >= since_ts)
        # One user's requests one after the other: each finds the beginning of its context in the engine's cache.
        by_user = wanted[np.argsort(log.user_id[examples.starts[wanted]], kind="stable")]
        actions = np.empty((len(log), len(self._wanted)), np.float32)
        continuous = np.empty((len(log), len(self.manifest.continuous)), np.float32)
        score, done = np.empty(len(log), np.float64), 0
        for forward in self._forwards(examples, by_user):
            rows, found = forward.rows, [outcome.scores for outcome in forward.outcomes.result()]
            if broken := [shown[0] for shown, scores in zip(rows, found, strict=True) if not scores.is_finite()]:
                raise EngineError(f"{where}: request {log.request_id[broken[0]]} gives scores that are no numbers")
            scores, taken = Scores.concatenate(found), np.concatenate(rows)
            score[taken] = combine(scores.probabilities, self._weights)
            actions[taken], continuous[taken] = scores.probabilities[:, self._wanted], scores.continuous
            done += len(taken)
            progress(done)
        kept = (
            np.concatenate([examples.rows(index) for index in wanted.tolist()])
            if len(wanted)
            else np.zeros(0, np.int64)
        )
        scales = [np.float32(output.scale) for output in self.manifest.continuous]
        columns = [getattr(log, name)[kept] for name in NAMING] + [score[kept], *actions[kept].T]
        columns += [column * scale for column, scale in zip(continuous[kept].T, scales, strict=True)]
        return pa.table([pa.array(np.ascontiguousarray(column)) for column in columns], schema=self.schema)

    def close(self) -> None:
        """Free the engine."""
        self._thread.submit(self.engine.close).result()
        self._thread.shutdown()

    def _forwards(self, examples: Examples, requests: NDArray[np.int64]) -> Iterator[_Forward]:
        """One after the other; the next one's items are made while the engine computes."""
        running: _Forward | None = None
        for rows, items in batches(examples, requests):
            begun = _Forward(rows, self._thread.submit(self.engine.forward, items))
            if running is not None:
                yield running
            running = begun
        if running is not None:
            yield running


def batches(examples: Examples, requests: NDArray[np.int64]) -> Iterator[tuple[list[NDArray[np.int64]], list[Item]]]:
    """Forwards for the given requests, in their order: each request's rows of the log, and its item."""
    rows: list[NDArray[np.int64]] = []
    items: list[Item] = []
    count = 0
    for index in requests.tolist():
        shown = examples.rows(index)
        if rows and count + len(shown) > BATCH_CANDIDATES:
            yield rows, items
            rows, items, count = [], [], 0
        rows.append(shown)
        items.append(Item(examples.context(index), examples.candidates(index, shown)))
        count += len(shown)
    if rows:
        yield rows, items
