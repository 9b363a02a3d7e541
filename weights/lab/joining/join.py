"""Joins the log of what was served with events, out of core, into a log to train on. `weights.lab.training.log` reads the result."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import duckdb

from model.inputs import CLOCK_SKEW_SECONDS
from weights.errors import FULL
from weights.format.writer import written_beside
from weights.lab.joining.counts import JoinCounts, NothingJoins
from weights.lab.joining.reading import LostPart, number_of, read_events, read_parts
from weights.lab.joining.writing import write_contexts, write_impressions
from weights.lab.training.log import date_of, time_words
from weights.progress import Update
from weights.served import hold
from weights.tables import TableError
from weights.text_ids import IdKind
from weights.values import DAY_SECONDS

SHOWN = "shown"
"""The action of an event that says that a candidate was seen."""
DWELL = ("dwell_time", "dwell_seconds", "dwell")
"""The actions of events whose `value` is how long a user looked at a post, in seconds."""
COUNTS_NAME = "join.json"
WAITING = "Waiting for `served forget`"
OF_THE_DISK = (duckdb.IOException, duckdb.TransactionException, duckdb.FatalException, duckdb.OutOfMemoryException)
NEVER = -(2**62)
"""A time before all others, in Unix seconds."""
DELAYS = """
SELECT coalesce(approx_quantile(event_ts - served_ts, 0.05), 0), coalesce(approx_quantile(event_ts - served_ts, 0.5), 0)
FROM reasons
WHERE action_index >= 0 AND reason IN ('joined', 'before', 'after')
"""

STATES = """
CREATE TABLE states AS
SELECT ranking, CASE
    WHEN served_ts <= $since THEN 'earlier'
    WHEN served_ts > getvariable('latest_ts') THEN 'future'
    WHEN copies > 1 AND (first_us <> last_us OR users > 1) THEN 'ambiguous'
    WHEN ranking > first_ranking THEN 'repeated'
    WHEN NOT told THEN 'without history'
    WHEN served_ts + $window > $until THEN 'open'
    ELSE 'joined' END AS state
FROM (
    SELECT ranking, served_ts,
        count(*) OVER name AS copies, min(served_us) OVER name AS first_us, max(served_us) OVER name AS last_us,
        count(DISTINCT user_id) OVER name AS users, min(ranking) OVER name AS first_ranking,
        coalesce(bool_or(has_history) OVER earlier, false) AS told
    FROM rankings
    WINDOW name AS (PARTITION BY request_id),
        earlier AS (PARTITION BY part, context_id ORDER BY ranking ROWS UNBOUNDED PRECEDING)
)
"""
EVENTS_REACH = """
SELECT coalesce(max(first_ts), 0)
FROM (
    SELECT request_id, min(served_ts) AS first_ts FROM rankings WHERE served_ts <= getvariable('latest_ts') GROUP BY request_id
) SEMI JOIN events USING (request_id)
"""
"""The newest ranking that an event names and that was not served in the future, 0 for none: no clock of an event has a say in it."""
OLDEST = "SELECT coalesce(min(served_ts), 0) FROM rankings WHERE served_ts <= getvariable('latest_ts')"
NEWEST = "SELECT coalesce(max(served_ts), 0) FROM rankings WHERE served_ts <= getvariable('latest_ts')"
WITHOUT_POST = "SELECT count(*) FROM candidates JOIN states USING (ranking) WHERE post_id = 0 AND state = 'joined'"
FORGET_PROPENSITIES = """
UPDATE candidates SET propensity = 0
WHERE ranking IN (SELECT ranking FROM candidates WHERE post_id = 0)
"""
"""0 is unknown: without a post that was ranked, the others' probabilities are not those of their order."""
BY_NAME = """
CREATE TABLE by_name AS
SELECT request_id, any_value(ranking) AS ranking, any_value(served_ts) AS served_ts, max(state) AS state
FROM rankings JOIN states USING (ranking)
WHERE state <> 'repeated'
GROUP BY request_id
"""
DISTINCT_EVENTS = """
CREATE TABLE distinct_events AS
SELECT *, count(*) AS copies FROM events GROUP BY ALL
"""
NAMED = """
CREATE TABLE named AS
SELECT event.*, by_name.ranking, by_name.served_ts, by_name.state, names.action_index, names.is_dwell
FROM distinct_events event LEFT JOIN by_name USING (request_id) LEFT JOIN names USING (action)
"""
MATCHED = """
CREATE TABLE matched AS
SELECT named.*, candidate.place, candidate.is_returned, coalesce(candidate.is_first, true) AS is_first
FROM named LEFT JOIN candidates candidate ON candidate.ranking = named.ranking AND candidate.post_id = named.post_id
"""
SEEN = """
CREATE TABLE seen AS
SELECT ranking, place, min(event_ts) AS seen_ts
FROM matched
WHERE action = $shown AND state = 'joined' AND place IS NOT NULL AND event_ts BETWEEN served_ts - $skew AND served_ts + $window
GROUP BY ranking, place
"""
REASONS = """
CREATE TABLE reasons AS
SELECT matched.* EXCLUDE (state), CASE
    WHEN matched.ranking IS NULL THEN 'without ranking'
    WHEN state <> 'joined' THEN 'left out'
    WHEN action_index IS NULL THEN 'unknown action'
    WHEN matched.place IS NULL THEN 'without candidate'
    WHEN event_ts < served_ts - $skew THEN 'before'
    WHEN event_ts > coalesce(seen_ts, served_ts) + $window THEN 'after'
    WHEN CASE WHEN getvariable('has_shown') THEN seen_ts IS NULL ELSE NOT is_returned END THEN 'unseen'
    WHEN seen_ts + $window > $until THEN 'seen late'
    ELSE 'joined' END AS reason
FROM matched LEFT JOIN seen ON seen.ranking = matched.ranking AND seen.place = matched.place
"""
SHOWN_BY_EVENTS = """
CREATE TABLE shown AS
SELECT candidates.* EXCLUDE (is_returned, is_first)
FROM candidates JOIN seen USING (ranking, place) WHERE seen_ts + $window <= $until
"""
SHOWN_BY_REPLIES = """
CREATE TABLE shown AS
SELECT candidates.* EXCLUDE (is_returned, is_first)
FROM candidates JOIN states USING (ranking)
WHERE state = 'joined' AND is_returned
"""
LATE = """
SELECT coalesce(sum(least(count, more)), 0)
FROM (
    SELECT part, count(*) AS count
    FROM (
        SELECT part, served_ts, row_number() OVER (
            PARTITION BY request_id, served_us, user_id ORDER BY part IN (SELECT part FROM late_parts), ranking
        ) AS copy
        FROM rankings
    )
    WHERE copy = 1 AND served_ts <= ?
    GROUP BY part
) JOIN late_parts USING (part)
"""
"""The rankings that are done in parts that hold `more` than was read of them, without those of other parts again."""
LABELS = """
CREATE TABLE labels AS
SELECT ranking, place, {words}, max(value) FILTER (is_dwell AND value > 0) AS dwell_seconds
FROM reasons
WHERE reason = 'joined'
GROUP BY ranking, place
"""
WORD = """
bit_or(1::UBIGINT << (greatest(action_index, 0) % 64)::UBIGINT)
    FILTER (action_index // 64 = {word} AND action_index >= 0) AS taken_{word}
"""
"""64 actions of a row as the bits of a number: DuckDB can move it to the disk, where it cannot move lists."""


def first_day_ts(since_ts: int, window_seconds: int) -> int:
    """When the first UTC day begins whose parts are read for rankings that were served after `since_ts`, Unix seconds."""
    return (since_ts - window_seconds) // DAY_SECONDS * DAY_SECONDS


def latest_ts() -> int:
    """The latest time that is not in the future, Unix seconds: now by the clock of this machine, and five minutes, as clocks differ."""
    return int(time.time()) + CLOCK_SKEW_SECONDS


@dataclass(frozen=True, slots=True)
class JoinSettings:
    """`window_seconds`: how long after it was shown an event still counts. `observed`: the actions whose absence means no; None: those
    that some event has. `until_ts`: events are whole up to here, Unix seconds; None: up to the newest ranking that one of them names.
    `model`: whose rankings are joined, a version or the beginning of a digest; empty: all, if their actions are the same. `actions`: only
    rankings of models with these actions, in this order, are joined, the others are counted; empty: any. `memory`: of DuckDB, such as
    `2GB`. `since_ts`: only rankings served after this, Unix seconds; None: all. `read_before`: the `done_parts` of the join up to
    `since_ts`, by which late parts are known; None: none is told. `label`: a word that goes into the numbers of the contexts, so that
    results with different labels can be read as one log."""

    window_seconds: int = DAY_SECONDS
    observed: tuple[str, ...] | None = None
    ids: IdKind = "uint64"
    until_ts: int | None = None
    model: str = ""
    actions: tuple[str, ...] = ()
    memory: str = "2GB"
    since_ts: int | None = None
    read_before: Mapping[str, int] | None = None
    label: str = ""

    @property
    def first_ts(self) -> int | None:
        """Rankings from here on are read: those of a window before `since_ts` have events among those that are read. None: all."""
        return None if self.since_ts is None else self.since_ts - self.window_seconds


def join(
    served: Path,
    events: Path | str,
    out: Path,
    settings: JoinSettings,
    progress: Update = lambda what, done, total: None,
) -> JoinCounts:
    """Write to the directory `out` the log of the candidates that were shown, with what users did, the context as served, the position and
    the propensity. `out` is there whole or not at all. Return the counts, which are also in `out/join.json`.

    A candidate was shown if an event `shown` says so; where no event in all says so, if the reply held it. One that was shown so late that
    its own window is not over is left out, and so is a post of 0, which is none; the propensities of its ranking are then 0, which
    is unknown. Rankings that were served after `latest_ts()` are left out. The time of a ranking is its `impression_ts`; where it has none,
    or one of more than five minutes after it was served, it is when it was served.

    Raises TableError, in one sentence that names the file and the row, for an `until_ts` after `latest_ts()`, and if something is at `out`;
    NothingJoins where nothing joins; FileExistsError if another process writes `out` meanwhile.
    """
    if out.exists() or out.is_symlink():
        raise TableError(f"{out} is there already: choose another place")
    if not served.is_dir():
        raise TableError(f"{served} is not a directory: it must be a log of what was served")
    if settings.until_ts is not None and settings.until_ts > latest_ts():
        raise TableError(
            f"--until {time_words(settings.until_ts)} is in the future by the clock of this machine: give a time that is over"
        )
    with written_beside(out) as partial, hold(served, lambda: progress(WAITING, 0, 1), alone=False):
        try:
            return _join_into(partial, served, events, settings, progress, is_thorough=False)
        except LostPart:  # the parts that are left are joined
            for directory in partial.iterdir():
                shutil.rmtree(directory)
            return _join_into(partial, served, events, settings, progress, is_thorough=True)


def _join_into(
    partial: Path,
    served: Path,
    events: Path | str,
    settings: JoinSettings,
    progress: Update,
    *,
    is_thorough: bool,
) -> JoinCounts:
    """Fill a directory as `join` says. Raises TableError, and LostPart where it may be done again."""
    counts, work = JoinCounts(), partial / "work"
    work.mkdir()
    with _enough(settings.memory, partial.parent):
        with _database(work, settings) as database:
            parts, names = read_parts(
                database,
                served,
                settings.model,
                settings.actions,
                settings.first_ts,
                counts,
                progress,
                is_thorough=is_thorough,
            )
            read_events(database, events, settings.ids, settings.since_ts, counts, progress)
            _join(database, names, settings, counts, progress)
            _count_parts(database, [str(part.path.relative_to(served)) for part in parts], settings, counts)
            if not counts.joined_rankings:
                raise NothingJoins(f"nothing joins: {'; '.join(line.strip() for line in counts.lines())}", counts)
            observed = [name in counts.observed for name in names]
            counts.impressions = write_impressions(
                database, partial, names, observed, settings.ids, settings.label, progress
            )
            counts.contexts = write_contexts(database, partial, parts, names, settings.label, progress)
        shutil.rmtree(work)
        (partial / COUNTS_NAME).write_text(json.dumps(counts.as_json(), indent=1) + "\n")
    return counts


def _database(work: Path, settings: JoinSettings) -> duckdb.DuckDBPyConnection:
    """A database on disk that spills what does not fit. Raises TableError for an amount of memory that is none."""
    database = duckdb.connect(work / "join.duckdb")
    database.execute(f"SET temp_directory = '{str(work / 'spilled').replace(chr(39), chr(39) * 2)}'")
    database.execute("SET threads = 1")
    database.execute("SET preserve_insertion_order = false")
    database.execute("SET enable_progress_bar = false")
    try:
        database.execute(f"SET memory_limit = '{settings.memory.replace(chr(39), '')}'")
    except duckdb.Error as error:
        raise TableError(f"--memory {settings.memory} is not an amount of memory such as 2GB") from error
    return database


@contextmanager
def _enough(memory: str, place: Path) -> Iterator[None]:
    """Turn a lack of memory, or of space on the disk of this place, into a TableError."""
    try:
        yield
    except (duckdb.Error, OSError) as error:
        text = str(error).partition("\n")[0]
        if isinstance(error, OSError) and error.errno not in FULL:
            raise
        if isinstance(error, duckdb.OutOfMemoryException) and "max_temp_directory_size" not in str(error):
            raise TableError(f"--memory {memory} is too little for the join: give more") from error
        if isinstance(error, (OSError, *OF_THE_DISK)):
            raise TableError(f"the join cannot write to {place}: make room there ({text})") from error
        raise


def _join(
    database: duckdb.DuckDBPyConnection,
    names: tuple[str, ...],
    settings: JoinSettings,
    counts: JoinCounts,
    progress: Update,
) -> None:
    """Make the tables `shown` and `labels`, and count. Raises TableError."""
    database.execute("SET VARIABLE latest_ts = ?", [latest_ts()])
    since_ts, window = settings.since_ts, settings.window_seconds
    reached_before = number_of(database, OLDEST) if since_ts is None else since_ts + window
    counts.events_reach_ts = max(reached_before, number_of(database, EVENTS_REACH))
    counts.until_ts = settings.until_ts if settings.until_ts is not None else counts.events_reach_ts
    _name_actions(database, names)
    steps = _steps(settings, counts, len(names))
    for done, (statement, values) in enumerate(steps):
        progress("Joining", done, len(steps))
        database.execute(statement, values)
        if statement is STATES:
            counts.candidates_without_post = number_of(database, WITHOUT_POST)
            database.execute(FORGET_PROPENSITIES)
            database.execute("DELETE FROM candidates WHERE post_id = 0")
        if statement is SEEN:
            _make_shown(database, settings.window_seconds, counts)
    counts.observed = _observed(database, names, settings)
    _count(database, settings.window_seconds, counts)


def _steps(settings: JoinSettings, counts: JoinCounts, actions: int) -> list[tuple[str, dict[str, int | str]]]:
    window = {"window": settings.window_seconds}
    skew: dict[str, int | str] = {**window, "skew": CLOCK_SKEW_SECONDS}
    labels = LABELS.format(words=", ".join(WORD.format(word=word) for word in range(-(-actions // 64))))
    return [
        (
            STATES,
            {**window, "until": counts.until_ts, "since": NEVER if settings.since_ts is None else settings.since_ts},
        ),
        (BY_NAME, {}),
        (DISTINCT_EVENTS, {}),
        (NAMED, {}),
        (MATCHED, {}),
        (SEEN, {**skew, "shown": SHOWN}),
        (REASONS, {**skew, "until": counts.until_ts}),
        (labels, {}),
    ]


def _name_actions(database: duckdb.DuckDBPyConnection, names: tuple[str, ...]) -> None:
    """The actions of events: their place among the model's, -1 for `shown` and for dwells that are no action of the model."""
    database.execute("CREATE TABLE names (action VARCHAR, action_index BIGINT, is_dwell BOOLEAN)")
    index = dict.fromkeys((SHOWN, *DWELL), -1) | {name: place for place, name in enumerate(names)}
    database.executemany(
        "INSERT INTO names VALUES (?, ?, ?)", [[name, place, name in DWELL] for name, place in index.items()]
    )


def _make_shown(database: duckdb.DuckDBPyConnection, window_seconds: int, counts: JoinCounts) -> None:
    """The candidates that were shown, and whether events say so."""
    database.execute("SET VARIABLE has_shown = (SELECT count(*) > 0 FROM events WHERE action = ?)", [SHOWN])
    has_shown = number_of(database, "SELECT CAST(getvariable('has_shown') AS BIGINT)")
    if has_shown:
        database.execute(SHOWN_BY_EVENTS, {"window": window_seconds, "until": counts.until_ts})
        counts.candidates_seen_late = number_of(
            database, "SELECT (SELECT count(*) FROM seen) - (SELECT count(*) FROM shown)"
        )
    else:
        database.execute(SHOWN_BY_REPLIES)


def _count_parts(
    database: duckdb.DuckDBPyConnection, names: Sequence[str], settings: JoinSettings, counts: JoinCounts
) -> None:
    """Count the rankings of late parts, and keep the names of the parts that the next night reads again. `names`: of the parts by their
    numbers."""
    rows, before = counts.done_parts or {}, settings.read_before
    if before is not None and settings.since_ts is not None:
        more = [[part, rows[name] - before.get(name, 0)] for part, name in enumerate(names)]
        if late := [one for one in more if one[1] > 0]:
            database.execute("CREATE TABLE late_parts (part BIGINT, more BIGINT)")
            database.executemany("INSERT INTO late_parts VALUES (?, ?)", late)
            ((counts.late_rankings,),) = database.execute(LATE, [settings.since_ts]).fetchall()
    first_day = f"date={date_of(counts.done_from_ts)}"
    counts.done_parts = {name: count for name, count in rows.items() if name.partition("/")[0] >= first_day}


def _observed(database: duckdb.DuckDBPyConnection, names: tuple[str, ...], settings: JoinSettings) -> list[str]:
    """The actions whose absence means no. Raises TableError for one that the model does not have."""
    if settings.observed is not None:
        if unknown := [name for name in settings.observed if name not in names]:
            raise TableError(f"--observed {unknown[0]}: the model has no such action; it has {', '.join(names)}")
        return [*settings.observed]
    met = {name for (name,) in database.execute("SELECT DISTINCT action FROM events").fetchall()}
    return [name for name in names if name in met]


def _count(database: duckdb.DuckDBPyConnection, window_seconds: int, counts: JoinCounts) -> None:
    states = dict(database.execute("SELECT state, count(*) FROM states GROUP BY state").fetchall())
    counts.open_rankings = states.get("open", 0)
    counts.earlier_rankings = states.get("earlier", 0)
    counts.future_rankings = states.get("future", 0)
    through_ts = counts.until_ts - window_seconds
    counts.done_from_ts = first_day_ts(through_ts, window_seconds)
    done = "SELECT count(*) FROM rankings WHERE served_ts BETWEEN ? AND ?"
    ((counts.done_rankings,),) = database.execute(done, [counts.done_from_ts, through_ts]).fetchall()
    counts.newest_ranking_ts = number_of(database, NEWEST)
    counts.delay_seconds = [float(seconds) for seconds in database.execute(DELAYS).fetchall()[0]]
    counts.repeated_rankings = states.get("repeated", 0)
    counts.ambiguous_rankings = states.get("ambiguous", 0)
    counts.rankings_without_history = states.get("without history", 0)
    counts.joined_rankings = number_of(database, "SELECT count(DISTINCT ranking) FROM shown")
    dated_ahead = "SELECT count(*) FROM rankings WHERE is_ahead AND ranking IN (SELECT ranking FROM shown)"
    counts.rankings_dated_ahead = number_of(database, dated_ahead)
    seen_late = "SELECT count(DISTINCT ranking) FROM seen ANTI JOIN shown USING (ranking)"
    counts.rankings_seen_late = number_of(database, seen_late)
    counts.rankings_never_shown = states.get("joined", 0) - counts.joined_rankings - counts.rankings_seen_late
    reasons = dict(database.execute("SELECT reason, count(*) FROM reasons WHERE is_first GROUP BY reason").fetchall())
    counts.repeated_events = counts.events - sum(reasons.values())
    counts.joined_events = reasons.get("joined", 0)
    counts.events_without_ranking = reasons.get("without ranking", 0)
    counts.events_of_left_out_rankings = reasons.get("left out", 0)
    counts.events_without_candidate = reasons.get("without candidate", 0)
    counts.events_before_ranking = reasons.get("before", 0)
    counts.events_after_window = reasons.get("after", 0)
    counts.events_of_unseen_candidates = reasons.get("unseen", 0)
    counts.events_of_candidates_seen_late = reasons.get("seen late", 0)
    unknown = "SELECT action, count(*) FROM reasons WHERE is_first AND reason = 'unknown action' GROUP BY action"
    counts.events_of_unknown_actions = dict(database.execute(unknown).fetchall())
