"""Marks and merged changes: what replicas are compared by, and batches that leave the same posts in the same order."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from model.retrieval.inputs import Change, Mark, NewPosts, PostChange, PostRows
from weights.corpus.records import decoded, encoded, mark_after, no_posts

START = Mark(0, "00" * 16)
POSTS = st.lists(st.integers(1, 6), max_size=3, unique=True)
CHANGES = st.lists(st.tuples(POSTS, POSTS, st.integers(1, 2**64 - 1)), min_size=1, max_size=12)


def change(delete: list[int], upsert: list[int], author: int = 9) -> PostChange:
    ids, gone = np.array(upsert, np.uint64), np.array([post for post in delete if post not in upsert], np.uint64)
    rows = PostRows(ids, np.full(len(ids), author, np.uint64), np.arange(len(ids)), ["a", None, "b"][: len(ids)])
    return PostChange(gone, rows)


def made(changes: list[PostChange]) -> list[tuple[int, int, int, str | None]]:
    """The posts that are left of 1 to 6 by author 0, in their order."""
    left = {post: (post, 0, 0, None) for post in range(1, 7)}
    for one in changes:
        for post in one.delete.tolist():
            left.pop(post, None)
        upsert = one.upsert
        for row in zip(
            *(column.tolist() for column in (upsert.post_ids, upsert.author_ids, upsert.created_at)),
            upsert.topics,
            strict=True,
        ):
            left.pop(row[0], None)
            left[row[0]] = row
    return list(left.values())


@given(CHANGES)
def test_merged_changes_leave_the_same_posts_in_the_same_order(wanted: list[tuple[list[int], list[int], int]]) -> None:
    changes = [change(*one) for one in wanted]
    merged = PostChange.merged(changes)
    assert made([merged]) == made(changes)
    assert not set(merged.delete.tolist()) & set(merged.upsert.post_ids.tolist())
    assert merged.upsert.author_ids.dtype == np.uint64


@given(CHANGES, st.data())
def test_one_change_more_less_or_elsewhere_has_another_digest(
    wanted: list[tuple[list[int], list[int], int]], data: st.DataObject
) -> None:
    def digest(changes: list[PostChange]) -> str:
        mark = START
        for one in changes:
            mark = mark_after(mark, one)
        assert mark.sequence == len(changes)
        return mark.digest

    changes = [change(*one) for one in wanted]
    assert digest(changes) == digest([change(*one) for one in wanted])
    place = data.draw(st.integers(0, len(changes) - 1))
    assert digest(changes) != digest(changes[:place] + changes[place + 1 :])
    assert digest(changes) != digest([*changes[:place], change([], [5], 77), *changes[place + 1 :]])


def test_a_record_holds_its_mark() -> None:
    posts = NewPosts(
        np.array([2**64 - 1], np.uint64), np.array([7], np.uint64), np.array([5]), ["x"], np.ones((1, 3), np.float32)
    )
    mark = Mark(4, "ab" * 16, "12-0")
    one = Change(np.array([3], np.uint64), posts, mark)
    again = decoded(encoded(one), 3)
    assert again.mark == mark
    assert again.posts.vectors.tobytes() == posts.vectors.tobytes()
    assert len(no_posts(3)) == 0


def test_merged_records_are_the_merged_changes() -> None:
    wanted = [change([], [1, 2]), change([1], [3, 2], 7), change([9, 3], [1], 8)]
    columns = [(one.upsert.post_ids, one.upsert.author_ids, one.upsert.created_at, one.upsert.topics) for one in wanted]
    records = [
        Change(one.delete, NewPosts(*each, np.repeat(each[0].astype(np.float32), 3).reshape(-1, 3)), Mark(number))
        for number, (one, each) in enumerate(zip(wanted, columns, strict=True))
    ]
    found, merged = Change.merged(records), PostChange.merged(wanted)
    assert found.mark == Mark(2)
    assert found.delete.tolist() == merged.delete.tolist() == [9, 3]
    for name in ("post_ids", "author_ids", "created_at", "topics", "texts"):
        assert list(getattr(found.posts, name)) == list(getattr(merged.upsert, name)), name
    assert found.posts.post_ids.tolist() == found.posts.vectors[:, 2].tolist() == [2, 1]


def test_a_mark_reaches_numbers_and_positions() -> None:
    mark = Mark(12, "", "1764000000000-3")
    for wanted, is_reached in (
        ("", True), ("12", True), ("13", False), ("1764000000000-3", True), ("1764000000000-4", False),
        ("1763999999999-9", True), ("999-9", True), ("1764000000000-10", False),
    ):  # fmt: skip
        assert mark.reaches(wanted) is is_reached, wanted
    assert not Mark(12).reaches("0-0"), "a corpus without a feed has no position"
