"""Writes a large synthetic log by day, to measure how much memory `phoenix-ranker log` and `train` need for one.

    python docs/examples/large_log.py 100000000 build/large
    /usr/bin/time -v phoenix-ranker log build/large --cache build/large-cache

The rows are in no order within a day. Users like some authors more than others, so that there is something to learn.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

DAYS, SLOTS = 50, 10
BEGIN = 1_780_272_000  # 2026-06-01
DAY_SECONDS = 86_400
POSTS, AUTHORS = 1_000_000, 50_000
IMPRESSIONS_OF_A_USER = 50
ACTIONS = {"favorite": 0.05, "reply": 0.01, "click": 0.12, "report": 0.001}


def id_of(numbers: np.ndarray) -> np.ndarray:
    """Ids of 64 bits, as services have them, one for each number above 0: small ones would be easier to count. uint64, as `numbers`."""
    return numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def day_of(day: int, rows: int, users: int, rng: np.random.Generator) -> pa.Table:
    """The impressions of one day, in no order: requests of SLOTS posts, each of one of `users` users."""
    requests = rows // SLOTS
    request = day * requests + np.arange(requests) + 1
    seconds = BEGIN + day * DAY_SECONDS + rng.integers(0, DAY_SECONDS, requests)
    user = rng.integers(1, users, requests)
    post = (rng.random((requests, SLOTS)) ** 3 * POSTS).astype(np.int64) + 1  # some posts are shown often
    author = post % AUTHORS + 1
    likes = 1 + ((user[:, None] + author) % 7 == 0) * 4.0
    columns = {
        "request_id": np.repeat(id_of(request), SLOTS),
        "impression_ts": np.repeat(seconds, SLOTS),
        "user_id": np.repeat(id_of(user), SLOTS),
        "post_id": id_of(post.ravel()),
        "author_id": id_of(author.ravel()),
        "product_surface": rng.integers(0, 3, requests * SLOTS),
        "created_at": np.repeat(seconds, SLOTS) - rng.integers(0, 3 * DAY_SECONDS, requests * SLOTS),
        "dwell_seconds": np.zeros(requests * SLOTS, np.float32),
    }
    for name, share in ACTIONS.items():
        columns[f"action.{name}"] = (rng.random((requests, SLOTS)) < share * likes / 1.57).ravel()
    order = np.repeat(rng.permutation(requests), SLOTS) * SLOTS + np.tile(np.arange(SLOTS), requests)
    return pa.table({name: values[order] for name, values in columns.items()})


def main() -> None:
    """Write the log, a directory a day."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("impressions", type=int)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    users = max(1000, options.impressions // IMPRESSIONS_OF_A_USER)
    for day in range(DAYS):
        place = options.out / f"date={np.datetime64(BEGIN + day * DAY_SECONDS, 's').astype('datetime64[D]')}"
        place.mkdir(parents=True)
        table = day_of(day, options.impressions // DAYS, users, np.random.default_rng(day))
        pq.write_table(table, place / "part-0.parquet", compression="zstd")


if __name__ == "__main__":
    main()
