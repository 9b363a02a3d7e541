"""Changes to a corpus: bytes → checked columns of posts that come and ids of posts that go. Not for what becomes of them."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import numpy as np

from app.budgets import MAX_CHANGE_VALUES, MAX_CHANGED
from app.errors import InvalidRequest, TooLarge
from app.request.body import check_cost
from app.request.ids import read_ids
from app.request.schema import Change
from app.request.strict_json import parse, refuse_duplicates
from model.retrieval.inputs import PostChange, PostRows

RULE = (
    'must be {"upsert": [{"post_id", "author_id", "created_at", "topic"}], "delete": [ids]} with each post once: ids are unsigned '
    "64-bit integers or decimal strings, a post_id is not 0; created_at and topic may be left out"
)


_CHANGE = msgspec.json.Decoder(Change)
_ENCODER = msgspec.json.Encoder()


def read_change(body: bytes | bytearray) -> PostChange:
    """Raises MalformedJson, InvalidRequest, or TooLarge for more than `MAX_CHANGED` posts."""
    check_cost(body, MAX_CHANGE_VALUES)
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, OverflowError):
        typed = _CHANGE.decode(body)
        refuse_duplicates(body, _ENCODER.encode(typed))
        return _checked(typed)
    parse(body)  # raises where it is no JSON
    raise InvalidRequest([("", RULE)])


def _checked(typed: Change) -> PostChange:
    """Raises ValueError or OverflowError where the change is not right."""
    posts = typed.upsert or []
    rows = PostRows(
        read_ids([post.post_id for post in posts]),
        read_ids([post.author_id for post in posts]),
        np.array([post.created_at or 0 for post in posts], np.int64),
        [post.topic or None for post in posts],
    )
    delete = read_ids(typed.delete or [])
    change = PostChange(delete, rows)
    count = len(rows.post_ids) + len(delete)
    if count > MAX_CHANGED:
        raise TooLarge(f"{count} posts, and at most {MAX_CHANGED} are changed at once.")
    change.check()
    return change
