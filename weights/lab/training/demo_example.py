"""Picks the demo's example request: a user of its world whose ranking is easy for people to follow."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weights.lab.training.log import Log
from weights.lab.world.behaviour import NEGATIVE_ACTIONS
from weights.lab.world.population import interest
from weights.lab.world.settings import HOUR_SECONDS, SURFACES
from weights.lab.world.simulate import World
from weights.lab.world.store import world_names

EVENTS = 16
POST_AGE_HOURS = 3
OTHER_TOPICS = 4


def example_request(world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    """A request for `POST /rank`, and the names of its ids in the order of its lists.

    The user's last events are mostly about one topic, and the very last is a report of one of its authors. The candidates
    are equally old posts on the home surface: two authors of that topic, the reported one, and one author each of four others.
    """
    names = world_names(world)
    user, rows, topic = _reader(world)
    log = world.log.take(rows)
    reported = _authors_of(world, topic)[0]
    now = int(log.impression_ts[-1]) + HOUR_SECONDS
    history = [_event(log, index) for index in range(len(log))]
    history.append(
        _post(world, reported, int(log.impression_ts[-1]))
        | {"actions": ["report"], "product_surface": 0, "dwell_time": 1.5}
    )
    appeal = interest(world.users.latent, world.settings)[int(np.flatnonzero(world.users.ids == user)[0])]
    others = np.argsort(appeal)[:OTHER_TOPICS].tolist()  # the topics that this user likes least
    shown = [*_authors_of(world, topic)[1:3], reported, *(_authors_of(world, t)[0] for t in others)]
    # the order must not reveal the taste or the complaint
    shown = [shown[index] for index in np.random.default_rng(world.settings.seed).permutation(len(shown))]
    candidates = [
        _post(world, a, now) | {"product_surface": 0, "created_at": now - POST_AGE_HOURS * HOUR_SECONDS} for a in shown
    ]
    request = {"user_id": str(user), "history": history, "candidates": candidates, "impression_ts": now}
    story = {
        "user": names["users"][str(user)]["name"],
        "likes": names["topics"][topic],
        "reported": names["authors"][str(world.authors.ids[reported])]["name"],
        "history": [_who(names, event) for event in history],
        "candidates": [_who(names, post) for post in candidates],
    }
    return request, story


def _reader(world: World) -> tuple[int, NDArray[np.int64], int]:
    """The user whose last events are most about one topic, the rows of these events, and the topic."""
    log, topic_of = world.log, dict(zip(world.authors.ids.tolist(), world.authors.topic.tolist(), strict=True))
    complaint = np.isin(log.action_names, NEGATIVE_ACTIONS)
    liked = log.actions[:, ~complaint].any(1) & ~log.actions[:, complaint].any(1)
    # posts of followed authors tell whom the user follows, not what they like
    engaged = np.flatnonzero(liked & (log.product_surface != SURFACES.index("following")))
    engaged = engaged[np.argsort(log.user_id[engaged], kind="stable")]
    users, starts = np.unique(log.user_id[engaged], return_index=True)
    best: tuple[int, int, NDArray[np.int64], int] | None = None
    for user, rows in zip(users, np.split(engaged, starts[1:]), strict=True):
        last = rows[-EVENTS:]
        counts = np.bincount([topic_of[int(a)] for a in log.author_id[last]], minlength=world.settings.topics)
        if len(last) == EVENTS and (best is None or counts.max() > best[0]):
            best = (int(counts.max()), int(user), last, int(counts.argmax()))
    if best is None:
        raise ValueError(f"no user of the world has {EVENTS} events; draw a larger one")
    return best[1:]


def _authors_of(world: World, topic: int) -> list[int]:
    """Authors of a topic, those of average quality first: an example should not depend on an outstanding author."""
    authors = np.flatnonzero(world.authors.topic == topic)
    middle = np.median(world.authors.quality)
    return [int(author) for author in authors[np.argsort(np.abs(world.authors.quality[authors] - middle))]]


def _post(world: World, author: int, before: int) -> dict[str, Any]:
    """The author's newest post at the given time."""
    posts = np.arange(world.posts.first[author], world.posts.first[author + 1])
    old = posts[world.posts.created_at[posts] <= before]
    return {"post_id": str(world.posts.ids[old[-1]]), "author_id": str(world.authors.ids[author])}


def _event(log: Log, row: int) -> dict[str, Any]:
    return {
        "post_id": str(log.post_id[row]),
        "author_id": str(log.author_id[row]),
        "actions": [name for name, done in zip(log.action_names, log.actions[row], strict=True) if done],
        "product_surface": int(log.product_surface[row]),
        "dwell_time": round(float(log.dwell_seconds[row]), 1),
    }


def _who(names: dict[str, Any], post: dict[str, Any]) -> str:
    author = names["authors"][post["author_id"]]
    return f"{author['name']}, {author['topic']}"
