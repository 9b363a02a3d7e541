"""What one retrieval asks for and gets, in numpy. Neither JSON nor tensors on a device.

Treat these values as immutable. Those that each request makes are not `frozen`, because that takes several times as long to make.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from model.bounds import MAX_CODE
from model.config import ModelConfig
from model.inputs import NO_CODES, Context, Float32s, Ids, Int64s

AT_LEAST = re.compile(r"[0-9]{1,20}(-[0-9]{1,20})?", re.ASCII)


class Mark(NamedTuple):
    """Which changes a corpus has had. `sequence`: how many in all. `digest`: hex, of all of them in order: equal for two corpora that
    began the same and have had the same changes. `position`: that of the last one in its feed, "" without a feed."""

    sequence: int = 0
    digest: str = ""
    position: str = ""

    def reaches(self, at_least: str) -> bool:
        """Whether the corpus has had `at_least` changes, or the one at `at_least` if that is a feed position: two numbers and a dash."""
        if "-" not in at_least:
            return self.sequence >= int(at_least or 0)
        return bool(self.position) and _numbers(self.position) >= _numbers(at_least)


UNCHANGED = Mark()


def _numbers(position: str) -> list[int]:
    return [int(part) for part in position.split("-")]


def rows_of_codes(posts: Sequence[Sequence[int]]) -> Int64s:
    """The content codes of posts as rows, int64 `[n, q]`: q is that of the post with the most, and the others get zeros."""
    levels = max(map(len, posts), default=0)
    if not levels:
        return NO_CODES
    return np.array([[*codes, *[0] * (levels - len(codes))] for codes in posts], np.int64)


def joined_codes(parts: Sequence[tuple[Int64s, int]]) -> Int64s:
    """Codes one after another, int64 `[n, q]`. Of each part its codes, perhaps `[0, 0]`, and its number of posts."""
    levels = max((codes.shape[1] for codes, _ in parts), default=0)
    joined = np.zeros((sum(count for _, count in parts), levels), np.int64)
    start = 0
    for codes, count in parts:
        if codes.size:
            joined[start : start + count, : codes.shape[1]] = codes
        start += count
    return joined if levels else NO_CODES


@dataclass(slots=True, eq=False)
class Filters:
    """What a request wants hidden. `exclude`: uint64 post ids. `topics`: any of these names; None for all, and a name that the
    corpus lacks matches nothing. `created_after`, `created_before`: Unix seconds, which `model.inputs.created_within` makes of an age
    limit; posts from before or after, or of an unknown time, are hidden."""

    exclude: Ids
    topics: tuple[str, ...] | None = None
    created_after: int | None = None
    created_before: int | None = None


@dataclass(slots=True, eq=False)
class Query:
    """One retrieval: the best `k` posts for a context that pass the filters and score `least` or more, from a corpus whose `Mark`
    reaches `at_least`. With a `handle`, the ranker has the context, which is empty here, and `excludes_history` says whether the
    filters should exclude its posts too."""

    context: Context
    k: int
    filters: Filters
    least: float = -np.inf
    at_least: str = ""
    handle: str = ""
    excludes_history: bool = False

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError for an invalid `k`, `least`, time or `at_least`, and for a context that the model cannot take."""
        if not self.handle:
            self.context.check(config)
        times = [t for t in (self.filters.created_after, self.filters.created_before) if t is not None]
        if self.at_least and not AT_LEAST.fullmatch(self.at_least):
            raise ValueError("at_least is neither a number of changes nor a feed position")
        if not 0 < self.k < 2**31 or np.isnan(self.least) or not all(-(2**63) <= t < 2**63 for t in times):
            raise ValueError("k, least or a time is out of range")


@dataclass(frozen=True, slots=True, eq=False)
class NewPosts:
    """Posts to add, which replace those with the same ids. Ids as in `Corpus`, each once; `created_at`: int64 `[n]`, 0
    where unknown; `topics`: a name or None for each; `vectors`: float32 `[n, D]`; `texts`, `codes`: as in `PostRows`."""

    post_ids: Ids
    author_ids: Ids
    created_at: Int64s
    topics: list[str | None]
    vectors: Float32s
    texts: list[tuple[str, str]] = field(default_factory=list)
    codes: Int64s = field(default_factory=lambda: NO_CODES)

    def __len__(self) -> int:
        return len(self.post_ids)

    @classmethod
    def joined(cls, parts: Sequence[NewPosts]) -> NewPosts:
        """The posts of all parts, one after the other; at least one part."""
        if len(parts) == 1:
            return parts[0]
        ids, authors, times, vectors = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("post_ids", "author_ids", "created_at", "vectors")
        )
        topics = [topic for part in parts for topic in part.topics]
        codes = joined_codes([(part.codes, len(part)) for part in parts])
        return cls(ids, authors, times, topics, vectors, [texts for part in parts for texts in part.texts], codes)


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """One change of a corpus: ids of posts to delete, and posts to add. No id is in both. `mark`: that of the corpus afterwards.
    `delete_texts`: as in `PostChange`."""

    delete: Ids
    posts: NewPosts
    mark: Mark
    delete_texts: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class PostRows:
    """Posts to be encoded. `post_ids, author_ids`: uint64 `[n]`, each post id once and not 0; `created_at`: int64 `[n]`, Unix seconds,
    0 where unknown; `topics`: a name or None for each. `texts`: where ids are texts, those of each post and its author; else empty.
    `codes`: content codes, int64 `[n, q]` with any number of levels, 0 for none; `[0, 0]` if no post has any."""

    post_ids: Ids
    author_ids: Ids
    created_at: Int64s
    topics: list[str | None]
    texts: list[tuple[str, str]] = field(default_factory=list)
    codes: Int64s = field(default_factory=lambda: NO_CODES)


@dataclass(frozen=True, slots=True, eq=False)
class PostChange:
    """One change of the corpus, before encoding. No id is in both. `delete_texts`: where ids are texts, those of `delete`; else empty."""

    delete: Ids
    upsert: PostRows
    delete_texts: list[str] = field(default_factory=list)

    @classmethod
    def merged(cls, changes: Sequence[PostChange]) -> PostChange:
        """One change that gives the same posts in the same order as these one after the other; an empty one for no changes."""
        gone: dict[int, str | None] = {}
        last_rows: dict[int, tuple[PostRows, int]] = {}  # each post's last row, in the order of the last upserts
        for change in changes:
            for post, text in zip_longest(change.delete.tolist(), change.delete_texts):
                last_rows.pop(post, None)
                gone[post] = text
            for row, post in enumerate(change.upsert.post_ids.tolist()):
                last_rows.pop(post, None)
                gone.pop(post, None)
                last_rows[post] = change.upsert, row
        new = list(last_rows.values())
        upsert = PostRows(
            np.array([rows.post_ids[row] for rows, row in new], np.uint64),
            np.array([rows.author_ids[row] for rows, row in new], np.uint64),
            np.array([rows.created_at[row] for rows, row in new], np.int64),
            [rows.topics[row] for rows, row in new],
            [rows.texts[row] for rows, row in new if rows.texts],
            joined_codes([(rows.codes[row : row + 1], 1) for rows, row in new]),
        )
        return cls(np.array(list(gone), np.uint64), upsert, [text for text in gone.values() if text])

    def check(self, config: ModelConfig | None = None) -> None:
        """Raises ValueError if nothing changes or columns differ in length, for a post that comes twice or has id 0, and for a time
        before 1970."""
        rows = self.upsert
        if len({len(column) for column in (rows.post_ids, rows.author_ids, rows.created_at, rows.topics)}) > 1:
            raise ValueError("a change with columns of different lengths")
        if len(rows.texts) not in (0, len(rows.post_ids)) or len(self.delete_texts) not in (0, len(self.delete)):
            raise ValueError("a change with text ids for only some of its posts")
        if rows.codes.ndim != 2 or (rows.codes.size and len(rows.codes) != len(rows.post_ids)):
            raise ValueError("a change with codes for only some of its posts")
        if rows.codes.size and not 0 <= rows.codes.min() <= rows.codes.max() <= MAX_CODE:
            raise ValueError("a change with codes that cannot be")
        posts, times = rows.post_ids.tolist(), rows.created_at.tolist()
        ids = {*posts, *self.delete.tolist()}
        if not ids:
            raise ValueError("must name at least one post to upsert or delete")
        if 0 in ids:
            raise ValueError("must not name the post 0")
        if len(ids) < len(posts) + len(self.delete):
            raise ValueError("must name each post once")
        if min(times, default=0) < 0:
            raise ValueError("must have times from 1970 on")


@dataclass(slots=True, eq=False)
class Retrieved:
    """Posts, best first, equal scores by row. `post_ids, author_ids`: uint64 `[r]`; `scores`: float32 `[r]`; `created_at`: int64
    `[r]`, 0 where unknown; `topics`: a name or None for each. `visible`: rows that passed the filters. `scored`: rows that were
    scored in fp32. `cached`: whether the user's vector came from the cache. `posts`, `changes` and `mark`: of the corpus then, as
    `RetrievalEngine` counts them. `texts`: where ids are texts, those of each post and its author; else empty. `codes`: content
    codes, int64 `[r, q]`, 0 for none."""

    post_ids: Ids
    author_ids: Ids
    scores: Float32s
    created_at: Int64s
    topics: list[str | None]
    visible: int
    scored: int
    cached: bool
    posts: int
    changes: int
    mark: Mark
    texts: list[tuple[str, str]] = field(default_factory=list)
    codes: Int64s = field(default_factory=lambda: NO_CODES)

    def __len__(self) -> int:
        return len(self.post_ids)


@dataclass(slots=True, eq=False)
class Answers:
    """The results of one batch, in the order of its queries, and how long its two parts took."""

    retrieved: list[Retrieved]
    encode_seconds: float
    search_seconds: float
