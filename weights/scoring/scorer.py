"""A table of impressions → a table of scores, as `/rank` gives them. Not for files, partitions or what a job remembers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from model.create import EngineOptions, create_engine
from model.engine import EngineError, Item
from model.ranking import combine
from weights.checkpoint import Checkpoint
from weights.errors import CheckpointError
from weights.training.examples import Examples
from weights.training.log import aligned, log_of

Result = TypeVar("Result")

BATCH_TOKENS = 8192
"""A forward takes requests until it has so many candidates and events. No bit of a score depends on it."""

NAMING = ("request_id", "user_id", "post_id")


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """What is to be scored of a log, called `where`: `requests` in the order of their forwards, and whether the cache keeps each one's
    context, which it does for the same user's next request if that begins with the same event. `rows` of the log, in the same order."""

    where: str
    examples: Examples
    requests: NDArray[np.int64]
    is_kept: NDArray[np.bool_]
    rows: NDArray[np.int64]


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
        self._scales = np.array([output.scale for output in self.manifest.continuous], np.float32)
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

    def score_table(self, table: pa.Table, since_ts: int = 0, where: str = "The table") -> pa.Table:
        """Score the requests of a log from `since_ts` on, by time, then request; the log's columns are in docs/training.md.

        All earlier engagements of a user have to be in the table, since they are the history, and what was shown together in the order
        of the log, since events of one time are read in it. Raises LogError or EngineError, whose sentences call the log `where`.
        """
        return self.score(self.prepare(table, since_ts, where))

    def prepare(self, table: pa.Table, since_ts: int = 0, where: str = "The table") -> Prepared:
        """The first half of `score_table`, which needs no engine: any thread may do it."""
        examples = Examples(aligned(log_of(table, where), self.manifest.action_names), self.manifest.config)
        requests = np.flatnonzero(examples.times >= since_ts)
        requests = requests[_waves(examples, requests)]
        counts = examples.stops[requests] - examples.starts[requests]
        offsets = np.cumsum(counts) - counts
        rows = np.repeat(examples.starts[requests] - offsets, counts) + np.arange(counts.sum())
        return Prepared(where, examples, requests, _is_continued(examples, requests), rows)

    def score(self, prepared: Prepared, progress: Callable[[int], None] = lambda rows: None) -> pa.Table:
        """The second half. `progress` is told how many rows are scored."""
        log, rows = prepared.examples.log, prepared.rows
        is_wanted = np.zeros(len(log), np.bool_)
        is_wanted[rows] = True
        place = (np.cumsum(is_wanted) - 1)[rows]  # in the order of the log
        actions = np.empty((len(rows), len(self._wanted)), np.float32)
        continuous = np.empty((len(rows), len(self._scales)), np.float32)
        score, done = np.empty(len(rows), np.float64), 0
        forwards = (partial(self.engine.forward, items) for items in batches(prepared))
        for outcomes in one_ahead(self._thread, forwards):
            found = [outcome.scores for outcome in outcomes]
            probabilities = np.concatenate([scores.probabilities for scores in found])
            mine = place[done : done + len(probabilities)]
            broken = next((number for number, scores in enumerate(found) if not scores.is_finite()), None)
            if broken is not None:
                request = log.request_id[rows[done + sum(map(len, found[:broken]))]]
                raise EngineError(f"{prepared.where}: request {request} gives scores that are no numbers")
            score[mine] = combine(probabilities, self._weights)
            actions[mine] = probabilities[:, self._wanted]
            continuous[mine] = np.concatenate([scores.continuous for scores in found]) * self._scales
            done += len(mine)
            progress(done)
        columns = [getattr(log, name)[is_wanted] for name in NAMING]
        columns += [score, *actions.T.copy(), *continuous.T.copy()]
        return pa.table([pa.array(column) for column in columns], schema=self.schema)

    def close(self) -> None:
        """Free the engine."""
        self._thread.submit(self.engine.close).result()
        self._thread.shutdown()


def one_ahead(pool: ThreadPoolExecutor, calls: Iterable[Callable[[], Result]]) -> Iterator[Result]:
    """Their results, in order; the next call runs in the pool while its caller works on the last result."""
    coming: Future[Result] | None = None
    for call in calls:
        begun = pool.submit(call)
        if coming is not None:
            yield coming.result()
        coming = begun
    if coming is not None:
        yield coming.result()


def batches(prepared: Prepared) -> Iterator[list[Item]]:
    """The forwards of what is to be scored."""
    examples, items, tokens = prepared.examples, list[Item](), 0
    columns = (examples.starts, examples.stops, examples.last - examples.oldest)
    each = (column[prepared.requests].tolist() for column in columns)
    for index, is_kept, start, stop, events in zip(
        prepared.requests.tolist(), prepared.is_kept.tolist(), *each, strict=True
    ):
        if items and tokens + stop - start + events > BATCH_TOKENS:
            yield items
            items, tokens = [], 0
        items.append(Item(examples.context(index, is_kept), examples.candidates(index, slice(start, stop))))
        tokens += stop - start + events
    if items:
        yield items


def _waves(examples: Examples, requests: NDArray[np.int64]) -> NDArray[np.intp]:
    """An order of requests in time order: as many users as fill a forward, each one's first request, each one's second …

    So a request finds the beginning of its context in the engine's cache: the user's last request was in an earlier forward.
    """
    if not len(requests):
        return np.zeros(0, np.intp)
    _, user, counts = np.unique(examples.users[requests], return_inverse=True, return_counts=True)
    by_user = np.argsort(user, kind="stable")
    turn = np.empty(len(user), np.int64)
    turn[by_user] = np.arange(len(user)) - np.repeat(np.cumsum(counts) - counts, counts)
    tokens = examples.config.history_length + (examples.stops - examples.starts)[requests].mean()
    return np.lexsort((user, turn, user // max(1, int(BATCH_TOKENS / tokens))))


def _is_continued(examples: Examples, requests: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether the same user's next request has a history that begins with the same event."""
    by_user = np.lexsort((requests, examples.users[requests]))
    user, oldest = examples.users[requests[by_user]], examples.oldest[requests[by_user]]
    continued = np.zeros(len(requests), np.bool_)
    continued[by_user[:-1]] = (user[1:] == user[:-1]) & (oldest[1:] == oldest[:-1])
    return continued
