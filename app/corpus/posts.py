"""Reads a change of posts, of `POST /admin/posts` or of an entry of the feed: JSON → `PostChange`."""

from __future__ import annotations

from operator import attrgetter

import msgspec
import numpy as np
from msgspec import UNSET

from app import schema
from app.errors import InvalidRequest, TooLarge
from app.features import ids_of
from model.inputs import Ids
from model.retrieval.inputs import PostChange, PostRows, rows_of_codes
from weights.text_ids import IdKind
from weights.values import codes_problem, time_problem

MAX_POSTS = 10_000
"""Of one change: searches wait while its posts are indexed."""
MAX_VALUES = 60_000

POSTS = msgspec.json.Decoder(schema.PostsChange)


def read_change(body: bytes | bytearray, ids: IdKind = "uint64") -> PostChange:
    """Read `{"upsert": [{"post_id", "author_id", "created_at", "topic", "codes"}], "delete": [ids]}`. `ids`: the kind of ids in the corpus.

    Raises MalformedJson, InvalidRequest, and TooLarge for more than `MAX_POSTS` posts.
    """
    schema.check_cost(body, MAX_VALUES)
    request = schema.decode(POSTS, body)
    posts, count = request.upsert, len(request.upsert) + len(request.delete)
    if count > MAX_POSTS:
        raise TooLarge(f"{count} posts, but at most {MAX_POSTS} can be changed at once.")
    for row, post in enumerate(posts):
        if problem := time_problem(post.created_at):
            raise InvalidRequest(f"upsert[{row}].created_at", problem)
        if post.codes and (problem := codes_problem(post.codes)):
            raise InvalidRequest(f"upsert[{row}].codes", problem)
    rows = PostRows(
        _ids(posts, "post_id", ids),
        _ids(posts, "author_id", ids),
        np.array([post.created_at for post in posts], np.int64),
        [None if post.topic is UNSET else post.topic for post in posts],
        [(str(post.post_id), str(post.author_id)) for post in posts] if ids == "text" else [],
        rows_of_codes([post.codes or () for post in posts]),
    )
    delete = ids_of(request.delete, ids, "delete")
    change = PostChange(delete, rows, [*map(str, request.delete)] if ids == "text" else [])
    try:
        change.check()
    except ValueError as error:
        raise InvalidRequest("", str(error)) from None
    return change


def _ids(posts: list[schema.PostUpsert], field: str, kind: IdKind) -> Ids:
    try:
        return ids_of([*map(attrgetter(field), posts)], kind, "upsert")
    except InvalidRequest as error:
        ((path, message),) = error.problems
        raise InvalidRequest(f"{path}.{field}", message) from None
