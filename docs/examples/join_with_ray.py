"""Joins the log of what was served with events by Ray Data, on one machine or a cluster: how often each action followed a ranking.

    pip install 'ray[data]'
    python docs/examples/join_with_ray.py served events.parquet taken.parquet

It reads the files that `phoenix-ranker join` reads. It has no window, and writes a row for each post that was served: the ranking, the
post, its rank, and the actions that events name.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
import ray


def candidates_of(rankings: pd.DataFrame) -> pd.DataFrame:
    """A row for each candidate of these rankings."""
    rows = [
        {"request_id": ranking.request_id, "post_id": int(post), "rank": int(rank)}
        for ranking in rankings.itertuples()
        for post, rank in zip(ranking.candidates["post_ids"], ranking.ranks, strict=True)
    ]
    return pd.DataFrame(rows).astype({"post_id": "uint64"})


def main() -> None:
    """Join, and write one Parquet file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("served", type=Path)
    parser.add_argument("events", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--partitions", type=int, default=4)
    options = parser.parse_args()
    parts = [str(path) for path in sorted(options.served.glob("date=*/*.parquet"))]
    served = ray.data.read_parquet(parts, columns=["request_id", "candidates", "ranks"])
    candidates = served.map_batches(candidates_of, batch_format="pandas")
    events = ray.data.read_parquet(str(options.events), columns=["request_id", "post_id", "action"])
    taken = events.map_batches(lambda rows: rows.astype({"post_id": "uint64"}), batch_format="pandas")
    joined = candidates.join(
        taken, join_type="left_outer", num_partitions=options.partitions, on=("request_id", "post_id")
    )
    joined.to_pandas().to_parquet(options.out)


if __name__ == "__main__":
    main()
