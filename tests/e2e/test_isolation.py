"""A candidate's numbers do not depend on what else is asked: not on the list, its order, the batch, or the neighbours in time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from loadtest.server import example

EXAMPLE = example()
POSTS = EXAMPLE["candidates"]
MORE = [{"post_id": str(number), "author_id": str(number)} for number in range(1, 100)]
LISTS = {"reversed": POSTS[::-1], "one": POSTS[:1], "two": POSTS[3:5], "many more": POSTS + MORE}


def numbers(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What belongs to each candidate alone: everything but its rank."""
    return {row["post_id"]: {key: row[key] for key in row if key != "rank"} for row in rows}


def ranked(client: httpx.Client, **changes: Any) -> dict[str, dict[str, Any]]:
    return numbers(client.post("/rank", json=EXAMPLE | changes).raise_for_status().json()["candidates"])


def test_other_candidates_change_no_bit(client: httpx.Client) -> None:
    whole = ranked(client)
    assert len({row["score"] for row in whole.values()}) > 1, "a checkpoint of zeros would rank nothing"
    for name, posts in LISTS.items():
        found = ranked(client, candidates=posts)
        assert {post: found[post] for post in found if post in whole} == {
            post["post_id"]: whole[post["post_id"]] for post in posts if post["post_id"] in whole
        }, name
    assert ranked(client, user_id=5) != whole, "the user does change them"
    assert ranked(client, history=EXAMPLE["history"][:-1]) != whole


def test_the_other_requests_of_a_batch_change_no_bit(client: httpx.Client) -> None:
    bodies = [EXAMPLE | {"candidates": posts, "user_id": user} for user, posts in enumerate(LISTS.values(), 1)]
    alone = [numbers(client.post("/rank", json=body).json()["candidates"]) for body in bodies]
    batch = client.post("/rank/batch", json={"requests": bodies}).json()["results"]
    assert [numbers(each["candidates"]) for each in batch] == alone


def test_requests_that_share_a_forward_change_no_bit(client: httpx.Client) -> None:
    bodies = [EXAMPLE | {"user_id": user, "history": EXAMPLE["history"][user % 7 :]} for user in range(1, 25)]
    alone = [numbers(client.post("/rank", json=body).json()["candidates"]) for body in bodies]
    with ThreadPoolExecutor(12) as pool:
        together = pool.map(lambda body: client.post("/rank", json=body).json()["candidates"], bodies * 3)
        assert [numbers(rows) for rows in together] == alone * 3
