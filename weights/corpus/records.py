"""Converts changes to change-log records and back, and computes a corpus's mark after a change. Opens no file."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from model.retrieval.inputs import NO_IDS, Change, Mark, NewPosts, PostChange, PostRows
from weights.text_ids import IdKind, is_text_id, text_ids

HEADER_BYTES = 20
END = b"\xff"  # not 0: if a crash leaves a file too long, its unwritten part reads as zeros


def digest_of(data: bytes) -> bytes:
    """BLAKE2b of `data`, 8 bytes."""
    return hashlib.blake2b(data, digest_size=8).digest()


def no_posts(width: int) -> NewPosts:
    """Empty posts, for a change that only deletes."""
    return NewPosts(NO_IDS, NO_IDS, np.empty(0, np.int64), [], np.empty((0, width), np.float32))


def mark_after(mark: Mark, change: Change | PostChange) -> Mark:
    """The mark after one more change. It does not cover the vectors, which follow from the ids and the towers."""
    said = json.dumps(_said(change)).encode()
    digest = hashlib.blake2b(mark.digest.encode() + said, digest_size=16).hexdigest()
    return Mark(mark.sequence + 1, digest, mark.position)


def encoded(change: Change) -> bytes:
    """The payload of a record: a JSON object, a line feed, the new posts' vectors as float32."""
    head = _said(change) | {"mark": change.mark}
    return json.dumps(head).encode() + b"\n" + np.ascontiguousarray(change.posts.vectors, np.float32).tobytes()


def decoded(payload: bytes, width: int, ids: IdKind = "uint64") -> Change:
    """Parse a record's payload. Raises ValueError, KeyError, TypeError or OverflowError if it is not a change."""
    head, _, vectors = payload.partition(b"\n")
    values: dict[str, Any] = json.loads(head)
    said = [values[name] for name in ("post_ids", "author_ids", "delete")]
    if ids == "text" and not all(is_text_id(text) for texts in said for text in texts):
        raise ValueError("an id that is no text")
    columns = [text_ids(each) if ids == "text" else np.array(each, np.uint64) for each in said]
    posts = NewPosts(
        columns[0],
        columns[1],
        np.array(values["created_at"], np.int64),
        values["topics"],
        np.frombuffer(vectors, np.float32).reshape(len(said[0]), width).copy(),
        list(zip(said[0], said[1], strict=True)) if ids == "text" else [],
    )
    return Change(columns[2], posts, Mark(*values["mark"]), said[2] if ids == "text" else [])


def record(payload: bytes, place: int) -> bytes:
    """The bytes of a record that starts `place` bytes into the file."""
    head = len(payload).to_bytes(4, "little") + digest_of(payload)
    return head + digest_of(place.to_bytes(8, "little") + head) + payload + END


def record_at(raw: bytes, at: int, start: int) -> tuple[bytes | None, int]:
    """The payload of the record at `raw[at:]` and the offset where it ends; `raw` is the file from `start` on. After a crash the payload
    is None and the offset the end of `raw`; for damage they are None and 0.

    A crash leaves a file that is too short, or one whose last record lacks its end, with nothing behind it.
    """
    body = at + HEADER_BYTES
    head = raw[at:body]
    if head[12:] != digest_of((start + at).to_bytes(8, "little") + head[:12]):
        return None, len(raw) if len(raw.rstrip(b"\0")) < body else 0
    stop = body + int.from_bytes(head[:4], "little") + len(END)
    payload = raw[body : stop - len(END)]
    if raw[stop - len(END) : stop] == END and digest_of(payload) == head[4:12]:
        return payload, stop
    is_cut = len(raw) < stop or (len(raw) == stop and len(raw.rstrip(b"\0")) < stop)
    return None, len(raw) if is_cut else 0


def _said(change: Change | PostChange) -> dict[str, Any]:
    """A change as JSON values: ids as numbers, or as texts if it has them."""
    posts: NewPosts | PostRows = change.upsert if isinstance(change, PostChange) else change.posts
    post_ids, author_ids = zip(*posts.texts, strict=True) if posts.texts else (posts.post_ids, posts.author_ids)
    ids = {"delete": change.delete_texts or change.delete, "post_ids": post_ids, "author_ids": author_ids}
    said = {name: values.tolist() if isinstance(values, np.ndarray) else list(values) for name, values in ids.items()}
    return said | {"created_at": posts.created_at.tolist(), "topics": list(posts.topics)}
