"""Joins the log of what was served with events by Ray Data, on one machine or a cluster: which actions followed each post that was served.

    pip install 'ray[data]' polars
    python docs/examples/join_with_ray.py served events.parquet taken

It reads the files that `phoenix-ranker join` reads, and joins in the same way as far as it goes: it has no window, and takes no notice of
which posts were shown. It writes Parquet files to the directory `taken`, with a row for each event that joins: the ranking, the post, its
rank, and the action. On a cluster, all nodes must see the three places; RAY_ADDRESS says where the cluster is.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import ray


def candidates_of(rankings: pd.DataFrame) -> pd.DataFrame:
    """A row for each candidate of these rankings."""
    counts = rankings["ranks"].map(len)
    posts = [ranking["post_ids"] for ranking in rankings["candidates"]]
    return pd.DataFrame(
        {
            "request_id": np.repeat(rankings["request_id"].to_numpy(), counts),
            "post_id": np.concatenate(posts).astype(np.uint64),
            "rank": np.concatenate(rankings["ranks"].to_list()),
        }
    )


def events_of(events: pd.DataFrame) -> pd.DataFrame:
    """These events, each once, with posts as integers: events may write them as texts."""
    return events.astype({"post_id": np.uint64}).drop_duplicates()


def main() -> None:
    """Join, write, and say what was done where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("served", type=Path)
    parser.add_argument("events", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--partitions", type=int, default=4, help="of the join; about 200 MB each")
    options = parser.parse_args()
    parts = [str(path) for path in sorted(options.served.glob("date=*/*.parquet"))]
    if not parts:
        parser.error(f"{options.served} holds no parts date=YYYY-MM-DD/NAME.parquet")
    served = ray.data.read_parquet(parts).select_columns(["request_id", "candidates", "ranks"])
    candidates = served.map_batches(candidates_of, batch_format="pandas")
    events = ray.data.read_parquet(str(options.events)).select_columns(["request_id", "post_id", "action"])
    joined = candidates.join(
        events.map_batches(events_of, batch_format="pandas"),
        join_type="inner",
        num_partitions=options.partitions,
        on=("request_id", "post_id"),
    ).materialize()
    joined.write_parquet(str(options.out))
    print(joined.stats())
    print(f"{joined.count():,} events joined; {len(ray.nodes())} nodes")


if __name__ == "__main__":
    main()
