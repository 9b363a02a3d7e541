"""The posts that a search runs over, as arrays: which rows are hidden, which row has an id, and which rows a request may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from model.inputs import NO_CODES, Ids
from model.retrieval.inputs import Filters, NewPosts
from model.retrieval.search import WORD_ROWS, Bits, Index, bits_of, mask_of

KEPT_TOPICS = 32  # filters by topics whose rows a segment remembers: a bit a row for each
ROWS_PER_STEP = 65536  # how many vectors are checked at once
TEXT_END = b"\xff"  # pads a text in a row of bytes; UTF-8 never contains it


@dataclass(slots=True, eq=False)
class Corpus:
    """`post_ids, author_ids`: uint64 `[n]`. `vectors`: float32 `[n, D]`, unit rows or zero. `created_at`: int64 `[n]`, Unix
    seconds, 0 where unknown, or None. `topics`: int32 `[n]`, an index into `topic_names` or -1, or None. None of them may change.
    `encoder` is the digest of the checkpoint that made the vectors. `texts`: uint8 `[n, 2, W]`, where ids are texts: those of post and
    author as UTF-8, each followed by `TEXT_END`; else None. `codes`: int32 `[n, q]`, the content codes, 0 for none; or None.

    `hidden`, bool `[n]`, are the rows that no search returns: zero vectors, and all rows of an id but the first.
    """

    name: str
    version: str
    encoder: str
    post_ids: Ids
    author_ids: Ids
    vectors: NDArray[np.float32]
    created_at: NDArray[np.int64] | None = None
    topics: NDArray[np.int32] | None = None
    topic_names: tuple[str, ...] = ()
    texts: NDArray[np.uint8] | None = None
    codes: NDArray[np.int32] | None = None
    hidden: NDArray[np.bool_] = field(init=False)
    duplicates: int = field(init=False)
    by_id: NDArray[np.int64] = field(init=False)
    """Rows in the order of their post ids, the first row of an id first."""

    def __post_init__(self) -> None:
        by_id = np.argsort(self.post_ids, kind="stable")
        ordered = self.post_ids[by_id]
        again = by_id[1:][ordered[1:] == ordered[:-1]]
        hidden = np.zeros(len(self.post_ids), np.bool_)
        for start in range(0, len(hidden), ROWS_PER_STEP):
            hidden[start : start + ROWS_PER_STEP] = ~self.vectors[start : start + ROWS_PER_STEP].any(1)
        hidden[again] = True
        self.hidden, self.duplicates, self.by_id = hidden, len(again), by_id

    def __len__(self) -> int:
        return len(self.post_ids)

    @property
    def width(self) -> int:
        """D."""
        return int(self.vectors.shape[1])

    def rows_of(self, post_ids: Ids) -> NDArray[np.int64]:
        """The first row of each of these posts that the corpus has; the others are left out."""
        places = np.searchsorted(self.post_ids, post_ids, sorter=self.by_id)
        rows = self.by_id[np.minimum(places, len(self) - 1)]
        present: NDArray[np.int64] = rows[self.post_ids[rows] == post_ids]
        return present

    def texts_of(self, rows: NDArray[np.int64]) -> list[tuple[str, str]]:
        """The ids of post and author as texts; empty if ids are integers."""
        return [] if self.texts is None else unpacked(self.texts[rows])

    def codes_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The content codes of each row, int64 `[r, q]`; `[0, 0]` if the corpus has none."""
        return NO_CODES if self.codes is None else self.codes[rows].astype(np.int64)


def packed(texts: Sequence[tuple[str, str]], width: int = 0) -> NDArray[np.uint8]:
    """Texts as in `Corpus.texts`; W is `width`, or more if these texts need it."""
    data = [text.encode() for pair in texts for text in pair]
    width = max(width, 1 + max(map(len, data), default=0))
    return np.frombuffer(b"".join(text.ljust(width, TEXT_END) for text in data), np.uint8).reshape(-1, 2, width)


def unpacked(texts: NDArray[np.uint8]) -> list[tuple[str, str]]:
    """The inverse of `packed`; bytes that are not UTF-8 become U+FFFD."""
    data = np.ascontiguousarray(texts).reshape(-1, texts.shape[2]).view(f"S{texts.shape[2]}")[:, 0].tolist()
    column = iter([text.rstrip(TEXT_END).decode("utf-8", "replace") for text in data])
    return list(zip(column, column, strict=True))


def worst_norm(vectors: NDArray[np.float32]) -> tuple[int, float]:
    """The row whose length is farthest from 1, and that length; zero rows count as correct. NaN counts as farthest."""
    worst, worst_length, worst_off = 0, 1.0, 0.0
    for start in range(0, len(vectors), ROWS_PER_STEP):
        rows = vectors[start : start + ROWS_PER_STEP]
        lengths = np.sqrt(np.einsum("nd,nd->n", rows, rows, dtype=np.float64))
        off = np.nan_to_num(np.where(lengths == 0, 0, np.abs(lengths - 1)), nan=np.inf)
        place = int(np.argmax(off))
        if off[place] > worst_off:
            worst, worst_length, worst_off = start + place, float(lengths[place]), float(off[place])
    return worst, worst_length


class Segment:
    """A corpus with its index. `shown` are the bits of the rows that any search may return. Used by one thread at a time."""

    def __init__(self, corpus: Corpus, index: Index) -> None:
        self.corpus = corpus
        self.index = index
        self.shown: Bits = bits_of(~corpus.hidden)
        names = () if corpus.topics is None else corpus.topic_names
        self._topic_places = {name: place for place, name in enumerate(names)}
        self._topic_bits: dict[tuple[int, ...], Bits] = {}  # the latest is the last

    def visible(self, filters: Filters) -> Bits:
        """The bits of the rows that pass the filters."""
        bits = self.shown
        if filters.topics is not None:
            bits = bits & self._bits_of_topics(filters.topics)
        if filters.created_after is not None or filters.created_before is not None:
            bits = bits & bits_of(self._created_within(filters.created_after, filters.created_before))
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

    def posts_without(self, post_ids: Ids) -> NewPosts:
        """The posts that any search may return, without these, in order."""
        rows, corpus = self.shown_rows(), self.corpus
        rows = rows[~np.isin(corpus.post_ids[rows], post_ids)]
        columns = corpus.post_ids[rows], corpus.author_ids[rows], self.times_of(rows), self.topics_of(rows)
        return NewPosts(*columns, corpus.vectors[rows], corpus.texts_of(rows), corpus.codes_of(rows))

    def hide(self, post_ids: Ids) -> int:
        """Return none of these posts from the next search on. Returns how many of them could be returned until now."""
        words, bits = _places_of(self.corpus.rows_of(post_ids))
        hidden = int(np.count_nonzero(self.shown[words] & bits))
        self.shown = without(self.shown, self.corpus, post_ids)
        return hidden

    def close(self) -> None:
        """Free the index."""
        self.index.close()

    def _created_within(self, after: int | None, before: int | None) -> NDArray[np.bool_]:
        """Which rows were created between these times, both included; a row of an unknown time was not."""
        created = self.corpus.created_at
        if created is None:
            return np.zeros(len(self.corpus), np.bool_)
        within: NDArray[np.bool_] = created >= max(after or 0, 1)
        return within if before is None else within & (created <= before)

    def _bits_of_topics(self, topics: Sequence[str]) -> Bits:
        """The bits of the rows of any of these topics. However many they are, the column is read once."""
        places = tuple(sorted({self._topic_places[topic] for topic in topics if topic in self._topic_places}))
        if not places or self.corpus.topics is None:
            return np.zeros_like(self.shown)
        bits = self._topic_bits.pop(places, None)
        if bits is None:
            # The last entry is for rows without a topic, whose place is -1.
            is_chosen = np.zeros(len(self._topic_places) + 1, np.bool_)
            is_chosen[list(places)] = True
            bits = bits_of(is_chosen[self.corpus.topics])
        self._topic_bits[places] = bits
        if len(self._topic_bits) > KEPT_TOPICS:
            del self._topic_bits[next(iter(self._topic_bits))]
        return bits


def segment_of(like: Corpus, posts: NewPosts, index: Index) -> Segment:
    """New posts as a separate segment of the corpus `like`."""
    places: dict[str | None, int] = {None: -1}
    topics = np.array([places.setdefault(topic, len(places) - 1) for topic in posts.topics], np.int32)
    names = tuple(name for name in places if name is not None)
    columns = posts.post_ids, posts.author_ids, posts.vectors, posts.created_at
    texts = packed(posts.texts) if posts.texts else None
    codes = posts.codes.astype(np.int32) if posts.codes.size else None
    return Segment(Corpus(like.name, like.version, like.encoder, *columns, topics, names, texts, codes), index)


def without(bits: Bits, corpus: Corpus, post_ids: Ids) -> Bits:
    """The bits without those of some posts; the same object if the corpus has none of them."""
    rows = corpus.rows_of(post_ids)
    if not len(rows):
        return bits
    words, places = _places_of(rows)
    left = bits.copy()
    np.bitwise_and.at(left, words, ~places)
    return left


def _places_of(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], Bits]:
    """The word of each row, and its bit there."""
    words, places = np.divmod(rows, WORD_ROWS)
    return words, np.uint64(1) << places.astype(np.uint64)
