"""Parses and writes `manifest.json` of a corpus: which model made the vectors, their number and file digests. Reads no vectors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from model.retrieval.inputs import AT_LEAST, UNCHANGED, Mark
from weights.errors import CheckpointError
from weights.format.manifest import (
    FORMAT_VERSION,
    Document,
    FileEntry,
    TensorEntry,
    check_keys,
    entries_content,
    parse_json_object,
)
from weights.text_ids import MAX_TEXT_BYTES, IdKind

KIND = "corpus"
MAX_POSTS = 2**31 - 1
MAX_TOPICS = 10_000
VECTORS = "vectors"
TEXTS = "texts"
COLUMNS = {"post_ids": "int64", "author_ids": "int64", "created_at": "int64", "topics": "int32"}
OPTIONAL_COLUMNS = ("created_at", "topics")


def file_of(tensor: str, mark: str = "") -> str:
    """The file that holds a tensor: one for vectors, one for all columns. `mark` tells a compaction's files from older ones."""
    return f"{'vectors' if tensor == VECTORS else 'posts'}{mark and '-'}{mark}.safetensors"


def mark_of(file: str) -> str:
    """The mark in a file's name, empty if it has none."""
    found = re.fullmatch(r"(?:vectors|posts)-([0-9a-f]{8})\.safetensors", file)
    return found[1] if found else ""


def corpus_tensors(
    columns: Iterable[str], posts: int, width: int, dtype: str, mark: str = "", text_width: int = 0
) -> dict[str, TensorEntry]:
    """The tensors of a corpus: these columns, and vectors of `dtype`. `text_width`: bytes of the longest text plus one."""
    shapes = {TEXTS: (posts, 2, text_width)}
    tensors = {
        name: TensorEntry(file_of(name, mark), (COLUMNS | {TEXTS: "uint8"})[name], shapes.get(name, (posts,)))
        for name in columns
    }
    return tensors | {VECTORS: TensorEntry(file_of(VECTORS, mark), dtype, (posts, width))}


@dataclass(frozen=True, slots=True)
class CorpusManifest(Document):
    """Everything about a corpus except its numbers. Raises CheckpointError for fields that contradict each other.

    `encoder` is the digest of the retrieval checkpoint that made the vectors, `encoder_name` its name and version, for display.
    `topics` are the names that the column `topics` indexes, -1 for none. `mark`: which changes it already contains. `digest` identifies
    the corpus, as in a checkpoint. `ids` is the encoder's kind of ids; text ids are stored in the column `texts`.
    """

    name: str
    version: str
    encoder: str
    encoder_name: str
    posts: int
    width: int
    topics: tuple[str, ...]
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    mark: Mark = UNCHANGED
    ids: IdKind = "uint64"
    digest: str = field(init=False)
    dtypes: ClassVar[Sequence[str]] = ("float32", "bfloat16", "int64", "int32", "uint8")

    def __post_init__(self) -> None:
        if not 0 < self.posts <= MAX_POSTS:
            raise CheckpointError(f"holds {self.posts} posts; 1 to {MAX_POSTS} are supported")
        if len(self.topics) > MAX_TOPICS or len(set(self.topics)) < len(self.topics):
            raise CheckpointError(f"must name at most {MAX_TOPICS} topics, each once")
        if any(type(topic) is not str or not 0 < len(topic) <= 100 for topic in self.topics):
            raise CheckpointError("has a topic that is no text of 1 to 100 characters")
        sequence, digest, position = self.mark
        if sequence < 0 or not re.fullmatch("([0-9a-f]{32})?", digest) or not AT_LEAST.fullmatch(position or "0"):
            raise CheckpointError(f"has no mark that a feed gives: {str(self.mark)[:200]}")
        self._check_tensors()
        self._sign()

    def _check_tensors(self) -> None:
        for name, entry in self.tensors.items():
            shape: tuple[int, ...] = (self.posts, self.width) if name == VECTORS else (self.posts,)
            if name == TEXTS and 1 < entry.shape[-1] <= MAX_TEXT_BYTES + 1:
                shape = (self.posts, 2, entry.shape[-1])
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

    def _content(self) -> dict[str, Any]:
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.init}
        mark, ids = values.pop("mark"), values.pop("ids")
        values |= {"mark": mark._asdict()} if any(mark) else {}  # so that older corpora keep their digests
        values |= {} if ids == "uint64" else {"ids": ids}
        return {"format_version": FORMAT_VERSION, "kind": KIND, **values, **entries_content(self.files, self.tensors)}

    @property
    def first_mark(self) -> Mark:
        """The mark of the corpus before the changes in its log."""
        sequence, digest, position = self.mark
        return Mark(sequence, digest or self.digest[:32], position)

    def label(self, mark: Mark) -> str:
        """The version to display after changes: `v1` after twelve changes is `v1+12`."""
        return f"{re.sub(r'[+][0-9]+$', '', self.version)}+{mark.sequence}" if mark.sequence else self.version

    @classmethod
    def from_json(cls, raw: bytes) -> CorpusManifest:
        """Parse what `to_json` wrote. Raises CheckpointError for anything else."""
        values = parse_json_object(raw)
        if values.get("kind") != KIND:
            raise CheckpointError("describes no corpus, but a checkpoint or something else")
        keys = {"kind": str, "encoder": str, "encoder_name": str, "posts": int, "width": int, "topics": list}
        read = cls._read(values, keys | ({"mark": dict} if "mark" in values else {}))
        if "mark" in read:
            check_keys(read["mark"], {"sequence": int, "digest": str, "position": str}, "mark")
            read["mark"] = Mark(**read["mark"])
        del read["kind"]
        manifest = cls(**read | {"topics": tuple(read["topics"])})
        manifest._check_written(raw, values["digest"])
        return manifest
