"""One request as the model sees it: ids and features in numpy, before hashing. Neither JSON nor tensors on a device.

Treat these values as immutable. They are not `frozen`: every request makes some, and frozen ones take several times as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.config import ModelConfig

Ids = NDArray[np.uint64]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
NO_IDS = np.zeros(0, np.uint64)
NO_CODES = np.zeros((0, 0), np.int64)
CLOCK_SKEW_SECONDS = 300  # how far ahead of the impression a post may seem to be created
FEW = 64  # up to this many numbers, Python compares faster than numpy


def _no_codes() -> Int64s:
    return NO_CODES


@dataclass(slots=True, eq=False)
class Context:
    """A user and that user's history, oldest first, at most `history_length` items.

    `post_ids, author_ids`: uint64 `[h]`. `actions`: float32 `[h, A]`, the action values, 1 where set.
    `surfaces`: int64 `[h]`. `dwell_seconds`: float32 `[h]`, 0 where unknown.
    A user id or post id of 0 is padding: that token influences nothing, but keeps its place in the sequence.
    `is_kept`: whether the context cache may keep it; False if it will not be asked for again. `dropped`: how many older items
    did not fit. `codes`: int64 `[h, Q]`, the content codes, 0 for none; `[h, 0]` if no item has any.
    """

    user_id: int
    post_ids: Ids
    author_ids: Ids
    actions: Float32s
    surfaces: Int64s
    dwell_seconds: Float32s
    is_kept: bool = True
    dropped: int = 0
    codes: Int64s = field(default_factory=_no_codes)

    def __post_init__(self) -> None:
        if self.codes is NO_CODES and len(self.post_ids):
            self.codes = np.zeros((len(self.post_ids), 0), np.int64)

    def __len__(self) -> int:
        return len(self.post_ids)

    def check(self, config: ModelConfig) -> None:
        """Raise ValueError for columns of different lengths, a history longer than the model's, and numbers outside its tables. Engines do
        not check these."""
        events = len(self.post_ids)
        lengths = {len(column) for column in (self.author_ids, self.surfaces, self.dwell_seconds, self.codes)}
        if lengths != {events} or self.actions.shape != (events, config.actions):
            raise ValueError("a context with columns of different lengths")
        if events > config.history_length or not _are_rows(self.surfaces, config.product_surfaces):
            raise ValueError("a context beyond the model's history or surfaces")
        _check_codes(self.codes, config)
        if not 0 <= self.user_id < 2**64 or not 0 <= self.dropped < 2**63:
            raise ValueError("a user id beyond 64 bits, or an invalid number of dropped items")

    def first(self, length: int) -> Context:
        """The same user with only the oldest `length` items, as views."""
        return self.rows(slice(length))

    def last(self, length: int) -> Context:
        """The same user with only the newest `length` items, or all if there are fewer, as views. The others count as dropped."""
        older = max(0, len(self) - length)
        return self.rows(slice(older, None), self.dropped + older)

    def rows(self, rows: slice | Int64s, dropped: int = 0) -> Context:
        """The same user with these items, in this order."""
        return Context(
            self.user_id,
            self.post_ids[rows],
            self.author_ids[rows],
            self.actions[rows],
            self.surfaces[rows],
            self.dwell_seconds[rows],
            dropped=dropped,
            codes=self.codes[rows],
        )

    def events(self, config: ModelConfig) -> tuple[bytes, ...]:
        """The exact bytes of every column of the history that this checkpoint can see, oldest first. Equal bytes give equal tokens."""
        posts, authors, actions = self.post_ids.tobytes(), self.author_ids.tobytes(), self.actions.tobytes()
        dwell = (self.dwell_seconds.tobytes(),) if config.has_dwell else ()
        codes = (codes_as_read(self.codes, config).tobytes(),) if config.code_levels else ()
        return posts, authors, actions, self.surfaces.tobytes(), *dwell, *codes

    @classmethod
    def of_events(cls, user_id: int, events: tuple[bytes, ...], config: ModelConfig, dropped: int = 0) -> Context:
        """The context that has these `events`, as views of them. Columns that the checkpoint does not see are 0."""
        posts, authors, actions, surfaces, *further = events
        codes = further.pop() if config.code_levels else b""
        length = len(posts) // 8
        return cls(
            user_id,
            np.frombuffer(posts, np.uint64),
            np.frombuffer(authors, np.uint64),
            np.frombuffer(actions, np.float32).reshape(length, config.actions),
            np.frombuffer(surfaces, np.int64),
            np.frombuffer(further[0], np.float32) if further else np.zeros(length, np.float32),
            dropped=dropped,
            codes=np.frombuffer(codes, np.int64).reshape(length, config.code_levels),
        )


@dataclass(slots=True, eq=False)
class Candidates:
    """The posts to score. `post_ids, author_ids`: uint64 `[C]`; `surfaces`, `age_buckets`: int64 `[C]`; see `age_bucket`.

    `first_slot` is the place of the first one in the request's list; it matters in sequential position mode only. `codes`: as in
    `Context`, `[C, Q]` or `[C, 0]`.
    """

    post_ids: Ids
    author_ids: Ids
    surfaces: Int64s
    age_buckets: Int64s
    first_slot: int = 0
    codes: Int64s = field(default_factory=_no_codes)

    def __post_init__(self) -> None:
        """Raise ValueError for columns of unequal length or not 64 bits wide: engines join the columns of many requests as bytes."""
        if self.codes is NO_CODES and len(self.post_ids):
            self.codes = np.zeros((len(self.post_ids), 0), np.int64)
        posts, authors = self.post_ids.nbytes, self.author_ids.nbytes
        surfaces, ages = self.surfaces.nbytes, self.age_buckets.nbytes
        is_aligned = len(self.codes) == len(self.post_ids) and self.codes.itemsize == 8
        if not is_aligned or not 8 * len(self.post_ids) == posts == authors == surfaces == ages:
            raise ValueError("the columns of candidates must be equally long and 64 bits wide")

    def __len__(self) -> int:
        return len(self.post_ids)

    def check(self, config: ModelConfig) -> None:
        """Raise ValueError for surfaces and age buckets outside the model's tables, and slots beyond int32. Engines do not check these."""
        surfaces, ages = config.product_surfaces, config.post_age_buckets
        if not _are_rows(self.surfaces, surfaces) or not _are_rows(self.age_buckets, ages):
            raise ValueError("candidates beyond the model's surfaces or ages")
        _check_codes(self.codes, config)
        if not 0 <= self.first_slot < 2**31:
            raise ValueError("candidates beyond the model's slots")

    def rows(self, places: Int64s) -> Candidates:
        """The candidates at these places, as a new list. Their original slots are lost."""
        return Candidates(
            self.post_ids[places],
            self.author_ids[places],
            self.surfaces[places],
            self.age_buckets[places],
            codes=self.codes[places],
        )

    def chunk(self, start: int, stop: int) -> Candidates:
        """Candidates `start … stop - 1`, as views, remembering their slots."""
        cut = slice(start, stop)
        return Candidates(
            self.post_ids[cut],
            self.author_ids[cut],
            self.surfaces[cut],
            self.age_buckets[cut],
            self.first_slot + start,
            self.codes[cut],
        )


NO_CANDIDATES = Candidates(NO_IDS, NO_IDS, np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclass(slots=True, eq=False)
class Scores:
    """`logits` float32 `[C, A]`; `probabilities` float32 `[C, A]`, their sigmoid; `continuous` float32 `[C, Z]`, in 0 … 1.

    Z is 0 for a checkpoint without a continuous head. `finite`: an engine has already checked that every number is finite.
    """

    logits: Float32s
    probabilities: Float32s
    continuous: Float32s
    finite: bool = field(default=False, kw_only=True)

    def __len__(self) -> int:
        return len(self.logits)

    def rows(self, places: slice | Int64s) -> Scores:
        """The scores of some candidates."""
        return Scores(self.logits[places], self.probabilities[places], self.continuous[places])

    def is_finite(self) -> bool:
        """Whether all logits and continuous scores are finite, so that a caller may see them."""
        return self.finite or bool(np.isfinite(self.logits).all() and np.isfinite(self.continuous).all())

    @staticmethod
    def of_chunks(chunks: list[Scores]) -> Scores:
        """The chunks of one request, in order."""
        if len(chunks) == 1:
            return chunks[0]
        return Scores(
            np.concatenate([chunk.logits for chunk in chunks]),
            np.concatenate([chunk.probabilities for chunk in chunks]),
            np.concatenate([chunk.continuous for chunk in chunks]),
        )


def _are_rows(values: Int64s, count: int) -> bool:
    """Whether each is a row of a table with `count` rows. Read as unsigned, a negative number is large: one comparison is enough."""
    unsigned = values.view(np.uint64)
    if len(unsigned) > FEW:
        return int(np.maximum.reduce(unsigned)) < count
    return max(unsigned.tolist(), default=0) < count


def _check_codes(codes: Int64s, config: ModelConfig) -> None:
    """Raise ValueError for codes of another number of levels than the model's, and for codes beyond its table."""
    levels = codes.shape[-1]
    if codes.ndim != 2 or levels not in (0, config.code_levels):
        raise ValueError("codes of another number of levels than the model's")
    if levels and not _are_rows(codes.ravel(), config.code_values + 1):
        raise ValueError("codes beyond the model's table")


def codes_as_read(codes: Int64s, config: ModelConfig) -> Int64s:
    """Content codes as this model reads them, int64 `[n, Q]`: zeros for posts that come without codes."""
    if codes.shape[1] == config.code_levels:
        return codes
    return np.zeros((len(codes), config.code_levels), np.int64)


def token_codes(codes: Int64s, config: ModelConfig) -> Int64s:
    """All small integers that the tokens of these posts are made of, int64 `[n, L]`: content codes, and counts of the history. Where
    counts are missing, as for the events of a history, they are 0."""
    if codes.shape[1] == config.token_levels:
        return codes
    whole = np.zeros((len(codes), config.token_levels), np.int64)
    whole[:, : config.code_levels] = codes_as_read(codes, config)
    return whole


COUNT_EDGES = np.array([1, 2, 3, 4, 5, 6, 7, 9, 11, 14, 18, 23, 30, 40, 55])
"""Where the counts of a history begin that the model sees as 1, 2, … 15. Exact while they are small, then in steps of about a quarter."""


def history_counts(context: Context, candidates: Candidates, config: ModelConfig, seen: Int64s | None = None) -> Int64s:
    """How much of the history concerns each candidate, int64 `[C, 3 + Q]` in 0 … 15, see `COUNT_EDGES`: events of its author, events of
    its post, all events, and for each level events with its content code. A history is read through attention, which averages; averages
    do not tell three events from thirty.

    Padding is not counted, and nothing is of author, post or code 0. `seen` int64 `[C]`: of how many events, the oldest ones, a candidate
    knows; None: of all. A candidate's counts depend on no other candidate.
    """
    pairs: list[tuple[NDArray[Any], NDArray[Any]]] = [
        (candidates.author_ids, context.author_ids), (candidates.post_ids, context.post_ids),
        *zip(codes_as_read(candidates.codes, config).T, codes_as_read(context.codes, config).T, strict=True),
    ]  # fmt: skip
    present = context.post_ids != 0
    if seen is None:
        author, post, *codes = [_occurrences(values, np.sort(events[present])) for values, events in pairs]
        length = np.full(len(candidates), np.count_nonzero(present))
    else:
        known = present & (np.arange(len(context)) < seen[:, None])
        author, post, *codes = [
            ((values[:, None] == events) & (events != 0) & known).sum(1) for values, events in pairs
        ]
        length = known.sum(1)
    return COUNT_EDGES.searchsorted(np.stack((author, post, length, *codes), 1), side="right")


def _occurrences(values: NDArray[Any], ordered: NDArray[Any]) -> NDArray[np.intp]:
    """How often each value is in `ordered`, which is sorted; 0 for value 0."""
    found = ordered.searchsorted(values, side="right") - ordered.searchsorted(values, side="left")
    return np.where(values == 0, 0, found)


def counted(context: Context, candidates: Candidates, config: ModelConfig) -> Candidates:
    """The candidates with the counts of this history beside their content codes, `[C, L]`, if the model reads any; else as they are."""
    if not config.history_counts or candidates.codes.shape[1] == config.token_levels:
        return candidates
    counts = history_counts(context, candidates, config)
    return replace(candidates, codes=np.hstack((codes_as_read(candidates.codes, config), counts)))


def codes_fitting(codes: Int64s, count: int, config: ModelConfig) -> Int64s:
    """Codes of any origin, int64 `[count, q]`, or of any shape without elements for none, as codes of this model, `[count, Q]`.

    Missing levels have code 0. A post with a code in a level that the model lacks, or beyond its table, has no codes at all.
    """
    fitting = np.zeros((count, config.code_levels), np.int64)
    if codes.size and config.code_levels:
        levels = min(codes.shape[1], config.code_levels)
        fits = (codes <= config.code_values).all(1) & ~codes[:, levels:].any(1)
        fitting[fits, :levels] = codes[fits, :levels]
    return fitting


def age_bucket(impression_ts: int | Int64s, created_at: Int64s, config: ModelConfig) -> Int64s:
    """Row of the post-age table for posts created at the given Unix seconds. `impression_ts` is one time for all posts or one for each.

    A post that seems to come from the future, or has a time of 0, is of unknown age: row 0. That is the published rule, and checkpoints
    are trained with it, so no allowance is made here for clocks that differ; a filter by age makes one, see `created_within`.
    """
    seconds = impression_ts - created_at
    buckets: Int64s = seconds // (60 * config.post_age_granularity_minutes) + 1
    np.minimum(buckets, config.post_age_buckets - 1, out=buckets)
    np.maximum(buckets, 0, out=buckets)  # the future
    buckets[created_at == 0] = 0
    return buckets


def created_within(impression_ts: int, max_age_seconds: int) -> tuple[int, int]:
    """The first and the last Unix second at which a post may be created to be at most `max_age_seconds` old at `impression_ts`.

    A post cannot be seen before it is created, but clocks differ by minutes: up to `CLOCK_SKEW_SECONDS` ahead counts as age 0. What is
    further ahead, or has a time of 0, is of unknown age, and no age limit lets it pass.
    """
    return max(impression_ts - max_age_seconds, 1), impression_ts + CLOCK_SKEW_SECONDS
