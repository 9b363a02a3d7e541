"""Makes what the page of a running server shows of a checkpoint from its log: a request to begin with, and names behind the ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from model.inputs import Candidates, Context
from weights.format.manifest import EXAMPLE_NAME, NAMES_NAME, Manifest
from weights.format.writer import write_whole
from weights.lab.training.examples import Examples
from weights.lab.training.log import Log
from weights.tables import TableError

MOST_NAMED = {"users": 200, "authors": 2000, "posts": 5000}
MOST_TOPICS = 24  # a log with no more authors has them as topics, which the page colours
LIKED = 2


def write_example(
    directory: Path, manifest: Manifest, log: Log, names: Mapping[str, Any], user: str | None = None
) -> int:
    """Write `example.json` and `names.json` into a checkpoint's directory, in place of those there. Return the request's number.

    `names`: id → name or object with `name`, under `users`, `authors` and `posts`; ids without one are called after their id. `user`: whose
    request it is; without one, the request of the log's last tenth with the longest history and the most candidates.
    Raises TableError for a user without a request that has a history and two candidates, for names of another form, and for a log that has
    only the hashes of its ids.
    """
    if manifest.ids == "text" and log.texts is None:
        raise TableError("the log holds the hashes of texts, as `join` writes them: an example needs the texts")
    for kind in MOST_NAMED:
        if not isinstance(names.get(kind, {}), dict):
            raise TableError(f"the names of {kind} must be an object of id → name")
    examples = Examples(log, manifest.config)
    index = _request(examples, user)
    request = request_body(examples, index)
    named = _names(examples, request, names)
    for name, value in ((EXAMPLE_NAME, request), (NAMES_NAME, named)):
        write_whole(directory / name, partial(_write, json.dumps(value, indent=1, ensure_ascii=False) + "\n"))
    return int(log.request_id[examples.starts[index]])


def _write(text: str, path: Path) -> None:
    path.write_text(text)


def request_body(examples: Examples, index: int) -> dict[str, Any]:
    """Request `index` of the log as the body of `POST /rank`: lists of objects, ids as text."""
    log, shown, config, context = examples.log, examples.rows(index), examples.config, examples.context(index)

    def posts(of: Context | Candidates) -> list[dict[str, Any]]:
        columns = log.written(of.post_ids), log.written(of.author_ids), of.surfaces.tolist(), of.codes.tolist()
        return [
            {"post_id": post, "author_id": author, "product_surface": surface}
            | ({"codes": codes} if any(codes) else {})
            for post, author, surface, codes in zip(*columns, strict=True)
        ]

    history = [
        post
        | {"actions": [log.action_names[place] for place in np.flatnonzero(context.actions[event])]}
        | ({"dwell_time": round(float(context.dwell_seconds[event]), 1)} if config.has_dwell else {})
        for event, post in enumerate(posts(context))
    ]
    candidates = [
        post | {"created_at": int(log.created_at[row])}
        for row, post in zip(shown.tolist(), posts(examples.candidates(shown)), strict=True)
    ]
    user = log.ids("user_id", shown[:1])[0]
    return {"user_id": user, "history": history, "candidates": candidates, "impression_ts": int(examples.times[index])}


def _request(examples: Examples, user: str | None) -> int:
    sizes, events = examples.stops - examples.starts, examples.history_lengths
    fits = (sizes > 1) & (events > 0)
    if user is None:
        recent = np.arange(len(examples)) >= 0.9 * len(examples)
        fits = fits & recent if (fits & recent).any() else fits
    else:
        fits &= np.array(examples.log.ids("user_id", examples.starts)) == user
    if not fits.any():
        who = "of this user " if user is not None else ""
        raise TableError(f"no request {who}has a history and two candidates; the log covers {examples.log.span}")
    return int(np.argmax(np.where(fits, events * 1000 + np.minimum(sizes, 999), -1)))


def _names(examples: Examples, request: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """`names.json`: users with what they like most, authors, posts; those of the example, then the most frequent. The id 0, nobody, has no
    name."""
    log, events = examples.log, examples.events
    met = request["history"] + request["candidates"]
    first = {
        "users": [request["user_id"]],
        "authors": [post["author_id"] for post in met],
        "posts": [post["post_id"] for post in met],
    }
    (nobody,) = log.written(np.zeros(1, np.uint64))
    listed = {}
    for kind, most in MOST_NAMED.items():
        ids = dict.fromkeys([*first[kind], *_frequent(log, f"{kind[:-1]}_id", most)])
        ids.pop(nobody, None)
        listed[kind] = list(ids)[:most]

    def name(kind: str, id: str) -> str:
        named = names.get(kind, {}).get(id)
        return str(named.get("name", "") if isinstance(named, dict) else named or "") or f"{kind[:-1]} {id}"

    authors = {id: {"name": name("authors", id)} for id in listed["authors"]}
    has_topics = len(np.unique(log.author_id[log.author_id != 0])) <= MOST_TOPICS
    topics = [author["name"] for author in authors.values()] if has_topics else []
    for author in authors.values():
        author |= {"topic": author["name"]} if topics else {}
    likes = _liked_authors(events, set(listed["users"]))
    return {
        "topics": topics,
        "authors": authors,
        "users": {
            id: {"name": name("users", id), "likes": [name("authors", liked) for liked in likes.get(id, [])]}
            for id in listed["users"]
        },
        "posts": {id: {"name": name("posts", id)} for id in listed["posts"]},
    }


def _frequent(log: Log, column: str, most: int) -> list[str]:
    """The ids that come up most, as callers write them."""
    _, first, counts = np.unique(getattr(log, column), return_index=True, return_counts=True)
    return log.ids(column, first[np.argsort(-counts, kind="stable")[:most]])


def _liked_authors(events: Log, users: set[str]) -> dict[str, list[str]]:
    """The authors whom each of these users engaged with most."""
    rows = np.flatnonzero(events.author_id)
    engagements: dict[str, dict[str, int]] = {}
    for user, author in zip(events.ids("user_id", rows), events.ids("author_id", rows), strict=True):
        if user in users:
            counts = engagements.setdefault(user, {})
            counts[author] = counts.get(author, 0) + 1
    return {user: sorted(counts, key=lambda author: -counts[author])[:LIKED] for user, counts in engagements.items()}
