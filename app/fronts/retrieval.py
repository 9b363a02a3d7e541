"""Retrieval as a front sees it: `interface.Retrieval` over the link, and what of it travels as columns."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from app.errors import CorpusNotLoaded, InternalError
from app.fronts import frames
from app.fronts.uplink import Asked, Uplink
from app.interface import Changed, Found, FoundDone, ServedRetrieval, Ticket
from model.config import ModelConfig
from model.retrieval.inputs import Filters, PostChange, PostRows, Query, Retrieved
from weights.corpus.manifest import CorpusManifest
from weights.format.manifest import Manifest


class RemoteRetrieval:
    """All methods belong to the event loop."""

    def __init__(self, uplink: Uplink, *, is_wanted: bool) -> None:
        self.uplink = uplink
        self._is_wanted = is_wanted  # by the settings
        self._served: ServedRetrieval | None = None
        self._number = 0

    @property
    def served(self) -> ServedRetrieval:
        """What serves new requests. Raises CorpusNotLoaded."""
        if self._served is None:
            detail, seconds = ("The corpus is being loaded.", 2.0) if self._is_wanted else (None, None)
            raise CorpusNotLoaded(detail, retry_after_seconds=seconds)
        return self._served

    def serve(self, frame: frames.Corpus) -> None:
        """From now on this one. No search of the one before is still to be sent: each is as soon as its request is read."""
        old, self._number = self._number, frame.corpus
        manifests = Manifest.from_json(frame.manifest), CorpusManifest.from_json(frame.posts)
        self._served = ServedRetrieval(*manifests, frame.hidden, frame.duplicates, frame.notes)
        if old:
            self.uplink.send(frames.Left(old))

    def lose(self) -> None:
        """The engine process has ended."""
        self._served, self._number = None, 0

    def retrieve(
        self, served: ServedRetrieval, query: Query, deadline: float, key: str | None, done: FoundDone
    ) -> Ticket:
        """As `interface.Retrieval.retrieve`; whether there is room is decided by the engine process."""
        if served is not self._served:
            raise CorpusNotLoaded("The corpus of this request was replaced.", retry_after_seconds=0.0)
        place = SearchPlace(self.uplink, deadline, done)
        self.uplink.send(search_frame(place.number, self._number, query, deadline, key))
        return place

    async def change(self, change: PostChange) -> Changed:
        """As `interface.Retrieval.change`."""
        rows = change.upsert
        words = frames.joined((rows.post_ids, rows.author_ids, rows.created_at))
        return await self._changed(frames.Change, change.delete.tobytes(), words, rows.topics)

    async def compact(self) -> Changed:
        """As `interface.Retrieval.compact`."""
        return await self._changed(frames.Compact)

    async def reload(self, checkpoint: str | None, corpus: str | None) -> ServedRetrieval:
        """As `interface.Reloads.reload_retrieval`, by names below the root."""
        told = await self.uplink.ask(frames.Reload, None, (checkpoint, corpus))
        raise_failure(told)
        return self.served

    async def _changed(self, kind: Any, *fields: Any) -> Changed:
        told = await self.uplink.ask(kind, *fields)
        raise_failure(told)
        return Changed(self.served.corpus, told.posts, told.changes, told.deleted)


class SearchPlace(Asked):
    """`interface.Ticket`: a search until it is answered or released."""

    __slots__ = ("done", "number", "uplink")

    def __init__(self, uplink: Uplink, deadline: float, done: FoundDone) -> None:
        super().__init__(deadline)
        self.uplink = uplink
        self.done = done
        self.number = uplink.expect(self)

    def release(self) -> None:
        """Nobody waits any more; a second time does nothing."""
        self.uplink.forget(self.number)

    def read(self, frame: Any) -> Found:
        """Raises ValueError for what is no such answer."""
        if type(frame) is not frames.Posts:
            raise ValueError("not the answer to a search")
        return found_of(frame)

    def end(self, result: Any) -> None:
        """Tell the caller."""
        self.done(result)


def raise_failure(told: Any) -> None:
    """What a question about models or posts ended with, where that was no success."""
    if isinstance(told, frames.Reloaded) and told.failure:
        raise frames.RELOAD_FAILURES.get(told.failure, InternalError)(told.detail)


# columns


def search_frame(number: int, corpus: int, query: Query, deadline: float, key: str | None) -> frames.Search:
    """A query as it travels."""
    context, filters = query.context, query.filters
    topics = None if filters.topics is None else list(filters.topics)
    return frames.Search(
        number, corpus, deadline, key, context.user_id, len(context), query.k,
        frames.joined((context.post_ids, context.author_ids, context.surfaces)),
        frames.joined((context.actions, context.dwell_seconds)),
        filters.exclude.tobytes(), topics, filters.created_after, query.least,
    )  # fmt: skip


def query_of(frame: frames.Search, config: ModelConfig) -> Query:
    """What `search_frame` was given, as views. Raises ValueError where the frame contradicts itself, and as `frames.inputs_of`."""
    topics = None if frame.topics is None else tuple(frame.topics)
    ids = np.frombuffer(frame.words, np.uint64)
    context = frames.context_of(frame.user_id, frame.history, ids, frame.floats, config)
    if math.isnan(frame.least):
        raise ValueError("a least score that is no number")
    return Query(
        context, frame.k, Filters(np.frombuffer(frame.exclude, np.uint64), topics, frame.created_after), frame.least
    )


def posts_frame(number: int, found: Found) -> frames.Posts:
    """What a search found, as it travels."""
    posts = found.posts
    return frames.Posts(
        number, found.queue_seconds, found.encode_seconds, found.search_seconds,
        frames.joined((posts.post_ids, posts.author_ids, posts.created_at)), posts.scores.tobytes(), posts.topics,
        posts.visible, posts.scored, posts.cached, posts.posts, posts.changes,
    )  # fmt: skip


def found_of(frame: frames.Posts) -> Found:
    """What `posts_frame` was given, as views. Raises ValueError where the columns differ in length."""
    words, scores, count = _three(frame.words), np.frombuffer(frame.scores, np.float32), len(frame.topics)
    if words.shape[1] != count or len(scores) != count:
        raise ValueError("columns of another length than the frame says")
    posts = Retrieved(
        words[0], words[1], scores, words[2].view(np.int64), frame.topics, frame.visible, frame.scored, frame.cached,
        frame.posts, frame.changes,
    )  # fmt: skip
    return Found(posts, frame.queue_seconds, frame.encode_seconds, frame.search_seconds)


def change_of(frame: frames.Change) -> PostChange:
    """What a front was told to change. Raises ValueError where the columns differ in length, and as `PostChange.check`."""
    words = _three(frame.words)
    if words.shape[1] != len(frame.topics):
        raise ValueError("columns of another length than the frame says")
    rows = PostRows(words[0], words[1], words[2].view(np.int64), frame.topics)
    change = PostChange(np.frombuffer(frame.delete, np.uint64), rows)
    change.check()
    return change


def _three(words: bytes) -> Any:
    return np.frombuffer(words, np.uint64).reshape(3, -1)
