"""The posts of a log as a table, from which `corpus build` makes a corpus."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from weights.format.writer import write_whole
from weights.lab.training.log import Log


def write_posts(path: Path, log: Log) -> int:
    """Write one row for each post of the log, as its last impression has it. Returns how many there are.

    `post_ids`, `author_ids`: uint64, or texts where the log has texts. `created_at`: int64, Unix seconds, 0 unknown. `codes`: lists of
    integers, if the log has them. The file is whole or as before.
    """
    _, from_end = np.unique(log.post_id[::-1], return_index=True)
    rows = np.sort(len(log) - 1 - from_end)
    columns = {
        f"{name}s": log.texts.of(getattr(log, name)[rows]).cast(pa.string()) if log.texts else pa.array(getattr(log, name)[rows])
        for name in ("post_id", "author_id")
    }  # fmt: skip
    columns["created_at"] = pa.array(log.created_at[rows])
    if log.codes.shape[1]:
        columns["codes"] = pa.array(log.codes[rows].tolist(), pa.list_(pa.int64()))
    write_whole(path, lambda new: pq.write_table(pa.table(columns), new, compression="zstd"))
    return len(rows)
