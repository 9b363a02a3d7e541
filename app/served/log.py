"""Takes what was served and has a thread write it. Whatever the disk does, no request waits for it or fails: rankings are dropped instead,
and counted."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import structlog
import xxhash

from app.features import CheckedRequest
from app.interface import Ranked
from app.replies import Placement
from app.served.buffer import Queue
from app.settings import Served
from app.telemetry.logs import of_exception
from app.telemetry.metrics import Metrics
from model.inputs import Context
from weights.served import ServedRanking

if TYPE_CHECKING:
    from app.served.writer import Writer

MOST_WAITING_BYTES = 64 * 2**20
"""Memory of the rankings that wait for the thread. Beyond it, new ones are dropped."""
ROW_BYTES = 3072  # of a ranking besides its numbers: objects, texts, headers of arrays
CLOSE_SECONDS = 5.0  # at the end, for a disk that is slow or hangs

log = structlog.get_logger("app.served")


def create_served_log(settings: Served, metrics: Metrics) -> ServedLog | None:
    """The log that the settings describe, None where it is off."""
    if settings.directory is None:
        return None
    from app.served.writer import Writer  # the only import that needs pyarrow

    queue = Queue(MOST_WAITING_BYTES)
    return ServedLog(settings, metrics, queue, Writer(settings, settings.directory, metrics, queue))


class ServedLog:
    """Used by the event loop only."""

    def __init__(self, settings: Served, metrics: Metrics, queue: Queue, writer: Writer) -> None:
        self.settings = settings
        self._dropped = metrics.served_dropped.labels("queue_full")
        self._faults = metrics.served_dropped.labels("fault")
        self._threshold = int(settings.share * 2**64)
        self._queue = queue
        self._writer = writer

    def start(self) -> None:
        """Begin to write."""
        self._writer.start()

    def wants(self, user_id: int, request_id: str) -> bool:
        """Whether rankings of this user are logged: always or never, by a hash of the id. Anonymous rankings are drawn one by one."""
        drawn = user_id.to_bytes(8, "little") if user_id else request_id.encode()
        return self.settings.share >= 1 or xxhash.xxh64_intdigest(drawn) < self._threshold

    def record(self, checked: CheckedRequest, ranked: Ranked, placement: Placement, key: str | None) -> None:
        """Have a ranking of this API key written, if its user is among those who are logged. Never raises."""
        try:
            context = ranked.context if isinstance(checked.context, str) else checked.context
            if context is None:
                raise ValueError("the ranker has not told what a handle named")
            if self.wants(context.user_id, checked.options.name):
                self._add(self._row_of(checked, context, ranked, placement, key))
        except Exception as error:
            self._faults.inc()
            log.error("fault", **of_exception(error))

    def _row_of(
        self, checked: CheckedRequest, context: Context, ranked: Ranked, placement: Placement, key: str | None
    ) -> ServedRanking:
        vocabulary, options, scores = checked.vocabulary, checked.options, ranked.scores
        count, has_probabilities = len(placement.scores), self.settings.probabilities
        return ServedRanking(
            request_id=options.name,
            served_us=time.time_ns() // 1000,
            endpoint=checked.endpoint,
            key=key,
            model_name=vocabulary.model["name"],
            model_version=vocabulary.model["version"],
            model_digest=vocabulary.digest,
            action_names=vocabulary.action_names,
            continuous_names=vocabulary.continuous_names,
            impression_ts=checked.impression_ts,
            context=context,
            candidates=checked.candidates,
            created_at=checked.created_at,
            scores=placement.scores,
            ranks=placement.ranks,
            returned=count if options.top_k is None else min(options.top_k, count),
            weights=options.weights,
            score_form="offset" if options.has_offset else "sum",
            temperature=options.temperature,
            propensities=placement.propensities,
            probabilities=scores.probabilities if has_probabilities else None,
            continuous=scores.continuous * vocabulary.scales if has_probabilities else None,
        )

    def _add(self, row: ServedRanking) -> None:
        actions, events = len(row.action_names), len(row.context)
        size_bytes = ROW_BYTES + len(row.scores) * (96 + 4 * actions) + events * (32 + 4 * actions)
        if not self._queue.put(row, size_bytes):
            self._dropped.inc()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write what waits and close the open parts, for at most this long."""
        self._queue.close()
        if not self._writer.join(seconds):
            log.error("served_not_closed", waiting=len(self._queue))
