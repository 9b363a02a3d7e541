"""Records of a change log: a change as bytes and back, and how a corpus's mark moves on with it. Opens no file."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from model.retrieval.inputs import Change, Mark, NewPosts, PostChange, PostRows
from weights.text_ids import IdKind, is_text_id, text_ids

HEADER_BYTES = 20
END = b"\xff"  # not 0: a file that a crash leaves too long reads as zeros where nothing was written
NO_IDS = np.empty(0, np.uint64)


def digest_of(data: bytes) -> bytes:
    """8 bytes."""
    return hashlib.blake2b(data, digest_size=8).digest()


def no_posts(width: int) -> NewPosts:
    """For a change that only deletes."""
    return NewPosts(NO_IDS, NO_IDS, np.empty(0, np.int64), [], np.empty((0, width), np.float32))


def mark_after(mark: Mark, change: Change | PostChange) -> Mark:
    """Of a corpus with this mark after one more change, whose vectors follow from its ids and the towers."""
    said = json.dumps(_said(change)).encode()
    digest = hashlib.blake2b(mark.digest.encode() + said, digest_size=16).hexdigest()
    return Mark(mark.sequence + 1, digest, mark.position)


def encoded(change: Change) -> bytes:
    """The payload of a record: a JSON object, a line feed, the new posts' vectors as float32."""
    head = _said(change) | {"mark": change.mark}
    return json.dumps(head).encode() + b"\n" + np.ascontiguousarray(change.posts.vectors, np.float32).tobytes()


def decoded(payload: bytes, width: int, ids: IdKind = "uint64") -> Change:
    """Raises ValueError, KeyError, TypeError or OverflowError for what is no change."""
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
    """A record that lies `place` bytes into the file."""
    head = len(payload).to_bytes(4, "little") + digest_of(payload)
    return head + digest_of(place.to_bytes(8, "little") + head) + payload + END


def record_at(raw: bytes, at: int, start: int) -> tuple[bytes | None, int]:
    """The payload of a record and where it stops, `raw` being the file from `start` on; None where a crash left what is there, and 0
    where that is damage.

    A crash leaves a file that is too short, or one whose last record lacks its end, and nothing behind it.
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
    """What a record says of a change: ids as numbers, or as texts where it has them."""
    posts: NewPosts | PostRows = change.upsert if isinstance(change, PostChange) else change.posts
    post_ids, author_ids = zip(*posts.texts, strict=True) if posts.texts else (posts.post_ids, posts.author_ids)
    ids = {"delete": change.delete_texts or change.delete, "post_ids": post_ids, "author_ids": author_ids}
    said = {name: values.tolist() if isinstance(values, np.ndarray) else list(values) for name, values in ids.items()}
    return said | {"created_at": posts.created_at.tolist(), "topics": list(posts.topics)}
