"""A change of posts as it comes: what is read, and what is refused with the path of the first problem."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.corpus.posts import MAX_POSTS, read_change
from app.errors import InvalidRequest, MalformedJson, TooLarge

POST = {"post_id": "18446744073709551615", "author_id": 7, "created_at": 1_780_000_000, "topic": "art"}


def test_ids_times_and_topics_are_read() -> None:
    body = json.dumps({"upsert": [POST, {"post_id": 2, "author_id": 0}], "delete": ["1", 3]}).encode()
    change = read_change(body)
    assert change.delete.tolist() == [1, 3]
    rows = change.upsert
    assert (rows.post_ids.tolist(), rows.author_ids.tolist()) == ([2**64 - 1, 2], [7, 0])
    assert (rows.created_at.tolist(), rows.topics) == ([1_780_000_000, 0], ["art", None])
    assert (rows.texts, change.delete_texts) == ([], [])


def test_text_ids_are_kept_as_texts() -> None:
    body = json.dumps({"upsert": [{"post_id": "a", "author_id": "é"}], "delete": ["b"]}).encode()
    change = read_change(body, "text")
    assert (change.upsert.texts, change.delete_texts) == ([("a", "é")], ["b"])


def changed(**fields: Any) -> dict[str, Any]:
    return {"upsert": [{"post_id": 5, "author_id": 1}, POST | fields]}


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        (changed(created_at=1_780_000_000_000), "upsert[1].created_at", "Unix seconds.*milliseconds"),
        (changed(created_at=-5), "upsert[1].created_at", "Unix seconds"),
        (changed(post_id=-1), "upsert[1].post_id", "64-bit"),
        (changed(author_id="01"), "upsert[1].author_id", "64-bit"),
        (changed(post_id=0), "", "must not name the post 0"),
        (changed(post_id=5), "", "must name each post once"),
        (changed(topic=""), "upsert[1].topic", "length"),
        (changed(more=1), "upsert[1]", "unknown field"),
        ({"upsert": [{"post_id": 1}]}, "upsert[0].author_id", "required"),
        ({"delete": [1, "x"]}, "delete[1]", "64-bit"),
        ({"delete": [1], "upsert": [{"post_id": "1", "author_id": 1}]}, "", "must name each post once"),
        ({}, "", "must name at least one post"),
        ({"delete": ["0"]}, "", "must not name the post 0"),
        ([], "", "object"),
    ],
)
def test_what_is_no_change_is_refused(body: Any, field: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as refused:
        read_change(json.dumps(body).encode())
    assert refused.value.problems[0].field == field


def test_bodies_that_are_no_json_or_too_large_are_refused() -> None:
    with pytest.raises(MalformedJson):
        read_change(b"{")
    with pytest.raises(TooLarge, match="at most 10000"):
        read_change(json.dumps({"delete": [*range(1, MAX_POSTS + 2)]}).encode())
    with pytest.raises(TooLarge, match="values"):
        read_change(b'{"delete": [' + b",".join([b"[" * 10] * 10_000))
    assert len(read_change(json.dumps({"delete": [*range(1, MAX_POSTS + 1)]}).encode()).delete) == MAX_POSTS
