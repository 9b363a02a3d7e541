"""Parses and writes `manifest.json` of a corpus: which model made the vectors, their number and file digests. Reads no vectors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from model.bounds import MAX_CODE_LEVELS
from model.retrieval.inputs import AT_LEAST, UNCHANGED, Mark
from weights.errors import CheckpointError
from weights.format.manifest import Document, Dtype, TensorEntry
from weights.text_ids import MAX_TEXT_BYTES

KIND = "corpus"
MAX_POSTS = 2**31 - 1
VECTORS = "vectors"
TEXTS = "texts"
CODES = "codes"
COLUMNS: dict[str, Dtype] = {"post_ids": "int64", "author_ids": "int64", "created_at": "int64", "topics": "int32",
                             CODES: "int32"}  # fmt: skip
OPTIONAL_COLUMNS = ("created_at", "topics", CODES)


def file_of(tensor: str, mark: str = "") -> str:
    """The file that holds a tensor: one for vectors, one for all columns. `mark`: of one that an earlier version compacted in place."""
    return f"{'vectors' if tensor == VECTORS else 'posts'}{mark and '-'}{mark}.safetensors"


def mark_of(file: str) -> str:
    """The mark in a file's name, empty if it has none."""
    match = re.fullmatch(r"(?:vectors|posts)-([0-9a-f]{8})\.safetensors", file)
    return match[1] if match else ""


def corpus_tensors(
    columns: Iterable[str], posts: int, width: int, dtype: Dtype, text_width: int = 0, code_levels: int = 0
) -> dict[str, TensorEntry]:
    """The tensors of a corpus: these columns, and vectors of `dtype`. `text_width`: bytes of the longest text plus one."""
    shapes: dict[str, tuple[int, ...]] = {TEXTS: (posts, 2, text_width), CODES: (posts, code_levels)}
    tensors = {
        name: TensorEntry(file_of(name), "uint8" if name == TEXTS else COLUMNS[name], shapes.get(name, (posts,)))
        for name in columns
    }
    return tensors | {VECTORS: TensorEntry(file_of(VECTORS), dtype, (posts, width))}


class CorpusManifest(Document, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Everything about a corpus except its numbers. Raises CheckpointError for fields that contradict each other.

    `encoder` is the `model_digest` of the retrieval checkpoint that made the vectors, so that relabelling it changes nothing. Older corpora
    have the digest of its manifest. `encoder_name` is its name and version, for display.
    `topics` are the names that the column `topics` indexes, -1 for none. `mark`: which changes it already contains. `ids` is the
    encoder's kind of ids; text ids are stored in the column `texts`.
    """

    encoder: str
    encoder_name: str
    posts: int
    width: int
    topics: tuple[str, ...]
    mark: Mark = UNCHANGED

    def __post_init__(self) -> None:
        if not 0 < self.posts <= MAX_POSTS:
            raise CheckpointError(f"holds {self.posts} posts; 1 to {MAX_POSTS} are supported")
        if len(set(self.topics)) < len(self.topics):
            raise CheckpointError("must name each topic once")
        if any(not 0 < len(topic) <= 100 for topic in self.topics):
            raise CheckpointError("has a topic that is not a text of 1 to 100 characters")
        sequence, digest, position = self.mark
        if sequence < 0 or not re.fullmatch("([0-9a-f]{32})?", digest):
            raise CheckpointError(f"has an invalid mark: sequence {sequence}, digest {digest[:40]!r}")
        if position and not ("-" in position and AT_LEAST.fullmatch(position)):
            raise CheckpointError(
                f"has a feed position that is not two numbers and a dash, such as 1764000000000-0: {position[:40]!r}"
            )
        self._check_tensors()
        Document.__post_init__(self)

    def _check_tensors(self) -> None:
        for name, entry in self.tensors.items():
            shape: tuple[int, ...] = (self.posts, self.width) if name == VECTORS else (self.posts,)
            if name == TEXTS and 1 < entry.shape[-1] <= MAX_TEXT_BYTES + 1:
                shape = (self.posts, 2, entry.shape[-1])
            if name == CODES and len(entry.shape) == 2 and entry.shape[1] <= MAX_CODE_LEVELS:
                shape = (self.posts, entry.shape[1])
            dtypes = ("float32", "bfloat16") if name == VECTORS else ((COLUMNS | {TEXTS: "uint8"}).get(name),)
            if entry.file != file_of(name, mark_of(entry.file)) or entry.dtype not in dtypes or entry.shape != shape:
                raise CheckpointError(
                    f"lists tensor {name[:100]} in a file, dtype or shape that a corpus does not have"
                )
        texts = {TEXTS} if self.ids == "text" else set()
        missing = ({VECTORS, *COLUMNS} | texts) - set(OPTIONAL_COLUMNS) - set(self.tensors)
        if not texts and TEXTS in self.tensors:
            raise CheckpointError("lists texts, but its ids are not texts")
        if missing or (self.topics and "topics" not in self.tensors):
            raise CheckpointError(f"does not list all tensors of a corpus: {', '.join(sorted(missing)) or 'topics'}")

    def specifics(self) -> dict[str, Any]:
        """See `Document.specifics`. `mark` is left out where it says nothing, so that older corpora keep their digests."""
        return {
            "kind": KIND,
            "encoder": self.encoder,
            "encoder_name": self.encoder_name,
            "posts": self.posts,
            "width": self.width,
            "topics": list(self.topics),
            **({"mark": self.mark._asdict()} if any(self.mark) else {}),
        }

    @property
    def first_mark(self) -> Mark:
        """The mark of the corpus before the changes since it was built."""
        sequence, digest, position = self.mark
        return Mark(sequence, digest or self.digest[:32], position)

    @property
    def changes_name(self) -> str:
        """The file in the corpus's directory that has its changes, if there are any: see `weights.corpus.changes`."""
        return f"changes-{self.digest[:16]}.sqlite"

    def label(self, mark: Mark) -> str:
        """The version to display after changes: `v1` after twelve changes is `v1+12`."""
        return f"{re.sub(r'[+][0-9]+$', '', self.version)}+{mark.sequence}" if mark.sequence else self.version

    @classmethod
    def fields_of(cls, values: dict[str, Any]) -> dict[str, Any]:
        """See `Document.fields_of`."""
        if values.pop("kind", None) != KIND:
            raise CheckpointError("describes a checkpoint or something else, not a corpus")
        mark = values.get("mark")
        if isinstance(mark, dict) and mark.keys() == set(Mark._fields):
            values["mark"] = [mark[name] for name in Mark._fields]
        return values
