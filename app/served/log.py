"""Takes what was served and has a thread write it. Whatever the disk does, no request waits for it or fails: rankings are dropped instead,
and counted."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import structlog
import xxhash

from app.features import CheckedRequest
from app.interface import Ranked
from app.replies import Placement
from app.settings import Served
from app.telemetry.logs import of_exception
from app.telemetry.metrics import Metrics
from model.inputs import Context
from weights.served import RowBatch, ServedRanking

if TYPE_CHECKING:
    from app.served.writer import Writer

BATCH_SECONDS = 1.0  # a batch is handed to the thread when it is so old
AT_ONCE = 16  # rankings that are copied into it together
BATCH_BYTES = 4 * 2**20  # or takes this much memory
MOST_WAITING_BYTES = 64 * 2**20
"""Memory of the rankings that wait for the thread. Beyond it, new ones are dropped."""
ROW_BYTES = 1024  # of a ranking besides its numbers: texts, and where its lists begin
DAY_US = 86_400_000_000
CLOSE_SECONDS = 5.0  # at the end, for a disk that is slow or hangs

log = structlog.get_logger("app.served")


def create_served_log(settings: Served, metrics: Metrics) -> ServedLog | None:
    """The log that the settings describe, None where it is off."""
    if settings.directory is None:
        return None
    from app.served.writer import Writer  # the only import that needs pyarrow

    return ServedLog(settings, metrics, Writer(settings, settings.directory, metrics))


class ServedLog:
    """Used by the event loop only. It copies rankings into a batch of one model and one day, a few at a time, and hands the batch to the
    thread."""

    def __init__(self, settings: Served, metrics: Metrics, writer: Writer) -> None:
        self.settings = settings
        self._dropped = metrics.served_dropped.labels("queue_full")
        self._faults = metrics.served_dropped.labels("fault")
        self._threshold = int(settings.share * 2**64)
        self._writer = writer
        self._batch: RowBatch | None = None
        self._day = 0  # the UTC day of its rows, counted since 1970
        self._batch_bytes = 0
        self._fresh: list[tuple[int, CheckedRequest, Context, Ranked, Placement, str, str | None]] = []
        self._timer: asyncio.TimerHandle | None = None  # while something waits to be handed over

    def start(self) -> None:
        """Begin to write."""
        self._writer.start()

    def wants(self, user_id: int, request_id: str) -> bool:
        """Whether rankings of this user are logged: always or never, by a hash of the id. Anonymous rankings are drawn one by one."""
        if self.settings.share >= 1:
            return True
        drawn = user_id.to_bytes(8, "little") if user_id else request_id.encode()
        return xxhash.xxh64_intdigest(drawn) < self._threshold

    def record(
        self,
        checked: CheckedRequest,
        ranked: Ranked,
        placement: Placement,
        route: str,
        key: str | None,
        served_us: int | None = None,
    ) -> None:
        """Have a ranking of this route and API key written, if its user is among those who are logged. `served_us`: when it was ranked,
        Unix microseconds; None: now. Never raises."""
        try:
            context = ranked.context if isinstance(checked.context, str) else checked.context
            if context is None:
                raise ValueError("the ranker has not told what a handle named")
            if self.wants(context.user_id, checked.options.name):
                served_us = time.time_ns() // 1000 if served_us is None else served_us
                self._fresh.append((served_us, checked, context, ranked, placement, route, key))
                if self._timer is None:
                    self._timer = asyncio.get_running_loop().call_later(BATCH_SECONDS, self._hand_over)
                if len(self._fresh) >= AT_ONCE:
                    self._add_fresh()
        except Exception as error:
            self._fault(error)

    def _add_fresh(self) -> None:
        """Copy the rankings that came since the last time. One by one, under load, they take a third longer: between two requests the
        processor forgets this code and these columns."""
        for ranking in self._fresh:
            try:
                self._add(self._row_of(*ranking))
            except Exception as error:
                self._fault(error)
        self._fresh.clear()

    def _fault(self, error: Exception) -> None:
        self._faults.inc()
        log.error("fault", **of_exception(error))

    def _row_of(
        self,
        served_us: int,
        checked: CheckedRequest,
        context: Context,
        ranked: Ranked,
        placement: Placement,
        route: str,
        key: str | None,
    ) -> ServedRanking:
        vocabulary, options = checked.vocabulary, checked.options
        count, has_probabilities = len(placement.scores), self.settings.probabilities
        return ServedRanking(
            request_id=options.name,
            served_us=served_us,
            endpoint=route,
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
            probabilities=ranked.scores.probabilities if has_probabilities else None,
            continuous=placement.continuous if has_probabilities else None,
        )

    def _add(self, row: ServedRanking) -> None:
        actions, events = len(row.action_names), len(row.context)
        size_bytes = ROW_BYTES + len(row.scores) * (96 + 4 * actions) + events * (32 + 4 * actions)
        if self._writer.waiting_bytes + self._batch_bytes + size_bytes > MOST_WAITING_BYTES:
            self._dropped.inc()
            return
        day = row.served_us // DAY_US
        if self._batch is None or day != self._day or not self._batch.is_of_model(row):
            self._put()
            self._batch, self._day = self._writer.new_batch(row), day
        try:
            self._batch.add(row)
        except Exception:  # the batch is not whole
            self._faults.inc(self._batch.rows)
            self._batch, self._batch_bytes = None, 0
            raise
        self._batch_bytes += size_bytes
        if self._batch_bytes >= BATCH_BYTES:
            self._put()

    def _put(self) -> None:
        """Give the batch, if there is one, to the thread."""
        if self._batch is not None:
            self._writer.put(self._batch, self._day, self._batch_bytes)
        self._batch, self._batch_bytes = None, 0

    def _hand_over(self) -> None:
        """Give everything to the thread."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._add_fresh()
        self._put()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write what waits and close the open parts, for at most this long. Nothing is recorded after it."""
        self._hand_over()
        if not self._writer.close(seconds):
            log.error("served_not_closed", waiting_bytes=self._writer.waiting_bytes)
