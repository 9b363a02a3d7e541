"""Posts that one index searches, and which of them a request may see: masks are made here, before the search."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from model.inputs import Ids
from model.retrieval.corpus import Corpus, packed
from model.retrieval.inputs import Filters, NewPosts
from model.retrieval.search import WORD_ROWS, Bits, Index, bits_of, mask_of


class Segment:
    """A corpus with its index. `shown` are the bits of the rows that any search may return. Used by one thread at a time."""

    def __init__(self, corpus: Corpus, index: Index) -> None:
        self.corpus = corpus
        self.index = index
        self.shown: Bits = bits_of(~corpus.hidden)
        self._topic_bits: dict[str, Bits] = {}

    def visible(self, filters: Filters) -> Bits:
        """The bits of the rows that are left."""
        bits = self.shown
        if filters.topics is not None:
            wanted = np.zeros_like(bits)
            for topic in filters.topics:
                wanted |= self._bits_of_topic(topic)
            bits = bits & wanted
        if filters.created_after is not None:
            created = self.corpus.created_at
            recent = (
                np.zeros(len(self.corpus), np.bool_) if created is None else created >= max(filters.created_after, 1)
            )
            bits = bits & bits_of(recent)
        return without(bits, self.corpus, filters.exclude)

    def topics_of(self, rows: NDArray[np.int64]) -> list[str | None]:
        """The topic of each row, None where it has none."""
        corpus = self.corpus
        if corpus.topics is None:
            return [None] * len(rows)
        return [corpus.topic_names[topic] if topic >= 0 else None for topic in corpus.topics[rows].tolist()]

    def times_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """When each row was created, 0 where unknown."""
        created = self.corpus.created_at
        return np.zeros(len(rows), np.int64) if created is None else created[rows]

    def shown_rows(self) -> NDArray[np.int64]:
        """The rows that any search may return."""
        return np.flatnonzero(mask_of(self.shown, len(self.corpus)))

    def hide(self, post_ids: Ids) -> int:
        """From the next search on, return none of these posts. How many of them could be returned until now."""
        rows = self.corpus.rows_of(post_ids)
        hidden = int(mask_of(self.shown, len(self.corpus))[rows].sum())
        self.shown = without(self.shown, self.corpus, post_ids)
        return hidden

    def close(self) -> None:
        """Free the index."""
        self.index.close()

    def _bits_of_topic(self, topic: str) -> Bits:
        corpus = self.corpus
        if corpus.topics is None or topic not in corpus.topic_names:
            return np.zeros_like(self.shown)
        if topic not in self._topic_bits:
            self._topic_bits[topic] = bits_of(corpus.topics == corpus.topic_names.index(topic))
        return self._topic_bits[topic]


def segment_of(like: Corpus, posts: NewPosts, index: Index) -> Segment:
    """New posts as a segment of their own, beside the corpus that they are for."""
    names = tuple(dict.fromkeys(topic for topic in posts.topics if topic is not None))
    topics = np.array([-1 if topic is None else names.index(topic) for topic in posts.topics], np.int32)
    columns = posts.post_ids, posts.author_ids, posts.vectors, posts.created_at
    texts = packed(posts.texts) if posts.texts else None
    return Segment(Corpus(like.name, like.version, like.encoder, *columns, topics, names, texts), index)


def without(bits: Bits, corpus: Corpus, post_ids: Ids) -> Bits:
    """The bits less those of some posts; the same object where the corpus has none of them."""
    rows = corpus.rows_of(post_ids)
    if not len(rows):
        return bits
    words, places = np.divmod(rows.astype(np.uint64), np.uint64(WORD_ROWS))
    left = bits.copy()
    np.bitwise_and.at(left, words.astype(np.int64), ~(np.uint64(1) << places))
    return left
