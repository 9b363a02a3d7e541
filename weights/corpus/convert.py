"""Reads the log of changes that earlier versions kept beside a corpus, once, into the table that replaced it.

The log began with MAGIC. A record was a header (the payload's length as uint32, little-endian; 8 bytes of BLAKE2b of the payload; 8 bytes
of BLAKE2b of the record's offset in the file and those twelve bytes), the payload and END. The first payload named the corpus; each of the
others was one change: a JSON object, a line feed, and the new posts' vectors as float32.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from model.retrieval.inputs import Change, Mark, NewPosts
from weights.corpus.changes import Changes
from weights.corpus.manifest import CorpusManifest
from weights.corpus.store import load_corpus, old_changes_file
from weights.errors import CheckpointError, NotStored
from weights.text_ids import text_ids

MAGIC = b"\2\0\0\0changes\n"
END = b"\xff"
HEADER_BYTES = 20


def convert(directory: Path) -> int:
    """Move the changes of a corpus from its old log to its table. Returns how many there were, 0 without a log.

    The log stays beside the table as `….log.converted`. A crash at any moment loses nothing: convert again. Raises CheckpointError.
    """
    stored = load_corpus(directory)
    path = old_changes_file(directory, stored.manifest)
    try:
        with path.open("rb") as file, closing(Changes(stored)) as changes:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as its writer held it
            logged = list(_changes_in(file.read(), stored.manifest, path))
            made = changes.read().mark.sequence  # by a conversion that was interrupted
            if missing := [change for change in logged if change.mark.sequence > made]:
                changes.record(missing)
            path.rename(path.with_name(f"{path.name}.converted"))
    except FileNotFoundError:
        return 0
    except BlockingIOError as error:
        raise NotStored(
            f"The log of changes {path} is in use by a service of an earlier version: stop it first."
        ) from error
    except OSError as error:
        raise CheckpointError(f"The log of changes {path} cannot be read: {error.strerror}.") from error
    return len(logged)


def _changes_in(raw: bytes, manifest: CorpusManifest, path: Path) -> Iterator[Change]:
    """The changes in a log. What a crash left of an unfinished record at the end was never acknowledged, and is left out."""
    if MAGIC.startswith(raw.rstrip(b"\0")):
        return  # a crash while the log was being started
    start, is_first = len(MAGIC) if raw.startswith(MAGIC) else 0, True
    try:
        while start < len(raw):
            payload, stop = _record_at(raw, start)
            if payload is None:
                return
            if not is_first:
                yield _change_in(payload, manifest)
            elif json.loads(payload) != {"corpus": manifest.digest}:
                raise CheckpointError(f"The log of changes {path} belongs to another corpus.")
            start, is_first = stop, False
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise CheckpointError(
            f"The log of changes {path} is damaged at byte {start}: what follows is not what was written. Restore the file; or, to go on "
            "without the changes from there on, cut it off at that byte (truncate -s)."
        ) from error


def _record_at(raw: bytes, start: int) -> tuple[bytes | None, int]:
    """The payload of the record there, and where the next one begins; None for one that a crash cut short. Raises ValueError for damage."""
    head, body = raw[start : start + HEADER_BYTES], start + HEADER_BYTES
    stop = body + int.from_bytes(head[:4], "little") + len(END)
    payload = raw[body : stop - len(END)]
    if head[12:] != _digest(start.to_bytes(8, "little") + head[:12]):
        is_cut = len(raw.rstrip(b"\0")) < body
    elif raw[stop - len(END) : stop] == END and _digest(payload) == head[4:12]:
        return payload, stop
    else:
        is_cut = len(raw) < stop or (len(raw) == stop and len(raw.rstrip(b"\0")) < stop)
    if not is_cut:
        raise ValueError("a record is not what was written")
    return None, len(raw)


def _change_in(payload: bytes, manifest: CorpusManifest) -> Change:
    head, _, vectors = payload.partition(b"\n")
    values: dict[str, Any] = json.loads(head)
    said = [values[name] for name in ("post_ids", "author_ids", "delete")]
    is_text = manifest.ids == "text"
    post_ids, author_ids, delete = [text_ids(each) if is_text else np.array(each, np.uint64) for each in said]
    posts = NewPosts(
        post_ids,
        author_ids,
        np.array(values["created_at"], np.int64),
        values["topics"],
        np.frombuffer(vectors, np.float32).reshape(len(post_ids), manifest.width),
        list(zip(said[0], said[1], strict=True)) if is_text else [],
    )
    return Change(delete, posts, Mark(*values["mark"]), said[2] if is_text else [])


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()
