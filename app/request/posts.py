"""Changes to a corpus: bytes → checked columns of posts that come and ids of posts that go."""

from __future__ import annotations

import numpy as np

from app.budgets import MAX_CHANGE_VALUES, MAX_CHANGED
from app.errors import InvalidRequest, TooLarge
from app.request.body import read
from app.request.ids import read_ids
from app.request.rules import check, struct_rule
from app.request.schema import Change
from model.retrieval.inputs import PostChange, PostRows

RULE = struct_rule(Change)


def read_change(body: bytes | bytearray) -> PostChange:
    """Raises MalformedJson, InvalidRequest, or TooLarge for more than `MAX_CHANGED` posts."""
    value = read(body, MAX_CHANGE_VALUES)
    check(value, RULE)
    posts, delete = value.get("upsert", []), value.get("delete", [])
    if (count := len(posts) + len(delete)) > MAX_CHANGED:
        raise TooLarge(f"{count} posts, and at most {MAX_CHANGED} are changed at once.")
    rows = PostRows(
        read_ids([post["post_id"] for post in posts]),
        read_ids([post["author_id"] for post in posts]),
        np.array([post.get("created_at", 0) for post in posts], np.int64),
        [post.get("topic") for post in posts],
    )
    change = PostChange(read_ids(delete), rows)
    try:
        change.check()
    except ValueError:
        raise InvalidRequest(
            [("", "must name posts to upsert or delete, each of them once, and none of the id 0")]
        ) from None
    return change
