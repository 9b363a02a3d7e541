"""The join of ten times as much as it may hold in memory: that much is in the files when they are read, candidates and histories."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
import pyarrow.parquet as pq  # noqa: E402

from tests.weights.lab.joining_rows import T0, ranking, write_part  # noqa: E402
from weights.lab.training.log import read_log  # noqa: E402

PARTS, PART_RANKINGS, CANDIDATES, EVENTS = 30, 1000, 100, 300
MEMORY_BYTES = 48_000_000
GROWTH_BYTES = 120_000_000
"""Of the process over one that joins a hundredth: what DuckDB may take, batches of the files, and what the allocator keeps."""
JOIN = """
import sys
from pathlib import Path
from weights.lab.joining.join import JoinSettings, join
served, events, out = map(Path, sys.argv[1:4])
counts = join(served, events, out, JoinSettings(until_ts=int(sys.argv[4]), memory=f"{sys.argv[5]}B"))
(peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(counts.rankings, counts.joined_events, 1024 * int(peak))
"""

pytestmark = pytest.mark.timeout(600)


def write_served(path: Path, parts: int) -> int:
    """Write parts that differ in the names of their rankings alone. Return how much they hold in memory, in bytes."""
    first = write_part(
        path, "part-0", [ranking(number, T0 + number, CANDIDATES, EVENTS) for number in range(PART_RANKINGS)]
    )
    table = pq.ParquetFile(first).read()
    for part in range(parts):
        names = pa.array([f"feed-{part}-{number}" for number in range(PART_RANKINGS)])
        pq.write_table(table.set_column(0, table.schema.field(0), names), path / f"date=2026-06-01/part-{part}.parquet")
    return int(table.nbytes) * parts


def write_events(path: Path, parts: int) -> int:
    """Write that a candidate in ten was shown, and an action with half of these, in no order. Return their size in memory, in bytes."""
    random = np.random.default_rng(1)
    order = random.permutation(parts * PART_RANKINGS * CANDIDATES // 10) * 10
    order = np.concatenate((order, order[order % 20 == 0]))
    rankings, places = np.divmod(order, CANDIDATES)
    names = [f"feed-{part}-{number}" for part, number in zip(*np.divmod(rankings, PART_RANKINGS), strict=True)]
    posts = 100 * (rankings % PART_RANKINGS) + 1 + places
    actions = np.where(np.arange(len(order)) < parts * PART_RANKINGS * CANDIDATES // 10, "shown", "favorite")
    table = pa.table({"request_id": names, "post_id": posts, "action": actions, "event_ts": T0 + 2000 + places})
    pq.write_table(table, path)
    return int(table.nbytes)


def joined(path: Path, parts: int) -> tuple[int, int]:
    """Join so many parts. Return how much they and their events hold, and the peak of the process, both in bytes."""
    path.mkdir()
    size = write_served(path / "served", parts) + write_events(path / "events.parquet", parts)
    arguments = [path / "served", path / "events.parquet", path / "log", str(T0 + 10**6), str(MEMORY_BYTES)]
    done = subprocess.run([sys.executable, "-c", JOIN, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rankings, events, peak = map(int, done.stdout.split())
    assert rankings == parts * PART_RANKINGS
    assert events == 3 * parts * PART_RANKINGS * CANDIDATES // 20
    return size, peak


@pytest.mark.slow
def test_the_join_takes_ten_times_the_memory_it_is_allowed(tmp_path: Path) -> None:
    _, of_little = joined(tmp_path / "little", 1)
    size, peak = joined(tmp_path / "much", PARTS)
    assert size >= 10 * MEMORY_BYTES
    assert peak - of_little < GROWTH_BYTES, f"{size:,} bytes took {peak - of_little:,} more than little did"
    log = read_log(tmp_path / "much/log", cache=tmp_path / "cache")
    assert len(log) == PARTS * PART_RANKINGS * CANDIDATES // 10
    assert int(log.actions.sum()) == len(log) // 2
