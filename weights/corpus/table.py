"""Reads a corpus's posts from Parquet, JSON lines or CSV, with integer or text ids. Refuses texts whose hashes collide."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.retrieval.corpus import packed
from weights.corpus.importer import PIECE_ROWS, REPRESENTATIONS, Posts, in_bounds
from weights.corpus.manifest import CODES, TEXTS
from weights.errors import CheckpointError
from weights.table_files import open_table, place_of, tables_of
from weights.tables import ID_TYPES, Place, TableError, column_of, ids_of, rows_of_lists, texts_of
from weights.text_ids import IdKind, collision

IDS = ("post_ids", "author_ids")
FURTHER = {"created_at": pa.int64(), "topics": pa.string()}


class PostsTable(Posts):
    """A file, or a directory of files, with one row per post: `post_ids`, `author_ids`, and optionally `created_at`, `topics` and `codes`,
    where null means unknown. Raises TableError for a column that cannot be read, CheckpointError if two texts have one hash."""

    def __init__(self, path: Path, ids: IdKind, topics: Path | None = None) -> None:
        super().__init__(path, ids, topics)
        self._source = open_table(path, dict.fromkeys(IDS, ID_TYPES[ids]) | FURTHER)
        names = self._source.schema.names
        if missing := set(IDS) - set(names):
            raise TableError(f"{self._source.files[0]} lacks the column {min(missing)}: a post has {' and '.join(IDS)}")
        self.posts = self._source.count_rows()
        self.columns = [*IDS, *(name for name in FURTHER if name in names or (name == "topics" and topics))]
        if CODES in names:
            levels = (rows_of_lists(table, place).shape[1] for table, place in self._tables(CODES))
            self.code_levels = max(levels, default=0)
        if self.code_levels:  # not all lists are empty
            self.columns.append(CODES)
        self.notes = [f"Column {name} is not read." for name in names if name not in (*IDS, *FURTHER, CODES)]
        if REPRESENTATIONS in names:
            self.notes.append("Vectors are read only from npz files.")
        if ids == "text":
            self.columns.append(TEXTS)
            for name in IDS:
                self._check_texts(name)

    def _column(self, name: str) -> Iterator[Tensor]:
        for table, place in self._tables(*(IDS if name == TEXTS else [name])):
            if name == TEXTS:
                pairs = zip(*(texts_of(table, column, place).to_pylist() for column in IDS), strict=True)
                yield torch.from_numpy(packed(list(pairs), self.text_width).copy())
            elif name == CODES:
                yield torch.from_numpy(in_bounds(rows_of_lists(table, place, self.code_levels)))
            elif name in IDS:
                yield torch.from_numpy(ids_of(table, name, self.ids, place).view(np.int64).copy())
            else:
                yield torch.from_numpy(column_of(table, name, pa.int64(), place, 0).copy())

    def place(self, row: int) -> str:
        """See `Posts.place`."""
        return place_of(self._source, row)

    def _texts(self) -> Iterator[NDArray[Any]]:
        for table, place in self._tables("topics"):
            topics = column_of(table, "topics", pa.string(), place, "")
            if rows := [row for row, topic in enumerate(topics) if "\0" in topic]:  # numpy drops one at the end
                raise TableError(f"{place(rows[0])}: column topics holds a NUL, which no topic may have")
            yield topics.astype(str)

    def _tables(self, *names: str) -> Iterator[tuple[pa.Table, Place]]:
        return tables_of(self._source, PIECE_ROWS, list(names))

    def _listed(self, name: str) -> Iterator[list[str]]:
        for table, place in self._tables(name):
            yield texts_of(table, name, place).to_pylist()

    def _check_texts(self, name: str) -> None:
        """Widen `text_width` to fit this column's texts. Raises CheckpointError if two of them collide."""
        for texts in self._listed(name):
            longest = max((len(text.encode()) for text in texts), default=0)
            self.text_width = max(self.text_width, longest + 1)
        if colliding := collision(lambda: self._listed(name)):
            raise CheckpointError(
                f"{self.path}: {colliding[0]!r} and {colliding[1]!r} in the column {name} have one hash, "
                "so a model cannot tell them apart."
            )
