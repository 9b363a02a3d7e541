"""What a run measured: one row a request, in columns. Knows files, not sockets, and draws no conclusions."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.generate.http_client import FAILURES, Reply
from loadtest.generate.traffic import KINDS, RankRequest

STAGES = ("parse", "queue", "forward", "serialize")
CACHE_RESULTS = ("", "hit", "miss")
UNSENT = -1.0


@dataclass(slots=True)
class Samples:
    """Columns `[n]` in seconds from the start of the run; `stages_ms` float32 `[n, 4]` as the server's `Server-Timing` had it, NaN unknown.

    `due` is when the schedule wanted a request out, `fired` when the generator got to it, `sent` when it went onto a connection
    (−1: never), `done` when its reply was complete or given up. `status` 0 means no reply; `failure`, `kind`, `cache` are
    indices into FAILURES, KINDS, CACHE_RESULTS.
    """

    due: NDArray[np.float64]
    fired: NDArray[np.float64]
    sent: NDArray[np.float64]
    done: NDArray[np.float64]
    status: NDArray[np.int16]
    failure: NDArray[np.int8]
    kind: NDArray[np.int8]
    cache: NDArray[np.int8]
    candidates: NDArray[np.int32]
    history: NDArray[np.int32]
    reply_bytes: NDArray[np.int32]
    retry_after: NDArray[np.bool_]
    stages_ms: NDArray[np.float32]

    @classmethod
    def empty(cls, count: int) -> Samples:
        """Rows to be filled in; a row that never is has status 0 and failure `timeout`."""
        return cls(
            due=np.full(count, UNSENT),
            fired=np.full(count, UNSENT),
            sent=np.full(count, UNSENT),
            done=np.full(count, UNSENT),
            status=np.zeros(count, np.int16),
            failure=np.full(count, FAILURES.index("timeout"), np.int8),
            kind=np.zeros(count, np.int8),
            cache=np.zeros(count, np.int8),
            candidates=np.zeros(count, np.int32),
            history=np.zeros(count, np.int32),
            reply_bytes=np.zeros(count, np.int32),
            retry_after=np.zeros(count, np.bool_),
            stages_ms=np.full((count, len(STAGES)), np.nan, np.float32),
        )

    def __len__(self) -> int:
        return len(self.due)

    @property
    def latency_seconds(self) -> NDArray[np.float64]:
        """float64 `[n]` from the due time to the last byte: waiting for a connection counts."""
        return self.done - self.due

    @property
    def service_seconds(self) -> NDArray[np.float64]:
        """float64 `[n]` from the send to the last byte: what a closed-loop tool reports."""
        return self.done - self.sent

    def describe(self, row: int, request: RankRequest) -> None:
        """Note what is asked for."""
        self.kind[row] = KINDS.index(request.kind)
        self.candidates[row] = request.candidates
        self.history[row] = request.history

    def record(self, row: int, reply: Reply, start: float) -> None:
        """Note what came back; `start` is the loop's time at the start of the run."""
        self.sent[row] = reply.sent_at - start if reply.sent_at else UNSENT
        self.done[row] = reply.done_at - start
        self.status[row] = reply.status
        self.failure[row] = FAILURES.index(reply.failure)
        self.reply_bytes[row] = reply.body_bytes
        self.retry_after[row] = b"retry-after" in reply.headers
        cache = reply.headers.get(b"x-context-cache", b"").decode("latin-1")
        self.cache[row] = CACHE_RESULTS.index(cache) if cache in CACHE_RESULTS else 0
        timing = reply.headers.get(b"server-timing")
        if timing:
            for stage, milliseconds in server_timing(timing.decode("latin-1")).items():
                if stage in STAGES:
                    self.stages_ms[row, STAGES.index(stage)] = milliseconds

    def where(self, mask: NDArray[np.bool_]) -> Samples:
        """The rows of a mask, in order."""
        return Samples(*(getattr(self, column.name)[mask] for column in fields(self)))

    def save(self, path: Path) -> None:
        """Write a compressed npz."""
        columns: dict[str, Any] = {column.name: getattr(self, column.name) for column in fields(self)}
        np.savez_compressed(path, **columns)

    @classmethod
    def load(cls, path: Path) -> Samples:
        """Read what `save` wrote; nothing is unpickled."""
        with np.load(path, allow_pickle=False) as stored:
            return cls(*(stored[column.name] for column in fields(cls)))


def server_timing(header: str) -> dict[str, float]:
    """`parse;dur=0.1, queue;dur=0.4` → milliseconds by name; what does not read so is left out."""
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
