"""Records of a change log: a change as bytes and back, and how a corpus's mark moves on with it. Opens no file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from model.inputs import Ids
from model.retrieval.inputs import Change, Mark, NewPosts
from weights.corpus.old_changes import digest_of

HEADER_BYTES = 20
END = b"\xff"  # not 0: a file that a crash leaves too long reads as zeros where nothing was written
NO_IDS = np.empty(0, np.uint64)


class Posts(Protocol):
    """What a change says of the posts that come: as `PostRows` and `NewPosts`."""

    @property
    def post_ids(self) -> Ids: ...
    @property
    def author_ids(self) -> Ids: ...
    @property
    def created_at(self) -> np.ndarray[Any, np.dtype[np.int64]]: ...
    @property
    def topics(self) -> Sequence[str | None]: ...


def no_posts(width: int) -> NewPosts:
    """For a change that only deletes."""
    return NewPosts(NO_IDS, NO_IDS, np.empty(0, np.int64), [], np.empty((0, width), np.float32))


def mark_after(mark: Mark, delete: Ids, posts: Posts) -> Mark:
    """Of a corpus with this mark after one more change, whose vectors follow from its ids and the towers."""
    said = json.dumps(_said(delete, posts)).encode()
    digest = hashlib.blake2b(mark.digest.encode() + said, digest_size=16).hexdigest()
    return Mark(mark.sequence + 1, digest, mark.position)


def encoded(change: Change) -> bytes:
    """The payload of a record: a JSON object, a line feed, the new posts' vectors as float32."""
    head = _said(change.delete, change.posts) | {"mark": change.mark}
    return json.dumps(head).encode() + b"\n" + np.ascontiguousarray(change.posts.vectors, np.float32).tobytes()


def decoded(payload: bytes, width: int, before: Mark) -> Change:
    """Raises ValueError, KeyError, TypeError or OverflowError for what is no change. `before`: the mark that it follows, from which the
    mark is made that records of before November 2026 do not hold."""
    head, _, vectors = payload.partition(b"\n")
    values: dict[str, Any] = json.loads(head)
    posts = NewPosts(
        np.array(values["post_ids"], np.uint64),
        np.array(values["author_ids"], np.uint64),
        np.array(values["created_at"], np.int64),
        values["topics"],
        np.frombuffer(vectors, np.float32).reshape(len(values["post_ids"]), width).copy(),
    )
    delete = np.array(values["delete"], np.uint64)
    return Change(delete, posts, Mark(*values["mark"]) if "mark" in values else mark_after(before, delete, posts))


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


def _said(delete: Ids, posts: Posts) -> dict[str, Any]:
    ids: dict[str, Ids] = {"delete": delete, "post_ids": posts.post_ids, "author_ids": posts.author_ids}
    said: dict[str, Any] = {name: values.tolist() for name, values in ids.items()}
    return said | {"created_at": posts.created_at.tolist(), "topics": list(posts.topics)}
