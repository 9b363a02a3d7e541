"""What was served, joined with what people did: labels, windows, what is unknown, what does not join, and bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

pa = pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
import pyarrow.csv  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from model.inputs import age_bucket  # noqa: E402
from model.synthetic import random_ranker  # noqa: E402
from tests.weights.call import call  # noqa: E402
from tests.weights.lab.joining_rows import ACTIONS, DAY, T0, event, ranking, write_events, write_part  # noqa: E402
from tests.weights.lab.training.small_run import small_config  # noqa: E402
from weights.actions import DWELL_TIME  # noqa: E402
from weights.checkpoint import save_checkpoint  # noqa: E402
from weights.lab.joining.counts import JoinCounts, NothingJoins  # noqa: E402
from weights.lab.joining.join import JoinSettings, join  # noqa: E402
from weights.lab.training.examples import Examples  # noqa: E402
from weights.lab.training.log import Log, read_log, time_words  # noqa: E402
from weights.lab.training.log_facts import facts  # noqa: E402
from weights.served import COLUMNS, read_part  # noqa: E402
from weights.tables import TableError  # noqa: E402
from weights.text_ids import text_id  # noqa: E402

UNTIL = T0 + 10 * DAY
RANKINGS = 12


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """Two parts of six rankings each; a context repeats within a part."""
    rows = [ranking(number, T0 + number) for number in range(RANKINGS)]
    rows[3] = structs.replace(rows[3], context=rows[2].context)
    write_part(tmp_path / "served", "a", rows[:6])
    write_part(tmp_path / "served", "b", rows[6:], "2026-06-02")
    return tmp_path / "served"


def joined(
    served: Path, events: list[dict[str, Any]] | Path, out: str = "log", **settings: Any
) -> tuple[Log, JoinCounts]:
    source = events if isinstance(events, Path) else write_events(served.with_name("events.parquet"), events)
    settings = {"until_ts": UNTIL} | settings
    counts = join(served, source, served.with_name(out), JoinSettings(**settings))
    return read_log(served.with_name(out)), counts


def taken(log: Log, action: str) -> list[int]:
    """The posts that an action was taken with."""
    return sorted(log.post_id[log.actions[:, log.action_names.index(action)]].tolist())


def test_training_reads_what_the_model_read(served: Path) -> None:
    log, counts = joined(served, [event(1, 0, "favorite")])
    config = replace(small_config(), actions=len(ACTIONS), post_age_granularity_minutes=60, product_surfaces=16)
    examples = Examples(log, config)
    rows = [row for part in sorted(served.glob("*/*.parquet")) for row in read_part(part)]
    assert len(examples) == len(rows) == counts.joined_rankings == RANKINGS
    for index, row in enumerate(sorted(rows, key=lambda row: row.impression_ts)):
        context, candidates = examples.context(index), examples.candidates(examples.rows(index))
        assert context.user_id == row.context.user_id
        for name in ("post_ids", "author_ids", "actions", "surfaces", "dwell_seconds"):
            assert np.array_equal(getattr(context, name), getattr(row.context, name)), name
        for name in ("post_ids", "author_ids", "surfaces"):
            assert np.array_equal(getattr(candidates, name), getattr(row.candidates, name)), name
        expected = age_bucket(row.impression_ts, row.created_at, config)
        assert np.array_equal(candidates.age_buckets, expected)
        assert log.position is not None
        assert np.array_equal(log.position[examples.rows(index)], row.ranks)
    random_ranker(config, 1)(examples.batch([0, 1])[0])
    assert counts.contexts == RANKINGS - 1, "one repeats"


def test_an_age_that_the_model_did_not_know_stays_unknown(tmp_path: Path) -> None:
    row = ranking(1, impression_ts=0)
    row.candidates.age_buckets[:] = 0
    write_part(tmp_path / "served", "a", [row])
    log, _ = joined(tmp_path / "served", [event(1, 0, "favorite")])
    assert log.impression_ts.tolist() == [T0] * 4
    assert log.created_at.tolist() == [0] * 4


def test_an_event_counts_within_the_window_of_being_shown(served: Path) -> None:
    at = T0 + 1
    events = [event(1, place, "favorite", at + after) for place, after in enumerate((0, 3600, 3601, -1000))]
    log, counts = joined(served, events, window_seconds=3600)
    assert taken(log, "favorite") == [101, 102]
    assert (counts.joined_events, counts.events_after_window, counts.events_before_ranking) == (2, 1, 1)
    shown = [event(1, 2, "shown", at + 100), event(1, 2, "favorite", at + 3601)]
    log, _ = joined(served, shown, "later", window_seconds=3600)
    assert taken(log, "favorite") == [103]


def test_a_post_seen_too_late_for_its_window_trains_nothing(served: Path) -> None:
    """Neither as a yes nor as a no: what happened to it is not known yet."""
    seen = [event(1, place, "shown", T0 + at) for place, at in enumerate((10, 3000, 3000))]
    seen += [event(2, 0, "shown", T0 + 3000)]
    events = [*seen, event(1, 0, "favorite", T0 + 20), event(1, 1, "favorite", T0 + 3010)]
    log, counts = joined(served, events, window_seconds=3600, until_ts=T0 + 3612)
    assert log.post_id.tolist() == [101]
    assert (counts.candidates_seen_late, counts.events_of_candidates_seen_late) == (3, 4)
    assert (counts.joined_rankings, counts.rankings_seen_late, counts.rankings_never_shown) == (1, 1, RANKINGS - 2)
    assert "3 posts were seen so late that their window is not over: left out" in counts.lines()
    until = f"their window is not over: events count as whole up to {time_words(T0 + 3612)}, which --until decides"
    with pytest.raises(NothingJoins, match=re.escape(until)):
        joined(served, events, "open", window_seconds=3611, until_ts=T0 + 3612)
    log, _ = joined(served, events, "later", window_seconds=3600, until_ts=T0 + 6600)
    assert log.post_id.tolist() == [101, 102, 103, 201]
    assert taken(log, "favorite") == [101, 102]


def test_a_part_from_before_a_column_joins_also_when_rewritten(served: Path) -> None:
    """A column that may be null can be newer than a part, and `served forget` leaves a part the columns that it has."""
    events, path = [event(1, 0, "favorite"), event(8, 0, "favorite")], served / "date=2026-06-01/a.parquet"
    whole, _ = joined(served, events)
    table = pq.read_table(path, partitioning=None)
    later = [name for name, column in COLUMNS.items() if column.is_nullable and name != "history"]
    pq.write_table(table.drop_columns(later), path)
    log, counts = joined(served, events, "earlier")
    assert (counts.parts, counts.foreign_files) == (2, [])
    assert log.post_id.tolist() == whole.post_id.tolist()
    assert taken(log, "favorite") == [101, 801]
    said = call("served", "forget", served, "--user", table["user_id"][0]).output
    assert "2 rankings removed; of 2 parts 2 were written again" in said
    log, counts = joined(served, events, "rewritten")
    assert (counts.parts, counts.rankings) == (2, RANKINGS - 2)
    assert taken(log, "favorite") == [101, 801]


def test_what_was_not_shown_trains_nothing(served: Path) -> None:
    events = [event(1, 0, "shown"), event(1, 2, "shown"), event(1, 0, "favorite"), event(1, 1, "favorite")]
    log, counts = joined(served, events)
    assert log.post_id.tolist() == [101, 103]
    assert (counts.joined_rankings, counts.rankings_never_shown) == (1, RANKINGS - 1)
    assert counts.events_of_unseen_candidates == 1


def test_without_shown_events_what_was_returned_was_shown(tmp_path: Path) -> None:
    write_part(tmp_path / "served", "a", [ranking(1, ranks=np.array([3, 1, 4, 2]), returned=2)])
    log, _ = joined(tmp_path / "served", [event(1, 1, "favorite")])
    assert log.post_id.tolist() == [102, 104]
    assert log.position is not None
    assert log.position.tolist() == [1, 2]


def test_events_on_posts_that_no_reply_held_are_left_out(tmp_path: Path) -> None:
    """Also where the reply held one of two candidates with the same post: then the event joins."""
    row = ranking(1, ranks=np.array([4, 1, 3, 2]), returned=2)
    row.candidates.post_ids[3] = row.candidates.post_ids[0]
    write_part(tmp_path / "served", "a", [row])
    events = [event(1, place, "favorite") for place in (0, 1, 2)]
    log, counts = joined(tmp_path / "served", events)
    assert taken(log, "favorite") == [101, 102]
    assert (counts.joined_events, counts.events_of_unseen_candidates) == (2, 1)
    assert "  left out: 1, their post was not shown" in counts.lines()


def test_an_absent_action_is_a_no_only_where_it_is_observed(served: Path) -> None:
    events = [event(1, 0, "favorite"), event(2, 1, "report")]
    for name, settings, unknown in (
        ("default", {}, {"reply"}),
        ("given", {"observed": ("favorite", "reply")}, {"report"}),
    ):
        log, counts = joined(served, events, name, **settings)
        assert log.unknown is not None
        for place, action in enumerate(ACTIONS):
            expected = len(log) - len(taken(log, action)) if action in unknown else 0
            assert log.unknown[:, place].sum() == expected, (name, action)
        assert set(counts.observed) == set(ACTIONS) - unknown
    assert taken(log, "report") == [202], "an event is a yes also where its absence is no no"
    with pytest.raises(
        TableError, match=r"--observed zap: the model has no such action; it has favorite, reply, report"
    ):
        joined(served, events, "x", observed=("zap",))


def test_rankings_whose_window_is_not_over_are_left_out(served: Path) -> None:
    log, counts = joined(served, [event(8, 0, "favorite", T0 + 9)], window_seconds=3, until_ts=None)
    assert (counts.joined_rankings, counts.open_rankings) == (6, 6)
    assert counts.until_ts == T0 + 8
    assert log.impression_ts.max() == T0 + 5


def test_a_clock_that_is_ahead_ends_no_window(served: Path) -> None:
    """How far the events reach is told by the rankings that they name, whose times are the service's."""
    ahead = [event(5, 0, "favorite", T0 + DAY), event(5, 0, "favorite", T0 + DAY, request_id="of another place")]
    _, counts = joined(served, [event(8, 0, "favorite", T0 + 9), *ahead], window_seconds=3, until_ts=None)
    assert (counts.joined_rankings, counts.open_rankings, counts.until_ts) == (6, 6, T0 + 8)
    assert (counts.events_after_window, counts.events_without_ranking) == (1, 1)


def test_rankings_served_in_the_future_are_left_out(served: Path) -> None:
    """A service whose clock is ahead ends no window, also where an event names its ranking."""
    ahead_ts = int(time.time()) + 3600
    write_part(served, "ahead", [ranking(20, ahead_ts), ranking(21, ahead_ts - 3500)])
    _, counts = joined(served, [event(8, 0, "favorite"), event(20, 0, "favorite")], window_seconds=3, until_ts=None)
    assert (counts.joined_rankings, counts.open_rankings, counts.until_ts) == (6, 7, T0 + 8)
    assert (counts.future_rankings, counts.events_of_left_out_rankings) == (1, 2), "clocks differ by minutes"
    assert "  left out: 1, served in the future by the clock of this machine" in counts.lines()
    assert counts.newest_ranking_ts == ahead_ts - 3500


def test_a_client_clock_that_is_ahead_dates_no_ranking(served: Path) -> None:
    """What a caller says of the time counts where it is past, or ahead by no more than clocks differ."""
    said = {20: T0 + 400 * DAY, 21: T0 + 301, 22: T0 + 300, 23: T0 - DAY, 24: 0}
    write_part(served, "ahead", [ranking(number, impression_ts=said_ts) for number, said_ts in said.items()])
    log, counts = joined(served, [event(1, 0, "favorite")])
    at = {int(post) // 100: int(shown_ts) for post, shown_ts in zip(log.post_id, log.impression_ts, strict=True)}
    assert [at[number] for number in said] == [T0, T0, T0 + 300, T0 - DAY, T0]
    assert counts.rankings_dated_ahead == 2
    assert (
        "2 rankings have an impression_ts of more than five minutes after they were served: their time is when they were served"
    ) in counts.lines()


def test_until_in_the_future_is_refused(served: Path) -> None:
    events = write_events(served.with_name("events.parquet"), [event(1, 0, "favorite")])
    told = call("join", served, "--events", events, "--out", served.with_name("log"), "--until", int(time.time()) + DAY)
    assert (told.exit_code, len(told.stderr.splitlines())) == (1, 1), told.output
    assert "is in the future by the clock of this machine" in told.stderr


def test_a_name_that_comes_again_ends_no_window(served: Path) -> None:
    """A client that sends one name again and again names its first ranking alone."""
    write_part(served, "again", [ranking(2, T0 + 5000)])
    _, counts = joined(served, [event(8, 0, "favorite"), event(2, 0, "favorite")], window_seconds=3, until_ts=None)
    assert counts.until_ts == T0 + 8


def test_what_does_not_join_is_counted_by_reason(served: Path) -> None:
    write_part(served, "again", [ranking(1, T0 + 1)])  # the same ranking in two parts
    write_part(served, "other", [ranking(2, T0 + 500)])  # another ranking of the same name
    events = [
        event(1, 0, "favorite"), event(1, 0, "favorite"), event(77, 0, "favorite"), event(1, 0, "favorite", request_id=None),
        event(2, 0, "favorite"), event(1, 50, "favorite"), event(1, 1, "zap"), event(1, 1, "zap", T0 + 61), event(3, 1, "reply"),
    ]  # fmt: skip
    log, counts = joined(served, events)
    assert (counts.rankings, counts.joined_rankings) == (RANKINGS + 2, RANKINGS - 1)
    assert (counts.repeated_rankings, counts.ambiguous_rankings) == (1, 2)
    assert (counts.events, counts.joined_events, counts.repeated_events) == (9, 2, 1)
    assert (counts.events_without_ranking, counts.events_of_left_out_rankings) == (2, 1)
    assert (counts.events_without_candidate, counts.events_of_unknown_actions) == (1, {"zap": 2})
    assert len(np.unique(log.request_id)) == counts.joined_rankings
    assert json.loads(served.with_name("log").joinpath("join.json").read_text())["rankings"] == RANKINGS + 2


def test_dwells_and_propensities_reach_the_log(tmp_path: Path) -> None:
    row = ranking(1, temperature=0.5, propensities=np.array([0.5, 0.25, 1.0, 1.0]))
    write_part(tmp_path / "served", "a", [row, ranking(2)])
    events = [event(1, 1, "dwell_time", value=2.5), event(1, 1, "dwell_time", T0 + 61, value=7.5)]
    log, counts = joined(tmp_path / "served", events)
    assert log.dwell_seconds.max() == 7.5
    assert log.propensity is not None
    assert log.propensity.tolist() == [0.5, 0.25, 1, 1, 0, 0, 0, 0]
    assert counts.events_of_unknown_actions == {}


FORMS: dict[str, Callable[[pa.Table, Path], object]] = {
    "events.jsonl": lambda table, path: path.write_text("\n".join(map(json.dumps, table.to_pylist()))),
    "events.csv": lambda table, path: pyarrow.csv.write_csv(table, path),
    "events.csv.gz": lambda table, path: pyarrow.csv.write_csv(table, pa.CompressedOutputStream(str(path), "gzip")),
    "by Polars.parquet": lambda table, path: pq.write_table(with_texts(table, pa.string_view()), path),
    "by pandas.parquet": lambda table, path: pq.write_table(with_texts(table, pa.large_string()), path),
    "categories.parquet": lambda table, path: pq.write_table(
        with_texts(table, pa.dictionary(pa.int32(), pa.string())), path
    ),
}


def with_texts(table: pa.Table, kind: pa.DataType) -> pa.Table:
    """The table with its texts as this type."""
    types = {column.name: kind if pa.types.is_string(column.type) else column.type for column in table.schema}
    return table.cast(pa.schema(types))


@pytest.mark.parametrize("name", FORMS)
def test_events_come_in_any_format_and_order(name: str, served: Path) -> None:
    events = [event(number, number % 4, "favorite") for number in range(RANKINGS)]
    events = [one | {"post_id": str(one["post_id"])} for one in events]  # as replies write them
    expected, _ = joined(served, events)
    path = served.with_name(name)
    FORMS[name](pa.Table.from_pylist(events[::-1]), path)
    log, _ = joined(served, path, "other")
    assert np.array_equal(log.actions, expected.actions)
    assert taken(log, "favorite") == sorted(int(one["post_id"]) for one in events)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "csv"])
def test_other_columns_of_events_may_come_and_change(suffix: str, served: Path) -> None:
    """And `value` may be absent from a file, or from a line of JSON."""
    days = served.with_name("events")
    days.mkdir()
    rows = [
        [event(1, 0, "favorite"), event(1, 1, "dwell_time", value=2.5)], [event(2, 1, "reply", app="ios", v=1)],
        [event(3, 2, "dwell_time", app=7, v="x", value=4.0), event(3, 1, "favorite")],
    ]  # fmt: skip
    for number, events in enumerate(rows):
        path = days / f"day-{number}.{suffix}"
        if suffix == "parquet":
            write_events(path, events)
        elif suffix == "csv":
            pyarrow.csv.write_csv(pa.Table.from_pylist(events), path)
        else:
            path.write_text("\n".join(map(json.dumps, events)))
    log, counts = joined(served, days)
    assert (counts.events, counts.joined_events) == (5, 5)
    assert (taken(log, "favorite"), taken(log, "reply")) == ([101, 302], [202])
    assert dict(zip(log.post_id.tolist(), log.dwell_seconds.tolist(), strict=True))[303] == 4.0


def test_ids_that_are_texts_join_and_train_as_hashes(tmp_path: Path) -> None:
    row = ranking(1)
    row.candidates.post_ids[0] = text_id("post:a")
    write_part(tmp_path / "served", "a", [row])
    events = write_events(tmp_path / "events.parquet", [event(1, 0, "favorite", post_id="post:a")])
    join(tmp_path / "served", events, tmp_path / "log", JoinSettings(ids="text", until_ts=UNTIL))
    log = read_log(tmp_path / "log", "text")
    assert taken(log, "favorite") == [text_id("post:a")]


BAD: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    r"events\.parquet, row 2: event_ts must be Unix seconds.*this looks like milliseconds": lambda served: [
        event(1, 0, "favorite"), event(1, 0, "reply", T0 * 1000),
    ],
    r"events\.parquet, row 1: post_id 'post:a' must be an unsigned 64-bit integer.*\(--ids text": lambda served: [
        event(1, 0, "favorite", post_id="post:a")
    ],
    r"events\.parquet, row 2: post_id '007' must be an unsigned 64-bit integer": lambda served: [
        event(1, 0, "favorite", post_id="101"), event(1, 0, "favorite", post_id="007"),
    ],
    r"events\.parquet, row 1: post_id '1{60}' must be an unsigned 64-bit integer": lambda served: [
        event(1, 0, "favorite", post_id="1" * 5000)
    ],
    r"events\.parquet lacks the column action": lambda served: [{"request_id": "feed-1", "post_id": 1, "event_ts": T0}],
    r"events\.parquet, row 2: column event_ts has 1 nulls": lambda served: [
        event(1, 0, "favorite"), event(1, 0, "favorite", None),
    ],
    r"events\.parquet, row 1: column value does not fit double; it holds string": lambda served: [
        event(1, 0, "favorite", value="x"), event(1, 0, "reply", value="3"),
    ],
    r"nothing joins: 2 parts, 12 rankings: 0 joined": lambda served: [event(1, 0, "favorite", T0 - DAY)],
}  # fmt: skip


@pytest.mark.parametrize("reason", BAD)
def test_bad_events_are_one_sentence_with_file_and_row(reason: str, served: Path) -> None:
    events = write_events(served.with_name("events.parquet"), BAD[reason](served))
    told = call("join", served, "--events", events, "--out", served.with_name("log"))
    assert told.exit_code == 1
    assert __import__("re").search(reason, told.stderr), told.stderr
    assert len(told.stderr.splitlines()) == 1
    assert sorted(path.name for path in served.parent.iterdir()) == ["events.parquet", "served"]


@pytest.mark.parametrize(("column", "bad"), [("post_id", "x"), ("value", "y")])
def test_a_late_misfit_in_csv_names_its_column(column: str, bad: str, served: Path) -> None:
    """Also where the file has other columns before it."""
    rows = [{"a": 1, "b": "t"} | event(1, 0, "favorite", value="") for _ in range(30_000)]
    rows[-1][column] = bad
    path = served.with_name("events.csv")
    lines = [",".join(rows[0]), *(",".join(map(str, one.values())) for one in rows)]
    path.write_text("\n".join(lines) + "\n")
    told = call("join", served, "--events", path, "--out", served.with_name("log"))
    assert told.exit_code == 1
    assert f"events.csv, row 30000: column {column} holds a value that does not fit" in told.stderr, told.stderr


@pytest.mark.parametrize("line", ["7", "[1]", '"request_id"', "{", "[" * 100_000])
def test_a_line_of_events_that_is_no_object_is_named(line: str, served: Path) -> None:
    path = served.with_name("events.jsonl")
    path.write_text(json.dumps(event(1, 0, "favorite")) + "\n" + line + "\n")
    told = call("join", served, "--events", path, "--out", served.with_name("log"))
    assert (told.exit_code, len(told.stderr.splitlines())) == (1, 1), told.output
    assert "events.jsonl, line 2: " in told.stderr


def test_json_events_may_hold_what_python_writes_for_no_number(served: Path) -> None:
    path = served.with_name("events.jsonl")
    path.write_text(json.dumps(event(1, 0, "favorite", value=float("nan"))) + "\n")
    log, _ = joined(served, path)
    assert taken(log, "favorite") == [101]


def test_foreign_cut_and_open_files_are_counted_and_named(served: Path) -> None:
    whole = (served / "date=2026-06-01/a.parquet").read_bytes()
    (served / "date=2026-06-01/cut.parquet").write_bytes(whole[: len(whole) // 2])
    (served / "date=2026-06-02/c.parquet.open").write_bytes(whole[:100])
    pq.write_table(pa.table({"a": [1]}), served / "date=2026-06-01/foreign.parquet")
    (served / "notes.txt").write_text("x")
    _, counts = joined(served, [event(1, 0, "favorite")])
    assert (counts.parts, counts.open_parts, counts.rankings) == (2, 1, RANKINGS)
    assert [Path(path).name for path in counts.cut_parts] == ["cut.parquet"]
    assert sorted(Path(path).name for path in counts.foreign_files) == ["foreign.parquet", "notes.txt"]
    assert any("WARNING: 1 files are left out, they cannot be read: " in line for line in counts.lines())


def end_of_column(path: Path, name: str) -> int:
    """Where the last value of a column of a part lies in the file."""
    group = pq.read_metadata(path).row_group(0)
    chunks = {group.column(place).path_in_schema: group.column(place) for place in range(group.num_columns)}
    chunk = next(chunk for path_in_schema, chunk in chunks.items() if path_in_schema.startswith(name))
    return (chunk.dictionary_page_offset or chunk.data_page_offset) + chunk.total_compressed_size - 1


@pytest.mark.parametrize("place", ["request_id", "candidates.post_ids", "context_id", "history.actions", "footer"])
def test_a_damaged_part_is_left_out_and_named(place: str, served: Path) -> None:
    path = served / "date=2026-06-01/a.parquet"
    data = bytearray(path.read_bytes())
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    data[footer if place == "footer" else end_of_column(path, place)] ^= 0xFF
    path.write_bytes(data)
    log, counts = joined(served, [event(7, 0, "favorite")])
    assert (counts.parts, counts.rankings, counts.cut_parts) == (1, RANKINGS - 6, [str(path)])
    assert taken(log, "favorite") == [701]


def test_a_log_without_a_part_that_joins_says_why(served: Path) -> None:
    events = write_events(served.with_name("events.parquet"), [event(1, 0, "favorite")])
    parts = sorted(served.glob("*/*.parquet"))

    def said() -> str:
        told = call("join", served, "--events", events, "--out", served.with_name("log"))
        assert (told.exit_code, told.stderr.count("\n")) == (1, 1), told.stderr
        return told.stderr

    for path in parts:
        path.write_bytes(path.read_bytes()[:-100])
    assert f"holds no rankings: 2 files are left out, they cannot be read: {parts[0]}, {parts[1]}" in said()
    for path in parts:
        path.unlink()
    assert "holds no rankings: its parts are files date=YYYY-MM-DD/NAME.parquet" in said()


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_a_part_that_goes_while_it_is_joined_joins_nothing(change: str, served: Path) -> None:
    path = served / "date=2026-06-01/a.parquet"
    rows, events = [*read_part(path)], [event(1, 0, "favorite"), event(7, 0, "favorite")]

    def disturb(what: str, done: int, total: int) -> None:
        if what != "Writing impressions" or len([*read_part(path)] if path.exists() else []) < 6:
            return
        path.unlink()
        if change == "replaced":
            write_part(served, "new", rows[1:]).rename(path)

    left = [row.request_id for row in rows[1:]] if change == "replaced" else []
    source, out = write_events(served.with_name("events.parquet"), events), served.with_name("log")
    counts = join(served, source, out, JoinSettings(until_ts=UNTIL), disturb)
    log = read_log(out)
    assert counts.joined_rankings == 6 + len(left)
    assert taken(log, "favorite") == ([101] if left else []) + [701]


@pytest.mark.slow
def test_users_are_forgotten_before_a_join_or_after_it(served: Path) -> None:
    command = [sys.executable, "-m", "weights", "served", "forget", str(served), "--user", "1001"]
    others, said = list[subprocess.Popen[str]](), list[str]()

    def forget(what: str, done: int, total: int) -> None:
        if done and not others:
            others.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
            assert others[0].stdout is not None
            said.append(others[0].stdout.readline())

    source = write_events(served.with_name("events.parquet"), [event(1, 0, "favorite")])
    join(served, source, served.with_name("log"), JoinSettings(until_ts=UNTIL), forget)
    assert "is in use by a join" in said[0]
    assert "2 rankings removed" in others[0].communicate()[0]
    assert taken(read_log(served.with_name("log")), "favorite") == [101]


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [0, 16, 128, 300])
def test_a_full_disk_is_one_sentence_and_blames_no_part(kilobytes: int, served: Path) -> None:
    write_part(served, "more", [ranking(number, T0 + number, candidates=500) for number in range(20, 60)])
    source = write_events(served.with_name("events.parquet"), [event(1, 0, "favorite")])
    program = ["bash", "-c", f'ulimit -f {kilobytes}; exec "$0" "$@"', sys.executable, "-m", "weights"]
    command = [*program, "join", served, "--events", source, "--out", served.with_name("log"), "--until", str(UNTIL)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    said = [line for line in ended.stderr.splitlines() if not line.startswith(("Reading", "Joining", "Writing"))]
    assert (ended.returncode, len(said)) == (1, 1), ended.stderr
    assert f"the join cannot write to {served.parent}: make room there" in said[0]
    assert sorted(path.name for path in served.parent.iterdir()) == ["events.parquet", "served"]


def test_two_models_join_if_their_actions_are_the_same(served: Path) -> None:
    write_part(served, "next", [ranking(50, model_version="2", model_digest="cd" * 32)])
    _, counts = joined(served, [event(1, 0, "favorite")])
    assert counts.models == {"demo 1": RANKINGS, "demo 2": 1}
    for name, model in (("by version", "2"), ("by digest", "cdcd")):
        _, counts = joined(served, [event(50, 0, "favorite")], name, model=model)
        assert (counts.joined_rankings, counts.other_model_rankings) == (1, RANKINGS)
    with pytest.raises(TableError, match="holds no rankings of model 3"):
        joined(served, [event(50, 0, "favorite")], "none", model="3")
    rows = [ranking(60, action_names=("favorite", "reply", "block"), model_version="3", model_digest="ef" * 32)]
    write_part(served, "third", rows)
    with pytest.raises(TableError, match=r"third\.parquet, row 1: the actions of demo 3 are not those .*--model"):
        joined(served, [event(1, 0, "favorite")], "mixed")


def test_rankings_of_models_with_other_actions_can_be_left_out(served: Path) -> None:
    names = ("like", *ACTIONS[1:])
    write_part(served, "old", [structs.replace(ranking(50), action_names=names, model_version="0")])
    with pytest.raises(TableError, match="choose one with --model"):
        joined(served, [event(1, 0, "favorite")])
    _, counts = joined(served, [event(1, 0, "favorite")], actions=ACTIONS)
    assert (counts.joined_rankings, counts.other_model_rankings) == (RANKINGS, 1)
    with pytest.raises(TableError, match="holds no rankings of a model with the actions of the one that serves"):
        joined(served, [event(1, 0, "favorite")], "none", actions=("zap",))


def test_the_command_says_what_joined_and_what_it_wrote(served: Path) -> None:
    events = write_events(
        served.with_name("events.parquet"), [event(1, 0, "favorite", T0 + 2 * DAY), event(1, 1, "reply")]
    )
    out = served.with_name("log")
    told = call("join", served, "--events", events, "--out", out, "--until", T0 + 3 * DAY)
    assert told.exit_code == 0, told.output
    assert told.stdout.splitlines() == [
        "2 parts, 12 rankings: 12 joined",
        "2 events: 1 joined",
        "  left out: 1, after the window",
        "absence means no: favorite, reply; of the others it is unknown",
        f"{out} holds 48 impressions with 11 contexts as served",
    ]
    again = call("join", served, "--events", events, "--out", out)
    assert (again.exit_code, again.stderr) == (1, f"{out} is there already: choose another place\n")
    assert "as served for 12 requests" in call("log", out, "--until", "all").stdout
    wrong = call("join", served, "--events", events, "--out", served.with_name("x"), "--window", "soon")
    assert wrong.stderr == "--window soon is not a length of time such as 30m, 24h or 7d.\n"


def killed_at(command: Sequence[object], directory: Path, count: int) -> bool:
    """Run a command, and kill it when it has made so many files and directories below `directory`. Whether it was killed."""

    def entries() -> set[str]:
        return {f"{folder}/{name}" for folder, inner, names in os.walk(directory) for name in (*inner, *names)}

    before = entries()
    with subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            if len(entries() - before) >= count:
                process.kill()
            time.sleep(0.002)
    return process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_killed_join_leaves_nothing_half(served: Path) -> None:
    """Killed each time that it has made another two files; then the whole join runs in the same place."""
    for part in range(40):
        write_part(served, f"more-{part}", [ranking(1000 + 20 * part + row) for row in range(20)])
    events = write_events(served.with_name("events.parquet"), [event(1000 + row, 0, "favorite") for row in range(800)])
    out = served.with_name("log")
    command = [sys.executable, "-m", "weights", "join", served, "--events", events, "--out", out, "--until", UNTIL]
    kills = 0
    while killed_at(command, served.parent, 1 + 2 * kills):
        visible = {path.name for path in served.parent.iterdir() if not path.name.startswith(".")}
        assert visible == {"events.parquet", "served"}
        kills += 1
    assert kills >= 4
    assert len(np.unique(read_log(out).request_id)) == RANKINGS + 800
    assert not [*served.parent.glob(".log.*")], "what killed runs left is gone"


def test_content_codes_reach_training_as_they_were_read(tmp_path: Path) -> None:
    rows = [ranking(number, T0 + number) for number in range(3)]
    for row in rows:
        random = np.random.default_rng(row.served_us % 100)
        row.candidates.codes = random.integers(0, 9, (4, 2))
        row.context.codes = random.integers(0, 9, (3, 2))
    write_part(tmp_path / "served", "a", rows)
    log, _ = joined(tmp_path / "served", [event(1, 0, "favorite")])
    config = replace(
        small_config(),
        actions=len(ACTIONS),
        product_surfaces=16,
        code_levels=2,
        code_values=9,
        post_age_granularity_minutes=60,
    )
    examples = Examples(log, config)
    for index, row in enumerate(rows):
        assert np.array_equal(examples.context(index).codes, row.context.codes)
        assert np.array_equal(examples.candidates(examples.rows(index)).codes, row.candidates.codes)
    mapped = read_log(tmp_path / "log", cache=tmp_path / "cache")
    assert np.array_equal(mapped.codes, log.codes)
    assert mapped.contexts is not None
    assert log.contexts is not None
    assert np.array_equal(mapped.contexts.codes, log.contexts.codes)


def test_unknown_authors_and_no_posts_join_as_served(tmp_path: Path) -> None:
    """An author of 0 is unknown, and a post of 0 is none: the service accepts both, as candidates and in histories."""
    row = ranking(1)
    row.candidates.author_ids[0], row.candidates.post_ids[2] = 0, 0
    row.context.author_ids[0], row.context.post_ids[1] = 0, 0
    only_padding = ranking(2)
    only_padding.candidates.post_ids[:] = 0
    write_part(tmp_path / "served", "a", [row, only_padding])
    log, counts = joined(tmp_path / "served", [event(1, 0, "favorite"), event(1, 2, "favorite", post_id=0)])
    assert log.post_id.tolist() == [101, 102, 104]
    assert (log.author_id == 0).tolist() == [True, False, False]
    assert (counts.candidates_without_post, counts.rankings_never_shown) == (5, 1)
    assert "5 posts were 0, which is no post: left out" in counts.lines()
    assert (counts.joined_events, counts.events_without_candidate) == (1, 1)
    assert log.contexts is not None
    assert np.array_equal(log.contexts.author_ids, row.context.author_ids)
    assert np.array_equal(log.contexts.post_ids, row.context.post_ids)
    mapped = read_log(tmp_path / "log", cache=tmp_path / "cache")
    assert np.array_equal(mapped.author_id, log.author_id)
    assert "  1 impressions of an unknown author (author 0)" in facts(log, 10)


def test_off_policy_leaves_out_rankings_with_a_post_of_0(tmp_path: Path) -> None:
    """Their places have a hole, so the probabilities of other orders are not known. They are left out, not the whole log refused."""
    halves = np.array([0.5, 0.5, 0.5, 1.0])
    rows = [ranking(number, propensities=halves, temperature=1.0) for number in range(3)]
    rows[1].candidates.post_ids[3] = 0
    write_part(tmp_path / "served", "a", rows)
    log, _ = joined(tmp_path / "served", [event(0, 0, "favorite"), event(1, 1, "favorite")])
    assert log.propensity is not None
    of_padded = log.post_id // 100 == 1
    assert (log.propensity[~of_padded].tolist(), log.propensity[of_padded].tolist()) == ([*halves, *halves], [0.0] * 3)
    save_checkpoint(
        tmp_path / "ranker", random_ranker(replace(small_config(), actions=len(ACTIONS), product_surfaces=16), 1), name="random",
        action_names=ACTIONS, continuous=(DWELL_TIME,), score_weights={"favorite": 1.0},
    )  # fmt: skip
    options = (
        "--checkpoint",
        tmp_path / "ranker",
        "--log",
        tmp_path / "log",
        "--temperature",
        "1",
        "--since",
        "2026-01-01",
    )
    told = call("off-policy", *options)
    assert told.exit_code == 0, told.output
    assert "left out: 1 rankings without propensities" in told.stdout
    assert "over 2 rankings" in told.stdout


def test_a_night_holds_what_was_served_after_the_one_before(served: Path) -> None:
    events = [event(number, 0, "favorite", T0 + number + 5) for number in range(RANKINGS)]
    log, counts = joined(served, events, "first", until_ts=T0 + 3600 + 5, window_seconds=3600)
    assert (counts.joined_rankings, counts.open_rankings) == (6, 6)
    log, counts = joined(served, events, "second", since_ts=T0 + 5, window_seconds=3600)
    assert (counts.joined_rankings, counts.earlier_rankings) == (6, 6)
    assert taken(log, "favorite") == [100 * number + 1 for number in range(6, RANKINGS)]
    assert counts.events == counts.joined_events + counts.events_of_left_out_rankings
    with pytest.raises(NothingJoins) as raised:
        joined(served, events, "third", since_ts=T0 + RANKINGS, window_seconds=3600)
    assert (raised.value.counts.earlier_rankings, raised.value.counts.joined_rankings) == (RANKINGS, 0)


def test_days_and_events_before_the_night_are_not_read(served: Path) -> None:
    write_part(served, "old", [ranking(90, T0 - 3 * DAY)], "2026-05-29")
    (served / "date=2026-05-29/old.parquet").write_bytes(b"no part at all")
    events = [event(90, 0, "favorite", T0 - 3 * DAY + 5), event(3, 0, "favorite", T0 + 3 + 5)]
    _, counts = joined(served, events, since_ts=T0, window_seconds=3600)
    assert (counts.parts, counts.cut_parts) == (2, [])
    assert (counts.events, counts.earlier_events, counts.joined_events) == (1, 1, 1)


def test_nights_with_different_labels_share_no_context(served: Path, tmp_path: Path) -> None:
    logs = [joined(served, [event(1, 0, "favorite")], name, label=name)[0] for name in ("one", "two")]
    first, second = (set(log.context_id.tolist()) for log in logs if log.context_id is not None)
    assert first.isdisjoint(second)
    assert len(first) == len(second) == RANKINGS - 1


def test_counts_tell_how_late_events_are(served: Path) -> None:
    events = [event(number, 0, "favorite", T0 + number + 100) for number in range(RANKINGS)]
    assert joined(served, events)[1].delay_seconds == [100, 100]


def test_an_event_counts_once_where_its_post_comes_twice(tmp_path: Path) -> None:
    row = ranking(1)
    row.candidates.post_ids[2] = row.candidates.post_ids[0]
    write_part(tmp_path / "served", "a", [row])
    log, counts = joined(tmp_path / "served", [event(1, 0, "favorite"), event(1, 1, "reply")])
    assert taken(log, "favorite") == [101, 101], "nobody knows which of them it was"
    assert (counts.events, counts.joined_events, counts.repeated_events) == (2, 2, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
def test_a_dwell_that_is_not_finite_is_none(served: Path, value: float) -> None:
    log, _ = joined(served, [event(1, 0, "dwell_time", value=value), event(1, 1, "dwell_time", value=7.0)])
    assert sorted(set(log.dwell_seconds.tolist())) == [0, 7]
