"""Changes to a corpus: bytes → checked columns of posts that come and ids of posts that go."""

from __future__ import annotations

import numpy as np

from app.budgets import MAX_CHANGE_VALUES, MAX_CHANGED
from app.errors import InvalidRequest, TooLarge
from app.request.body import read
from app.request.ids import ID_RULES, read_ids
from app.request.rules import check, struct_rule
from app.request.schema import Change
from app.request.vocabulary import Vocabulary
from model.retrieval.inputs import PostChange, PostRows
from weights.text_ids import IdKind

RULES = {ids: struct_rule(Change, Vocabulary((), {}, 0, np.zeros(0), ids=ids)) for ids in ID_RULES}


def read_change(body: bytes | bytearray, ids: IdKind = "uint64") -> PostChange:
    """Read a change. `ids`: the kind of ids in the corpus.

    Raises MalformedJson, InvalidRequest, or TooLarge for more than `MAX_CHANGED` posts."""
    value = read(body, MAX_CHANGE_VALUES)
    check(value, RULES[ids])
    posts, delete = value.get("upsert", []), value.get("delete", [])
    if (count := len(posts) + len(delete)) > MAX_CHANGED:
        raise TooLarge(f"{count} posts, and at most {MAX_CHANGED} are changed at once.")
    rows = PostRows(
        read_ids([post["post_id"] for post in posts], ids),
        read_ids([post["author_id"] for post in posts], ids),
        np.array([post.get("created_at", 0) for post in posts], np.int64),
        [post.get("topic") for post in posts],
        [(post["post_id"], post["author_id"]) for post in posts] if ids == "text" else [],
    )
    change = PostChange(read_ids(delete, ids), rows, delete if ids == "text" else [])
    try:
        change.check()
    except ValueError:
        raise InvalidRequest(
            [("", "must name posts to upsert or delete, each of them once, and none of the id 0")]
        ) from None
    return change
