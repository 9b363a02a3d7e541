"""Writes the log of changes that earlier versions kept beside a corpus. Not a test itself."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from model.retrieval.inputs import Change
from weights.corpus.manifest import CorpusManifest

MAGIC, END = b"\2\0\0\0changes\n", b"\xff"


def log_file(directory: Path, manifest: CorpusManifest) -> Path:
    return directory / f"changes-{manifest.digest[:16]}.log"


def log_of(manifest: CorpusManifest, changes: list[Change]) -> bytes:
    """As 913ff3a0 wrote it."""
    data = bytearray(MAGIC)
    for payload in (json.dumps({"corpus": manifest.digest}).encode(), *map(_payload, changes)):
        head = len(payload).to_bytes(4, "little") + _digest(payload)
        data += head + _digest(len(data).to_bytes(8, "little") + head) + payload + END
    return bytes(data)


def _payload(change: Change) -> bytes:
    posts = change.posts
    ids, authors = (
        zip(*posts.texts, strict=True) if posts.texts else (posts.post_ids.tolist(), posts.author_ids.tolist())
    )
    head = {
        "delete": change.delete_texts or change.delete.tolist(),
        "post_ids": ids,
        "author_ids": authors,
        "created_at": posts.created_at.tolist(),
        "topics": posts.topics,
        "mark": change.mark,
    }
    return json.dumps(head).encode() + b"\n" + np.ascontiguousarray(posts.vectors, np.float32).tobytes()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()
