"""The posts of a log as a table, from which `corpus build` makes a corpus."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from weights.lab.training.log import Log


def write_posts(path: Path, log: Log) -> int:
    """Write `post_ids`, `author_ids` (uint64, or texts where the log has texts) and `created_at` (int64 Unix seconds, 0 unknown), one row
    for each post of the log, as its last impression has them. Returns how many there are."""
    _, from_end = np.unique(log.post_id[::-1], return_index=True)
    rows = np.sort(len(log) - 1 - from_end)
    columns = {
        f"{name}s": log.texts[name].take(pa.array(rows)).cast(pa.string()) if log.texts else pa.array(getattr(log, name)[rows])
        for name in ("post_id", "author_id")
    }  # fmt: skip
    pq.write_table(pa.table(columns | {"created_at": pa.array(log.created_at[rows])}), path, compression="zstd")
    return len(rows)
