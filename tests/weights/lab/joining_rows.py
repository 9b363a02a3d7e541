"""Rankings as a service logs them, and events about them. Not a test itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from model.inputs import Candidates, Context
from tests.support.parts import write_rows
from weights.served import ServedRanking

ACTIONS = ("favorite", "reply", "report")
T0 = 1_780_300_000
DAY = 86_400


def ranking(number: int, served_ts: int = T0, candidates: int = 4, history: int = 3, **changes: Any) -> ServedRanking:
    """A row of values that depend on the number alone; `changes` are fields. Posts are `100·number + 1 …`, the first ranks first."""
    random = np.random.default_rng(number)
    context = Context(
        user_id=1000 + number % 7,
        post_ids=random.integers(1, 2**64, history, np.uint64),
        author_ids=random.integers(1, 2**64, history, np.uint64),
        actions=random.integers(0, 2, (history, len(ACTIONS))).astype(np.float32),
        surfaces=random.integers(0, 3, history),
        dwell_seconds=random.random(history, np.float32),
    )
    created_at = served_ts - random.integers(1, 10**6, candidates)
    posts = Candidates(
        post_ids=np.arange(candidates, dtype=np.uint64) + np.uint64(100 * number + 1),
        author_ids=random.integers(1, 2**64, candidates, np.uint64),
        surfaces=random.integers(0, 3, candidates),
        age_buckets=(served_ts - created_at) // 3600 + 1,
    )
    fields: dict[str, Any] = {
        "request_id": f"feed-{number}", "served_us": served_ts * 1_000_000 + 17, "endpoint": "/rank", "key": None,
        "model_name": "demo", "model_version": "1", "model_digest": "ab" * 32, "action_names": ACTIONS,
        "continuous_names": ("dwell_time",), "impression_ts": served_ts, "context": context, "candidates": posts,
        "created_at": created_at, "scores": -np.arange(candidates, dtype=np.float64),
        "ranks": np.arange(candidates) + 1, "returned": candidates, "weights": np.ones(len(ACTIONS)), "score_form": "sum",
    }  # fmt: skip
    return ServedRanking(**(fields | changes))


def write_part(served: Path, name: str, rows: list[ServedRanking], day: str = "2026-06-01") -> Path:
    """Write the rows as a part of a log of what was served."""
    path = served / f"date={day}/{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(path, rows)
    return path


def event(number: int, place: int, action: str, event_ts: int = T0 + 60, **changes: Any) -> dict[str, Any]:
    """An event about candidate `place` of ranking `number`."""
    row = {"request_id": f"feed-{number}", "post_id": 100 * number + 1 + place, "action": action, "event_ts": event_ts}
    return row | changes


def write_events(path: Path, events: list[dict[str, Any]]) -> Path:
    """Write events as Parquet."""
    pq.write_table(pa.Table.from_pylist(events), path)
    return path
