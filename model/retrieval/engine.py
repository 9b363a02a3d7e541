"""`RetrievalEngine`: user vectors from the cache or the user tower, then the exact search, for a batch of requests at once."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from model.cache import ContextCache, ContextKey
from model.device import is_given_up
from model.engine import CacheStats, EngineError
from model.inputs import Context
from model.layers import dtype_name
from model.native.build import KernelUnavailable, Vectors
from model.native.search import NativeIndex
from model.native.tower import NativeTower
from model.retrieval.corpus import Corpus, Segment, segment_of
from model.retrieval.inputs import Answers, Change, Filters, Mark, NewPosts, Query, Retrieved, joined_codes
from model.retrieval.search import Hits, Index, TorchIndex, Wish
from model.retrieval.towers import Towers
from model.tolerances import RETRIEVAL

SEGMENT_ROWS = 4096  # new posts share a segment, indexed again with each change until it has this many rows
CHECKED_POSTS = 64  # of the corpus, at warm-up


class Tower(Protocol):
    """Something that encodes users."""

    notes: dict[str, Any]

    def encode(self, contexts: Sequence[Context]) -> NDArray[np.float32]:
        """Unit vectors `[B, D]`. A user's bits do not depend on the others."""
        ...

    def close(self) -> None:
        """Free its memory."""
        ...


class TorchTower:
    """The definition, one user at a time, so that a user's bits do not depend on the others."""

    def __init__(self, towers: Towers, dtype: torch.dtype, note: str) -> None:
        self._towers = towers
        self._dtype = dtype
        self.notes: dict[str, Any] = {"backend": "torch", "dtype": dtype_name(dtype), "reason": note}

    def encode(self, contexts: Sequence[Context]) -> NDArray[np.float32]:
        """Unit vectors float32 `[B, D]`, one forward a user."""
        return np.concatenate([self._towers.encode_users([context], self._dtype).numpy() for context in contexts])

    def close(self) -> None:
        """The towers belong to the caller."""


@dataclass(frozen=True, slots=True)
class RetrievalOptions:
    """What an operator may choose, as in `EngineOptions`, but dtype `auto` is float32: a user vector is cached, and its last bits
    decide near ties between posts. `cache_bytes` bounds the cache of user vectors. `device` is where the corpus is searched, if
    the search passes its check there: a card, `cpu:0` for torch on the host, or `cpu` for the kernel.
    """

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    backend: Literal["auto", "native", "torch"] = "auto"
    cache_bytes: int = 16 * 2**20
    threads: int = 0
    vectors: Vectors = "auto"
    kernel_directory: Path | None = None
    device: str = "cpu"


class Users(NamedTuple):
    """The users of one batch, `keys` in its order. `cached`: vectors from the cache, float32 `[D]`; `uncached`: contexts to encode; each
    key is in one of the two. `uncached_tokens`: tokens that the user tower has to read; `seconds`: how long the look-up took."""

    keys: list[ContextKey]
    cached: dict[ContextKey, NDArray[np.float32]]
    uncached: dict[ContextKey, Context]
    uncached_tokens: int
    seconds: float


DeviceIndex = Callable[[NDArray[np.float32], str], Index]
"""Makes an index of vectors, float32 `[n, D]`, on a device. What it raises is taken for a fault of the device."""

Added = tuple[Segment | None, int]
"""The segment of a change's new posts, and how many of the last segments it replaces, whose posts it then holds too."""


class RetrievalEngine:
    """Two towers and the corpus that their candidate tower made. Used by one thread at a time, except `cache_stats` and `prepare`.

    `on_device` makes the corpus's index where `options.device` is not `cpu`.
    Raises ValueError for a corpus of another width, EngineError if the options cannot run here.
    """

    def __init__(
        self,
        towers: Towers,
        corpus: Corpus,
        options: RetrievalOptions = RetrievalOptions(),
        *,
        on_device: DeviceIndex = TorchIndex,
    ) -> None:
        if corpus.width != towers.config.width:
            raise ValueError(f"the corpus has vectors of width {corpus.width}, the towers of {towers.config.width}")
        self.config = towers.config
        self.towers = towers
        self.options = options
        dtype = torch.bfloat16 if options.dtype == "bfloat16" else torch.float32
        self.tower = self._make_tower(dtype)
        self.notes: dict[str, Any] = {"user_tower": self.tower.notes}
        self._library: ctypes.CDLL | None = None  # of the first native index, for all the others
        self._segments = [Segment(corpus, self._main_index(corpus.vectors, on_device))]
        self.posts = len(corpus) - int(corpus.hidden.sum())
        """Rows that a search without filters can return."""
        self.changes = 0
        """Changes since the corpus was built, counted by their marks."""
        self.mark = Mark()
        """The corpus's mark with these changes: its owner sets it, and `change` advances it."""
        self._users: ContextCache[NDArray[np.float32]] = ContextCache(options.cache_bytes, prefixes=False)

    @property
    def corpus(self) -> Corpus:
        """The corpus without its changes."""
        return self._segments[0].corpus

    @property
    def topics(self) -> tuple[str, ...]:
        """The names of all topics, those of changes last."""
        names = (name for segment in self._segments for name in segment.corpus.topic_names)
        return tuple(dict.fromkeys(names))

    def warm_up(self) -> None:
        """Touch what a request touches, and compare some posts and their scores with the definition. Raises EngineError."""
        corpus = self.corpus
        rows = np.flatnonzero(~corpus.hidden)[:CHECKED_POSTS]
        if len(rows):
            ours = self.towers.encode_posts(
                corpus.post_ids[rows], corpus.author_ids[rows], corpus.codes_of(rows)
            ).numpy()
            tolerance = RETRIEVAL[self.towers.tables.post.dtype].posts
            if not np.abs(ours - corpus.vectors[rows]).max() <= tolerance:
                raise EngineError("the corpus does not hold the vectors of this retrieval checkpoint")
            self._check_search(corpus.vectors[rows], lambda some: self._make_index(some, 1))
        nobody = np.empty(0, np.int64)
        empty = Context(1, nobody.view(np.uint64), nobody.view(np.uint64), np.zeros((0, self.config.actions), np.float32),
                        nobody, np.empty(0, np.float32))  # fmt: skip
        self.retrieve([Query(empty, 1, Filters(nobody.view(np.uint64)))])
        self._users.clear()

    def look_up(self, queries: Sequence[Query]) -> Users:
        """Look up which of these users have a vector in the cache; each one found counts as a hit."""
        began = time.perf_counter()
        keys: list[ContextKey] = []
        cached: dict[ContextKey, NDArray[np.float32]] = {}
        uncached: dict[ContextKey, Context] = {}
        tokens = 0
        for query in queries:
            key = ContextKey.of(query.context, self.config)
            keys.append(key)
            if (entry := self._users.find(key)) is not None:
                cached[key] = entry.state
            elif key not in uncached:
                uncached[key] = query.context
                tokens += 1 + len(query.context.post_ids)
        return Users(keys, cached, uncached, tokens, time.perf_counter() - began)

    def retrieve(self, queries: Sequence[Query], users: Users | None = None) -> Answers:
        """Answers in the order of the queries, which share one scan of the corpus. An answer does not depend on the other queries.

        `users`: the result of `look_up` for the same queries, if nothing was retrieved since.
        """
        users = self.look_up(queries) if users is None else users
        began = time.perf_counter()
        is_cached = [key in users.cached for key in users.keys]
        vectors = self._encode(users)
        encoded = time.perf_counter()
        hits_by_segment = [
            segment.index.search(
                [
                    Wish(vector, query.k, segment.visible(query.filters), query.least)
                    for vector, query in zip(vectors, queries, strict=True)
                ]
            )
            for segment in self._segments
        ]
        retrieved = [
            self._retrieved(*one) for one in zip(zip(*hits_by_segment, strict=True), queries, is_cached, strict=True)
        ]
        return Answers(retrieved, users.seconds + encoded - began, time.perf_counter() - encoded)

    def change(self, change: Change, added: Added | None = None) -> int:
        """Delete posts and add new ones, which replace those with the same ids, from the next search on. Returns how many posts
        `change.delete` removed. `added`: what `prepare` returned for this change, if no other one came between. Raises EngineError if an
        index cannot be made; then nothing has changed."""
        segment, replaced = added or self.prepare(change)
        hidden = [
            sum(segment.hide(ids) for segment in self._segments) for ids in (change.delete, change.posts.post_ids)
        ]
        self.posts -= sum(hidden)
        self.changes += change.mark.sequence - self.mark.sequence
        self.mark = change.mark
        for _ in range(replaced):
            last = self._segments.pop()
            self.posts -= len(last.shown_rows())
            last.close()
        if segment is not None:
            self._segments.append(segment)
            self.posts += len(segment.shown_rows())
        return hidden[0]

    def prepare(self, change: Change) -> Added:
        """Index the new posts, in any thread, while searches run. Nothing changes. Raises EngineError.

        They join the last segment until that is full. A full one is merged with those behind it as soon as they have as many posts as are
        left in it, so that there are few segments, deleted posts take little memory, and a post is seldom indexed again.
        """
        if not len(change.posts):
            return None, 0
        gone = np.concatenate((change.delete, change.posts.post_ids))
        parts, count = [change.posts], len(change.posts)
        for segment in reversed(self._segments[1:]):
            if len(segment.corpus) >= SEGMENT_ROWS and len(segment.shown_rows()) > count:
                break
            parts.append(segment.posts_without(gone))
            count += len(parts[-1])
        posts = NewPosts.joined(parts[::-1])
        return segment_of(self.corpus, posts, self._make_index(posts.vectors, 1)), len(parts) - 1

    @property
    def segment_rows(self) -> list[int]:
        """The rows that are indexed, deleted ones too: those of the corpus, then of each segment of new posts."""
        return [len(segment.corpus) for segment in self._segments]

    def cache_stats(self) -> CacheStats:
        """Of the user vectors; safe to call from any thread."""
        return self._users.stats()

    def close(self) -> None:
        """Free the indexes, the user tower and the cache."""
        self._users.clear()
        self.tower.close()
        for segment in self._segments:
            segment.close()

    def _make_tower(self, dtype: torch.dtype) -> Tower:
        options = self.options
        if options.backend == "torch":
            return TorchTower(self.towers, dtype, "chosen by the operator")
        try:
            return NativeTower(
                self.towers,
                dtype,
                threads=options.threads,
                vectors=options.vectors,
                kernel_directory=options.kernel_directory,
                only_if_fast=options.backend == "auto",
            )
        except KernelUnavailable as error:
            if options.backend == "native":
                raise
            return TorchTower(self.towers, dtype, str(error))

    def _main_index(self, vectors: NDArray[np.float32], on_device: DeviceIndex) -> Index:
        """The corpus's index on the requested device, or in this process's memory if that fails. The bits are the same."""
        device, reason = self.options.device, ""
        if device != "cpu" and self.options.backend != "native" and is_given_up(device):
            reason = f"{device}: every way of ranking there failed its checks"
        elif device != "cpu" and self.options.backend != "native":
            try:
                self._check_search(vectors, lambda some: on_device(some, device))
                index = on_device(vectors, device)
                self.notes["search"] = {"backend": "torch", "device": device}
                return index
            except Exception as error:  # what a broken card raises is not known
                reason = f"{device}: {(str(error) or type(error).__name__).splitlines()[0]}"
        host_index = self._make_index(vectors, self.options.threads)
        if reason:
            self.notes["search"]["not_on_device"] = reason
        return host_index

    def _make_index(self, vectors: NDArray[np.float32], threads: int) -> Index:
        options = self.options
        try:
            if options.backend == "torch":
                raise KernelUnavailable("chosen by the operator")
            index = NativeIndex(
                vectors, threads=threads, kernel_directory=options.kernel_directory, kind=options.vectors, library=self._library
            )  # fmt: skip
            self._library = index.library
            note = {"backend": "native"} | ({"kernel_file": index.note} if index.note else {})
            self.notes.setdefault("search", note)  # describes the corpus's own index, which is made first
            return index
        except KernelUnavailable as error:
            if options.backend == "native":
                raise
            self.notes.setdefault("search", {"backend": "torch", "reason": str(error)})
            return TorchIndex(vectors)

    def _encode(self, users: Users) -> list[NDArray[np.float32]]:
        """A unit vector, float32 `[D]`, for each key; the unknown ones are encoded and put into the cache."""
        vectors = dict(users.cached)
        if users.uncached:
            for key, vector in zip(users.uncached, self.tower.encode(list(users.uncached.values())), strict=True):
                self._users.find_prefix(key)  # counts the miss
                self._users.insert(key, vector, vector.nbytes)
                vectors[key] = vector
        return [vectors[key] for key in users.keys]

    def _retrieved(self, hits_by_segment: Sequence[Hits], query: Query, cached: bool) -> Retrieved:
        """The best of what the segments found: equal scores by segment, then by row."""
        parts = list(zip(self._segments, hits_by_segment, strict=True))
        scores = np.concatenate([part.scores for _, part in parts])
        order = np.argsort(-scores, kind="stable")[: query.k]  # each part is in the right order already

        def of(column: Callable[[Segment, NDArray[np.int64]], NDArray[Any]]) -> NDArray[Any]:
            picked: NDArray[Any] = np.concatenate([column(segment, part.rows) for segment, part in parts])[order]
            return picked

        names = [topic for segment, part in parts for topic in segment.topics_of(part.rows)]
        texts = [pair for segment, part in parts for pair in segment.corpus.texts_of(part.rows)]
        codes = joined_codes([(segment.corpus.codes_of(part.rows), len(part.rows)) for segment, part in parts])
        return Retrieved(
            of(lambda segment, rows: segment.corpus.post_ids[rows]),
            of(lambda segment, rows: segment.corpus.author_ids[rows]),
            scores[order],
            of(lambda segment, rows: segment.times_of(rows)),
            [names[place] for place in order],
            sum(part.visible for part in hits_by_segment),
            sum(part.scored for part in hits_by_segment),
            cached,
            self.posts,
            self.changes,
            self.mark,
            [texts[place] for place in order] if texts else [],
            codes[order] if len(codes) else codes,
        )

    def _check_search(self, vectors: NDArray[np.float32], make: Callable[[NDArray[np.float32]], Index]) -> None:
        """Compare the search of some rows with the definition. Raises EngineError."""
        some = np.ascontiguousarray(vectors[:CHECKED_POSTS])
        plain, index = TorchIndex(some, exhaustive=True), make(some)
        for k, vector in zip((1, 7, CHECKED_POSTS, 2 * CHECKED_POSTS), some, strict=False):
            wish = Wish(vector, k)
            (ours,), (theirs,) = index.search([wish]), plain.search([wish])
            if ours.rows.tobytes() != theirs.rows.tobytes() or ours.scores.tobytes() != theirs.scores.tobytes():
                raise EngineError("the search's rows and scores differ from the definition's on this device")
        index.close()
