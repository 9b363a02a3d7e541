"""The measurements of a run: one record per request, stored as npz."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from loadtest.generate.http_client import FAILURES, Reply
from loadtest.generate.traffic import KINDS, RankRequest

STAGES = ("parse", "queue", "forward", "serialize")
CACHE_RESULTS = ("", "hit", "miss")
UNSENT = -1.0
RECORD = np.dtype(
    [
        *((name, "f8") for name in ("due", "fired", "sent", "done")),
        ("status", "i2"),
        *((name, "i1") for name in ("failure", "kind", "cache")),
        *((name, "i4") for name in ("candidates", "history")),
        ("retry_after", "?"),
        ("stages_ms", "f4", (len(STAGES),)),
    ]
)


class Samples(np.recarray[Any, Any]):
    """Records `[n]`, times in seconds from the start of the run. `samples[mask]` selects records, `samples.due` is a column.

    `due` is the scheduled time of a request, `fired` when the generator reached it, `sent` when it was written to a connection
    (−1: never), `done` when its reply was complete or it failed. `status` 0 means no right reply. `failure`, `kind` and `cache` are
    indices into FAILURES, KINDS and CACHE_RESULTS. `stages_ms` `[n, 4]` comes from the reply's `Server-Timing`; NaN is unknown.
    """

    @classmethod
    def empty(cls, count: int) -> Samples:
        """Records to fill in. Until then each has status 0 and failure `timeout`."""
        samples = cast(Samples, np.zeros(count, RECORD).view(cls))
        for column in ("due", "fired", "sent", "done"):
            samples[column] = UNSENT
        samples["failure"], samples["stages_ms"] = FAILURES.index("timeout"), np.nan
        return samples

    @property
    def latency_seconds(self) -> NDArray[np.float64]:
        """float64 `[n]` from the due time to the last byte, including waiting for a connection."""
        return np.asarray(self.done - self.due)

    @property
    def service_seconds(self) -> NDArray[np.float64]:
        """float64 `[n]` from the send to the last byte, as closed-loop tools report it."""
        return np.asarray(self.done - self.sent)

    @property
    def has_failed(self) -> NDArray[np.bool_]:
        """bool `[n]`: which requests have ended without a right reply of status 200."""
        return np.asarray((self.done != UNSENT) & (self.status != 200))

    def describe(self, row: int, request: RankRequest) -> None:
        """Record kind and sizes of the request of a row."""
        self.kind[row], self.candidates[row] = KINDS.index(request.kind), request.candidates
        self.history[row] = request.history

    def note(self, row: int, reply: Reply, start: float) -> None:
        """Record the reply of a row. `start` is the loop's time at the start of the run."""
        self.sent[row] = reply.sent_at - start if reply.sent_at else UNSENT
        self.done[row] = reply.done_at - start
        self.status[row], self.failure[row] = reply.status, FAILURES.index(reply.failure)
        self.retry_after[row] = b"retry-after" in reply.headers
        cache = reply.headers.get(b"x-context-cache", b"").decode("latin-1")
        self.cache[row] = CACHE_RESULTS.index(cache) if cache in CACHE_RESULTS else 0
        for stage, milliseconds in server_timing(reply.headers.get(b"server-timing", b"").decode("latin-1")).items():
            if stage in STAGES:
                self.stages_ms[row, STAGES.index(stage)] = milliseconds

    def save(self, path: Path) -> None:
        """Write a compressed npz."""
        np.savez_compressed(path, samples=self.view(np.ndarray))


def server_timing(header: str) -> dict[str, float]:
    """`parse;dur=0.1, queue;dur=0.4` → milliseconds by name. Other entries are left out."""
    durations = {}
    for entry in header.split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.lower() == "dur":
                try:
                    durations[name] = float(value.strip('"'))
                except ValueError:
                    continue
    return durations
