"""Makes a corpus from an npz file or table of posts, with the file's vectors or the candidate tower's. Unpickles nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.bounds import MAX_CODE, MAX_CODE_LEVELS
from model.config import ModelConfig
from model.inputs import NO_CODES, Ids, Int64s
from model.tolerances import RETRIEVAL
from weights.checkpoint import Encoder
from weights.corpus.manifest import CODES, VECTORS, CorpusManifest
from weights.corpus.store import CorpusLabels, StoredCorpus, write_corpus
from weights.errors import CheckpointError, reason_of
from weights.format.tensorfile import Progress
from weights.published.npz import FLOAT32, NpzFile
from weights.text_ids import IdKind, is_text_id, text_ids
from weights.values import Problem, problem_of_codes, problem_of_stored_ids, problem_of_times

REPRESENTATIONS = "candidate_representations"
ENCODED_ROWS = 256
"""Posts per forward of the candidate tower: always this many, the last batch padded."""
PIECE_ROWS = 65536
"""Rows of an array that are handed on at once."""
CHECKED_ROWS = 4096
"""How many rows of a file with vectors are encoded again to check it, spread over the file."""

_IDS = tuple(np.dtype(name) for name in ("<i8", "<u8"))


class Posts:
    """The source of a corpus, with one row per post. Use as a context manager.

    `columns`: the columns besides vectors; `ids`: the kind of ids; `text_width`: W of the column `texts`, `code_levels`: q of `codes`.
    `notes` are sentences about what is left out. `topics`, a text file with one line per row, replaces the column.
    """

    def __init__(self, path: Path, ids: IdKind, topics: Path | None) -> None:
        self.path, self.ids = path, ids
        self.posts, self.text_width, self.code_levels = 0, 0, 0
        self.columns: list[str] = []
        self.notes: list[str] = []
        self.has_vectors = False
        self._topics_file = topics
        self._topic_index: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def vectors(self, width: int) -> Iterator[Tensor]:
        """Yield the vectors in order, float32 `[r, D]`."""
        raise NotImplementedError

    def column(self, name: str) -> Iterator[Tensor]:
        """Yield one of `columns` in order: int64, ids from 2^63 on negative; topics int32, indexing `topic_names`; texts and codes as in
        `Corpus`."""
        return self._topics() if name == "topics" else self._column(name)

    def _column(self, name: str) -> Iterator[Tensor]:
        """`column` for all but the topics."""
        raise NotImplementedError

    def check_values(self, *, ids: bool) -> None:
        """Raises CheckpointError, which names the row, for what is not a time and, with `ids`, for the post id 0."""
        if ids:
            self._check_each("post_ids", lambda column: problem_of_stored_ids(column.view(np.uint64)))
        if "created_at" in self.columns:
            self._check_each("created_at", problem_of_times)

    def codes(self) -> Iterator[Tensor]:
        """Yield the content codes in order, int32 `[r, q]`, in the pieces of `post_ids`; q is 0 if the posts have none."""
        if CODES in self.columns:
            yield from self.column(CODES)
        else:
            yield from (torch.zeros(len(piece), 0, dtype=torch.int32) for piece in self.column("post_ids"))

    def check_codes(self, config: ModelConfig) -> None:
        """Raises CheckpointError, which names the row, for content codes that these towers do not have; for towers without codes, those
        that no model can have."""
        if CODES in self.columns:
            levels, values = config.code_levels, config.code_values
            self._check_each(CODES, lambda column: problem_of_codes(column, levels, values))

    def _check_each(self, name: str, problem_of: Callable[[NDArray[np.int64]], Problem | None]) -> None:
        rows = 0
        for piece in self.column(name):
            if (problem := problem_of(piece.numpy())) is not None:
                raise CheckpointError(f"{self.place(rows + problem[0])}: {name} {problem[1]}.")
            rows += len(piece)

    def place(self, row: int) -> str:
        """Where a row is, for people, who count from 1."""
        return f"{self.path}, row {row + 1}"

    def topic_names(self) -> tuple[str, ...]:
        """Topic names in order of first occurrence; complete once the column has been read."""
        return tuple(self._topic_index)

    def _topics(self) -> Iterator[Tensor]:
        self._topic_index.clear()
        for piece in self._lines() if self._topics_file else self._texts():
            names, inverse = np.unique(piece, return_inverse=True)
            places = [self._topic_index.setdefault(str(name), len(self._topic_index)) if name else -1 for name in names]
            yield torch.from_numpy(np.array(places, np.int32)[inverse])

    def _texts(self) -> Iterator[NDArray[Any]]:
        """Yield the topic of each row, "" for none."""
        raise NotImplementedError

    def _lines(self) -> Iterator[NDArray[Any]]:
        assert self._topics_file is not None
        try:
            with self._topics_file.open(encoding="utf-8-sig") as file:
                if (count := sum(1 for _ in file)) != self.posts:
                    raise CheckpointError(f"{self._topics_file} has {count} lines for {self.posts} posts.")
                file.seek(0)
                while lines := [line.rstrip("\n") for line in islice(file, 65536)]:
                    if any("\0" in line for line in lines):  # numpy drops one at the end
                        raise CheckpointError(f"{self._topics_file} holds a NUL, which no topic may have.")
                    yield np.array(lines)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self._topics_file} cannot be read as text: {reason_of(error)}.") from error


class PostsFile(Posts):
    """An npz file with `post_ids`, `author_ids` and optionally `candidate_representations`, `created_at`, `topics` and `codes`; ids are
    integers. Raises CheckpointError."""

    def __init__(self, path: Path, topics: Path | None = None) -> None:
        super().__init__(path, "uint64", topics)
        self._archive = NpzFile(path)
        try:
            self.posts = math.prod(self._archive.header("post_ids")[0])
            self.columns = ["post_ids", "author_ids"] + ["created_at"] * ("created_at" in self._archive.names)
            for name in self.columns:
                self._check(name)
            if CODES in self._archive.names:
                self.code_levels = self._levels()
                self.columns.append(CODES)
            if topics is not None or self._has_topics():
                self.columns.append("topics")
        except BaseException:
            self._archive.__exit__()
            raise
        self.has_vectors = REPRESENTATIONS in self._archive.names
        read_arrays = {"post_ids", "author_ids", "created_at", "topics", CODES, REPRESENTATIONS}
        self.notes += [f"Array {name} is not read." for name in self._archive.names if name not in read_arrays]

    def __exit__(self, *_: object) -> None:
        self._archive.__exit__()

    def vectors(self, width: int) -> Iterator[Tensor]:
        """The posts' representations in pieces, float32 `[n, width]`. Raises CheckpointError for another shape or type."""
        yield from torch.from_numpy(self._archive.array(REPRESENTATIONS, FLOAT32, (self.posts, width))).split(
            PIECE_ROWS
        )

    def _column(self, name: str) -> Iterator[Tensor]:
        shape, dtype = self._archive.header(name)
        values = self._archive.array(name, dtype, shape)
        values = in_bounds(values.astype(np.int64)) if name == CODES else values.view(np.int64)
        yield from torch.from_numpy(values).split(PIECE_ROWS)

    def _levels(self) -> int:
        shape, dtype = self._archive.header(CODES)
        if len(shape) != 2 or shape[0] != self.posts or not 0 < shape[1] <= MAX_CODE_LEVELS or dtype.kind not in "iu":
            raise CheckpointError(
                f"{self._archive.path}: array {CODES} has shape {list(shape)} of {dtype.str}, a corpus has a row of at most "
                f"{MAX_CODE_LEVELS} integers for each post."
            )
        return int(shape[1])

    def _check(self, name: str) -> None:
        shape, dtype = self._archive.header(name)
        if dtype not in _IDS or shape != (self.posts,):
            raise CheckpointError(
                f"{self._archive.path}: array {name} has shape {list(shape)} of {dtype.str}, a corpus has one number of "
                "64 bits for each post."
            )

    def _has_topics(self) -> bool:
        """Whether the topics can be read. Python objects would have to be unpickled: they are left out, with a note."""
        if "topics" not in self._archive.names:
            return False
        shape, dtype = self._archive.header("topics")
        if dtype.kind == "U" and shape == (self.posts,):
            return True
        self.notes.append(
            f"Array topics holds {'Python objects' if dtype.kind == 'O' else dtype.str}, which are not read: nothing is "
            "unpickled. The corpus has no topics; give them with --topics, a text file with one a line."
        )
        return False

    def _texts(self) -> Iterator[NDArray[Any]]:
        shape, dtype = self._archive.header("topics")
        yield self._archive.array("topics", dtype, shape)


def make_corpus(
    source: Posts,
    encoder: Encoder,
    out: Path,
    labels: CorpusLabels,
    *,
    by_towers: bool,
    replace: bool = False,
    progress: Progress | None = None,
) -> CorpusManifest:
    """Stream a file of posts into a corpus directory, with its own vectors or, if `by_towers`, the candidate tower's.

    The file does not say which model made its vectors, so some rows are compared with the candidate tower's.
    Raises CheckpointError.
    """
    if not source.posts:
        raise CheckpointError(f"{source.path} holds no post.")
    if source.ids != (expected_ids := encoder.manifest.ids):
        raise CheckpointError(
            f"{source.path} has ids that are {source.ids}, those of {encoder.manifest.name} are {expected_ids}: texts are read "
            "from Parquet or JSON lines."
        )
    source.check_values(ids=by_towers)  # a published file may have padding, which it is imported with
    source.check_codes(encoder.manifest.config)
    if not by_towers:
        check_rows(source, encoder)
    width, table = encoder.manifest.config.width, encoder.towers.tables.post.dtype

    def pieces(tensor: str) -> Iterator[Tensor]:
        if tensor != VECTORS:
            return source.column(tensor)
        return encoded(source, encoder) if by_towers else source.vectors(width)

    half = by_towers and table is torch.bfloat16
    return write_corpus(
        out, labels, encoder, source.posts, source.columns, pieces, source.topic_names,
        dtype="bfloat16" if half else "float32", text_width=source.text_width, code_levels=source.code_levels, replace=replace,
        progress=progress,
    )  # fmt: skip


def encoded(source: Posts, encoder: Encoder) -> Iterator[Tensor]:
    """The candidate tower's vectors of every post, in order."""
    # arrays with rows of equal size come in pieces of equal length
    for columns in zip(source.column("post_ids"), source.column("author_ids"), source.codes(), strict=True):
        posts, authors = (piece.numpy().view(np.uint64) for piece in columns[:2])
        codes = columns[2].numpy().astype(np.int64)
        for start in range(0, len(posts), ENCODED_ROWS):
            rows = slice(start, start + ENCODED_ROWS)
            yield encode(encoder, posts[rows], authors[rows], codes[rows])


def encode(encoder: Encoder, post_ids: Ids, author_ids: Ids, codes: Int64s = NO_CODES) -> Tensor:
    """Encode posts in batches of one size; vectors float32 `[n, D]`. `codes` int64 `[n, q]`, or `[0, 0]` for none."""
    steps, levels = [], codes.shape[1]
    for start in range(0, len(post_ids), ENCODED_ROWS):
        rows, count = slice(start, start + ENCODED_ROWS), min(ENCODED_ROWS, len(post_ids) - start)
        ids = [np.zeros(ENCODED_ROWS, np.uint64) for _ in range(2)]
        padded_codes = np.zeros((ENCODED_ROWS, levels), np.int64)
        for padded, column in zip((*ids, padded_codes), (post_ids, author_ids, codes), strict=True):
            padded[:count] = column[rows] if len(column) else 0
        steps.append(encoder.towers.encode_posts(ids[0], ids[1], padded_codes)[:count])
    return torch.cat(steps)


def in_bounds(codes: Int64s) -> NDArray[np.int32]:
    """Content codes as int32; those that no model can have stay so."""
    return codes.clip(-1, MAX_CODE + 1).astype(np.int32)


def check_rows(source: Posts, encoder: Encoder) -> None:
    """Raises CheckpointError if the file's vectors differ from the candidate tower's for the same posts (a sample of rows)."""
    sampled_rows = np.unique(np.linspace(0, source.posts - 1, min(CHECKED_ROWS, source.posts)).astype(np.int64))
    posts, authors = (
        np.concatenate([piece.view(np.uint64) for piece in _picked(source.column(name), sampled_rows)])
        for name in ("post_ids", "author_ids")
    )
    codes = np.concatenate(list(_picked(source.codes(), sampled_rows))).astype(np.int64)
    theirs = np.concatenate(list(_picked(source.vectors(encoder.manifest.config.width), sampled_rows)))
    _compare(theirs, encode(encoder, posts, authors, codes).numpy(), sampled_rows, encoder, "The file's vectors")


def check_corpus(stored: StoredCorpus, encoder: Encoder, progress: Callable[[int, int], None] | None = None) -> None:
    """Encode every post again. Raises CheckpointError if a vector differs from the candidate tower's."""
    corpus = stored.corpus
    for start in range(0, len(corpus), ENCODED_ROWS):
        rows = np.arange(start, min(start + ENCODED_ROWS, len(corpus)))
        ours = encode(encoder, corpus.post_ids[rows], corpus.author_ids[rows], corpus.codes_of(rows)).numpy()
        _compare(corpus.vectors[rows], ours, rows, encoder, f"Corpus {stored.path} is refused: its vectors")
        if progress:
            progress(int(rows[-1]) + 1, len(corpus))


def check_texts(stored: StoredCorpus) -> None:
    """Raises CheckpointError if a text is invalid or does not hash to the id in its row."""
    corpus = stored.corpus
    for start in range(0, len(corpus) if corpus.texts is not None else 0, ENCODED_ROWS):
        rows = np.arange(start, min(start + ENCODED_ROWS, len(corpus)))
        texts = [text for pair in corpus.texts_of(rows) for text in pair]
        ids = np.stack((corpus.post_ids[rows], corpus.author_ids[rows]), 1).ravel()
        if not all(map(is_text_id, texts)) or (text_ids(texts) != ids).any():
            raise CheckpointError(f"Corpus {stored.path} is refused: it has texts that are not those of its ids.")


def _picked(pieces: Iterator[Tensor], chosen_rows: NDArray[np.int64]) -> Iterator[NDArray[Any]]:
    start = 0
    for piece in pieces:
        rows = chosen_rows[(chosen_rows >= start) & (chosen_rows < start + len(piece))] - start
        yield piece.numpy()[rows]
        start += len(piece)


def _compare(
    theirs: NDArray[np.float32], ours: NDArray[np.float32], rows: NDArray[np.int64], encoder: Encoder, what: str
) -> None:
    tolerance = RETRIEVAL[encoder.towers.tables.post.dtype].posts
    off = np.nan_to_num(np.abs(theirs - ours), nan=np.inf).max(1)
    worst = int(off.argmax())
    if not off[worst] <= tolerance:
        raise CheckpointError(
            f"{what} are not those of {encoder.manifest.name} {encoder.manifest.version}: row {rows[worst]} differs by "
            f"{off[worst]:.3g}, and {int((off > tolerance).sum())} of {len(rows)} rows by more than {tolerance:g}. "
            "Name the retrieval checkpoint that made them."
        )
